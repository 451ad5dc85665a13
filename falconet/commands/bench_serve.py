"""`falconet bench serve`: measure the throughput and latency of a served model, as clients see them."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from falconet import writing
from falconet.bench import load_test
from falconet.bench.client import Job, Outcome
from falconet.bench.execution import terminated_as_interrupted
from falconet.bench.load_test import Target, Tensors, Together
from falconet.bench.measurements import Measured, leave, settled
from falconet.checkpoint import format
from falconet.commands import bench_servers
from falconet.config.commands import BenchServeOptions
from falconet.config.fields import options_of
from falconet.config.load import Loaded
from falconet.config.settings import LINE, Setting
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.errors import ConfigError, WorldError, named_option
from falconet.export import checks
from falconet.infer.predictor import Pixels, Predictor
from falconet.numerics.precision import REGIMES
from falconet.parallel.world import ALONE
from falconet.report import inference as lines
from falconet.report.console import Say, Screen, counted
from falconet.report.styles import FALCONET, Conventions
from falconet.train.saved_model import refuse_download

HELD = 8  # different batches, used in turn
TURNS = 5  # of each server, where several are compared; --iterations is divided between them
MOST = 1000  # requests per client: a config for local batches asks for minutes more
BATCHING = ("max-batch", "max-delay")  # what Triton's server is told too
# Relative to an image's largest score, by compute format: the originals' 1e-5, and what other shapes and kernels change
# in half precision.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def run(loaded: Loaded[BenchServeOptions], conventions: Conventions = FALCONET) -> int:
    line, screen = loaded.line, Screen()
    options, note = _options(loaded, screen), _each_once(screen.line)
    _note_unused(options, line, screen)
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminated_as_interrupted())
        count = options.load.client_cores
        cores = stack.enter_context(load_test.cores_apart(count)) if count else ()
        home = stack.enter_context(writing.scratch())
        targets = stack.enter_context(bench_servers.opened(options, line, note))
        servers = {
            name: server._replace(job=replace(server.job, cores=cores))
            for name, server in _servers(options, targets, Path(home)).items()
        }
        if options.load.check_answers:
            servers = _with_expected(servers, options, line, note)
        if len(servers) > 1:
            outcomes = _compare(servers, options, screen)
        else:
            ((name, server),) = servers.items()
            outcomes = {name: _measure(server, options, screen, conventions)}
    return _check(outcomes, servers, screen) if options.load.check_answers else 0


def _each_once(say: Say) -> Say:
    """The model is opened twice, to export it and to check answers, with the same notes."""
    said = set()

    def once(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    return once


class Server(NamedTuple):
    """A server, and what is sent to it."""

    target: Target
    tensors: Tensors
    job: Job


Outcomes = dict[str, list[Outcome]]  # of the clients of each server, by its name


def _options(loaded: Loaded[BenchServeOptions], screen: Screen) -> BenchServeOptions:
    """The line's, over those of the checkpoint if it names one."""
    path = loaded.options.input.checkpoint_input_path
    if path is None or path.is_file():
        return loaded.options
    loaded = loaded.over(format.choose(path, loaded.options.choice.checkpoint, screen.line).manifest.config)
    refuse_download(loaded)
    return loaded.options


def _note_unused(options: BenchServeOptions, line: Sequence[Setting], screen: Screen) -> None:
    """Note the options of the line that have no effect here, or less than usual."""
    if options.data.iterations > MOST:
        screen.line(f"note: {MOST:,} of {options.data.iterations:,} requests of each client are sent, which is enough")
    known = options_of(BenchServeOptions)
    typed = {setting.option.removeprefix("no-") for setting in line if setting.source == LINE}
    if options.load.url is not None:
        for name in sorted(name for name in typed if known[name].path[0] == "serving"):
            screen.line(f"note: --{name} has no effect with --url, whose server is already running")
    if options.load.server == "triton":
        for name in sorted(name for name in typed if known[name].path[0] == "serving" and name not in BATCHING):
            screen.line(f"note: --{name} has no effect on Triton's server")
    if options.load.request_type == "SYNC" and "window" in typed:
        screen.line("note: --window has no effect without --request-type ASYNC")


