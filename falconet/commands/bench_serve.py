"""`falconet bench serve`: measure the throughput and latency of a served model, as clients see them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from falconet import writing
from falconet.bench import load_test, triton_server
from falconet.bench.client import Job, Outcome
from falconet.bench.execution import terminated_as_interrupted
from falconet.bench.load_test import Target, Tensors, Together
from falconet.bench.measurements import Measured, leave, settled
from falconet.checkpoint import format
from falconet.config.commands import BenchServeOptions, ServeOptions
from falconet.config.fields import options_of
from falconet.config.load import Loaded, of_command
from falconet.config.settings import LINE, Setting, spelled
from falconet.data.dataset import Dataset, open_to_measure
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.errors import ConfigError, WorldError, named_option
from falconet.evaluation.saved_model import refuse_download
from falconet.export import checks, triton_repository
from falconet.export.formats import ONNX, save_onnx
from falconet.export.graph import Graph
from falconet.export.triton_repository import MODELS, Scheduling
from falconet.infer.classifier import Classifier
from falconet.infer.predictor import Pixels, Predictor, open_served
from falconet.numerics.precision import REGIMES
from falconet.parallel.world import ALONE
from falconet.report import inference as lines
from falconet.report.console import Say, Screen, counted
from falconet.report.styles import FALCONET, Conventions

RUNNING, OURS, TRITON = "server", "falconet", "triton"  # what a server is called in the results
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
        found = stack.enter_context(targets(options, line, note))
        servers = {
            name: server._replace(job=replace(server.job, cores=cores))
            for name, server in _servers(options, found, Path(home)).items()
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


# The servers: Falconet's and Triton's, started with the same model, or a running one.


@contextlib.contextmanager
def targets(options: BenchServeOptions, line: Sequence[Setting], say: Say) -> Iterator[dict[str, Target]]:
    """The servers to measure, by name; those that were started are stopped at the end."""
    load = options.load
    if load.url is not None:
        with named_option("url"):
            target = Target.at(load.url, options.model.model, load.protocol)
            target.metadata()  # fails now, with the option's name, if no server answers
        yield {RUNNING: target}
        return
    kinds = (OURS, TRITON) if load.server == "both" else (load.server,)
    starts = {OURS: _falconet, TRITON: _triton}
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(starts[name](options, line, say)) for name in kinds}


@contextlib.contextmanager
def _falconet(options: BenchServeOptions, line: Sequence[Setting], _: Say) -> Iterator[Target]:
    with load_test.started(["serve", *_server_line(options, line)], options.load.protocol) as target:
        yield target


@contextlib.contextmanager
def _triton(options: BenchServeOptions, line: Sequence[Setting], say: Say) -> Iterator[Target]:
    """NVIDIA's server with the same model, as many threads, and the same limits of a batch."""
    classifier, _ = _open_model(options, line, say)
    if classifier.device.type == "cuda" and triton_server.find().packages is not None:
        raise ConfigError("--server triton: PyPI's tritonserver computes on the CPU; expected --device cpu as well")
    most = _max_batch(options)
    scheduling = Scheduling(
        max_batch=most,
        delay=round(1000 * options.serving.max_delay),
        threads=torch.get_num_threads() if classifier.device.type == "cpu" else None,
    )
    with writing.scratch() as home:
        folder = Path(home)
        graph = _graph(classifier, options, say)
        save_onnx(graph, triton_repository.write(graph, folder, scheduling) / ONNX)
        with triton_server.started(folder / MODELS, models=[graph.name]) as running:
            ports = running.ports
            port = ports.grpc if options.load.protocol == "grpc" else ports.http
            yield Target(protocol=options.load.protocol, host=triton_server.HOST, port=port, model=graph.name)