def _servers(options: BenchServeOptions, targets: Mapping[str, Target], folder: Path) -> dict[str, Server]:
    """The requests for each server: the same pixels, in the order that its model takes."""
    tensors = {name: Tensors.of(target) for name, target in targets.items()}
    sizes = {one.image_size for one in tensors.values()}
    assert len(sizes) == 1, "all servers have the same model"
    count = min(options.data.iterations, MOST)
    data = replace(options.data, image_size=sizes.pop(), eight_bit_io=True, normalization_location="device")
    pixels = _batches(replace(options, data=data), min(HELD, count))
    paths = {last: folder / f"images{int(last)}.npy" for last in {one.channels_last for one in tensors.values()}}
    for last, path in paths.items():
        np.save(path, np.ascontiguousarray(pixels.transpose(0, 1, 3, 4, 2)) if last else pixels)
    return {
        name: Server(
            target,
            tensors[name],
            Job(
                protocol=target.protocol,
                host=target.host,
                port=target.port,
                base=target.base,
                model=target.model,
                input=tensors[name].input,
                output=tensors[name].output,
                images=str(paths[tensors[name].channels_last]),
                expected=None,
                tolerance=TOLERANCES[torch.float32],
                window=bench_servers.window(options),
                count=count,
            ),
        )
        for name, target in targets.items()
    }


def _batches(options: BenchServeOptions, held: int) -> Pixels:
    """Pixels of the validation images, repeated until there are enough: batches x N x 3 x S x S."""
    size = options.data.micro_batch
    shape, regime = BatchShape(micro_batch=size), REGIMES[options.machine.precision]
    images = bench_servers.images(options)
    reading = Input(data=options.data, regime=regime, world=ALONE, note=Screen().line)
    loader = reading.evaluation_loader(images, shape=shape)
    found = torch.cat([batch.images.clone() for batch in islice(loader.batches(), held)])
    rows = np.arange(held * size) % len(found)
    return found.numpy()[rows].reshape(held, size, *found.shape[1:])


def _with_expected(
    servers: Mapping[str, Server], options: BenchServeOptions, line: Sequence[Setting], note: Say
) -> dict[str, Server]:
    """The same jobs with the scores that this process computes, in batches of the same size."""
    classifier, _ = bench_servers.open_model(options, line, note)
    predictor = Predictor(classifier, max_batch=options.data.micro_batch, captured=False)
    tolerance = TOLERANCES[classifier.regime.formats(classifier.device)["activations"]]
    found = {}
    for name, server in servers.items():
        images = np.load(server.job.images)
        pixels = images.transpose(0, 1, 4, 2, 3) if server.tensors.channels_last else images
        expected = [predictor.logits(torch.from_numpy(batch)).cpu().numpy() for batch in pixels]
        path = Path(server.job.images).with_name(f"expected-{name}.npy")
        np.save(path, np.stack(expected))
        # Where another library computes, its own test of an exported model holds.
        converted = classifier.device.type == "cpu" and options.serving.engine != "torch"
        least = checks.TOLERANCE if converted or name == bench_servers.TRITON else 0.0
        found[name] = server._replace(job=replace(server.job, expected=str(path), tolerance=max(tolerance, least)))
    return found


def _measure(server: Server, options: BenchServeOptions, screen: Screen, conventions: Conventions) -> list[Outcome]:
    """Measure one server."""
    clients, job = options.load.clients, server.job
    outcomes = load_test.run_clients(job, clients)
    counts = _executions(server.target)
    found = load_test.together(outcomes, in_flight=clients * job.window)
    _show(found, options, server.tensors, screen, conventions)
    if counts:
        screen.line(f"server: {counts} since it started")
    _write(_times(found, options), options)
    return outcomes