def _graph(classifier: Classifier, options: BenchServeOptions, say: Say) -> Graph:
    """The model that Falconet serves, with its weights as they were rounded."""
    if classifier.tta != "none":
        raise ConfigError("--server triton: the run averages several views of an image; an exported model has only one")
    computed = classifier.regime.formats(classifier.device)["activations"]
    if computed == torch.bfloat16:
        say("note: Triton computes in fp32, Falconet in bf16")
    return Graph(
        name=classifier.served_name,
        options=replace(options.model, model=classifier.name),
        model=classifier.model.cpu().float().eval(),
        preprocessing=classifier.preprocessing,
        class_names=classifier.class_names,
        activation=classifier.activation,
        takes_pixels=True,
        half=computed == torch.float16,
    )


def _open_model(options: BenchServeOptions, line: Sequence[Setting], say: Say) -> tuple[Classifier, ServeOptions]:
    """The model that the servers have, in this process."""
    added = {} if options.input.checkpoint_input_path else _untrained(options)
    settings = [Setting(name, spelled(value), LINE) for name, value in added.items()]
    return open_served([*of_command(ServeOptions, line), *settings], say)


def _max_batch(options: BenchServeOptions) -> int:
    """Images that a server computes at once."""
    batch, most = options.data.micro_batch, options.serving.max_batch
    if most == "auto":
        return batch
    if most < batch:
        raise ConfigError(
            f"--max-batch: got {most}, expected at least --micro-batch-size, the {batch} images of one request"
        )
    return most


def _server_line(options: BenchServeOptions, line: Sequence[Setting]) -> list[str]:
    """The options of our server: those of the line that it has too, and what only its measurement knows."""
    own = {setting.option: setting for setting in of_command(ServeOptions, line)}
    added: dict[str, object] = {"max-batch": _max_batch(options)}
    if options.serving.port == "auto":
        added["port"] = 0
    if options.serving.max_queue == "auto":
        added["max-queue"] = options.data.micro_batch * options.load.clients * _window(options)
    if options.input.checkpoint_input_path is None:
        added |= _untrained(options)
    settings = own | {name: Setting(name, spelled(value), LINE) for name, value in added.items()}
    return [word for setting in settings.values() for word in setting.argv()]


def _untrained(options: BenchServeOptions) -> dict[str, object]:
    """The options of a model with random weights for the images that are sent."""
    data = _images(options)
    return {"model": options.model.model, "image-size": data.preprocessing.image_size, "classes": data.classes}


def _window(options: BenchServeOptions) -> int:
    """Requests that a client has in flight."""
    return options.load.window if options.load.request_type == "ASYNC" else 1


def _images(options: BenchServeOptions) -> Dataset:
    data = options.data
    if data.data == "synthetic":
        raise ConfigError(
            "--data synthetic: exists only on the device, but requests come from the host; expected generated"
        )
    return open_to_measure(data, model=options.model.model, global_batch=data.micro_batch, seed=0)


# What is sent, and what comes back.


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
                window=_window(options),
                count=count,
            ),
        )
        for name, target in targets.items()
    }


def _batches(options: BenchServeOptions, held: int) -> Pixels:
    """Pixels of the validation images, repeated until there are enough: batches x N x 3 x S x S."""
    size = options.data.micro_batch
    shape, regime = BatchShape(micro_batch=size), REGIMES[options.machine.precision]
    images = _images(options)
    reading = Input(data=options.data, regime=regime, world=ALONE, note=Screen().line)
    loader = reading.evaluation_loader(images, shape=shape)
    found = torch.cat([batch.images.clone() for batch in islice(loader.batches(), held)])
    rows = np.arange(held * size) % len(found)
    return found.numpy()[rows].reshape(held, size, *found.shape[1:])


def _with_expected(
    servers: Mapping[str, Server], options: BenchServeOptions, line: Sequence[Setting], note: Say
) -> dict[str, Server]:
    """The same jobs with the scores that this process computes, in batches of the same size."""
    classifier, _ = _open_model(options, line, note)
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
        least = checks.TOLERANCE if converted or name == TRITON else 0.0
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