def _compare(servers: Mapping[str, Server], options: BenchServeOptions, screen: Screen) -> Outcomes:
    """Measure several servers in turns, so that a change of the machine's speed meets all of them, and compare."""
    clients = options.load.clients
    count = max(-(-min(options.data.iterations, MOST) // TURNS), load_test.DROPPED + 1)
    turns: dict[str, list[Together]] = {name: [] for name in servers}
    outcomes: Outcomes = {name: [] for name in servers}
    for turn in range(TURNS + 1):
        for name in list(servers)[:: 1 if turn % 2 else -1]:  # the first of a turn is the last of the one before
            job = servers[name].job
            of_turn = load_test.run_clients(replace(job, count=count), clients)
            outcomes[name] += of_turn
            if turn:  # the first turn is a warm-up
                turns[name].append(load_test.together(of_turn, in_flight=clients * job.window))
    screen.line(f"served to {_clients(options)}, {TURNS} turns of {counted(count, 'request')} of each client:")
    for name, server in servers.items():
        latency = Measured(latencies=[1000 * time for one in turns[name] for time in one.latencies]).latency()
        counts = _executions(server.target)
        screen.line(f"{name:8}  {_of_turns(_rates(turns[name], options))} images/s, {counts}")
        screen.line(f"{name:8}  latency of a request in ms: {lines.percentiles(latency)}")
    (first, ours), (second, theirs) = ((name, _rates(turns[name], options)) for name in servers)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    screen.line(f"{first} / {second}: {_of_turns(ratios, digits=2)}")
    content = {name: [_times(one, options) for one in each] for name, each in turns.items()}
    _write({"model": options.model.model, "turns": content, "ratios": ratios}, options)
    return outcomes


def _rates(turns: Sequence[Together], options: BenchServeOptions) -> list[float]:
    """Images per second of each turn."""
    size = options.data.micro_batch
    return [size * one.requests * len(one.spacing) / sum(one.spacing) for one in turns]


def _of_turns(values: Sequence[float], digits: int = 1) -> str:
    low, high = min(values), max(values)
    return f"{median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _executions(target: Target) -> str:
    """How requests were batched, if the server reports it."""
    try:
        (stats,) = target.statistics()["model_stats"]
        return f"{counted(stats['inference_count'], 'image')} in {counted(stats['execution_count'], 'batch')}"
    except (ConfigError, KeyError, TypeError, ValueError):
        return ""


def _show(
    found: Together, options: BenchServeOptions, tensors: Tensors, screen: Screen, conventions: Conventions
) -> None:
    measured = settled(found.spacing, found.latencies, images=found.requests * options.data.micro_batch)
    assert measured.throughput is not None
    steady = measured.steady
    predictions = lines.Predictions(
        model=options.model.model,
        micro_batch=options.data.micro_batch,
        data=options.data.data,
        dtype=tensors.datatype,
        devices=1,
        rates=measured.rates,
        latencies=measured.latencies,
    )
    for text in conventions.predictions(predictions):
        screen.line(text)
    spread = measured.spread()
    screen.line(f"served to {_clients(options)}: {lines.rate(measured.throughput, low=spread.low, high=spread.high)}")
    screen.line(f"served: latency of a request in ms: {lines.percentiles(measured.latency())}")
    dropped = min(load_test.DROPPED, min(options.data.iterations, MOST) - 1)
    screen.line(
        f"the first {counted(dropped, 'request')} of each client dropped, then {steady.first} of {len(found.spacing)}"
        f" stretches of {found.requests} as warm-up ({steady.verdict})"
    )


def _clients(options: BenchServeOptions) -> str:
    load = options.load
    how = ["SYNC"] if load.request_type == "SYNC" else ["ASYNC", f"{counted(load.window, 'request')} in flight each"]
    if load.protocol == "grpc":
        how.append("gRPC")
    if load.client_cores:
        how.append(f"on {counted(load.client_cores, 'core')} of their own")
    return ", ".join([counted(load.clients, "client"), *how])


def _times(found: Together, options: BenchServeOptions) -> dict[str, object]:
    """Every time, as `bench infer` writes it."""
    return {
        "images_per_batch": found.requests * options.data.micro_batch,
        "model": options.model.model,
        "throughput_seconds": found.spacing,
        "latency_seconds": found.latencies,
    }


def _write(content: Mapping[str, object], options: BenchServeOptions) -> None:
    """For `falconet bench` and --output."""
    with named_option("output"):
        leave(content, output=options.load.output)


def _check(outcomes: Outcomes, servers: Mapping[str, Server], screen: Screen) -> int:
    """Report how well the answers agree; exit code 1 if some do not."""
    for (name, found), server in zip(outcomes.items(), servers.values(), strict=True):
        answers, wrong = sum(len(one.times) for one in found), sum(one.wrong for one in found)
        apart, limit = max(one.apart for one in found), server.job.tolerance
        text = f"the largest difference is {apart:.1e} of an image's largest score, expected at most {limit:g}"
        label = f"{name}: " if len(servers) > 1 else ""
        if wrong:
            raise WorldError(
                f"{label}{wrong} of {counted(answers, 'answer')} differ from the model's output here: {text}"
            )
        screen.line(f"{label}all {answers} answers match the model's output here: {text}")
    return 0
