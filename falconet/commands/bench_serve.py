"""`falconet bench serve`: measure the throughput and latency of a served model, as clients see them."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from falconet import writing
from falconet.bench import load_test
from falconet.bench.client import Job, Outcome
from falconet.bench.execution import terminated_as_interrupted
from falconet.bench.load_test import Target, Tensors, Together
from falconet.bench.measurements import leave, settled
from falconet.checkpoint import format
from falconet.config.commands import BenchServeOptions, ServeOptions
from falconet.config.fields import options_of
from falconet.config.load import Loaded, of_command
from falconet.config.settings import LINE, Setting, spelled
from falconet.data.dataset import Dataset, open_to_measure
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.errors import ConfigError, WorldError, named_option
from falconet.infer.predictor import Pixels, Predictor, open_served
from falconet.numerics.precision import REGIMES
from falconet.parallel.world import ALONE
from falconet.report import inference as lines
from falconet.report.console import Screen, counted
from falconet.report.styles import FALCONET, Conventions
from falconet.train.saved_model import refuse_download

HELD = 8  # different batches, used in turn
MOST = 1000  # requests per client: a config for local batches asks for minutes more
# Relative to an image's largest score, by compute format: the originals' 1e-5, and what other shapes and kernels change
# in half precision.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def run(loaded: Loaded[BenchServeOptions], conventions: Conventions = FALCONET) -> int:
    line, screen = loaded.line, Screen()
    options = _options(loaded, screen)
    _note_unused(options, line, screen)
    with terminated_as_interrupted(), writing.scratch() as home, _target(options, line) as target:
        tensors = Tensors.of(target)
        job = _job(options, target, tensors, Path(home))
        if options.load.check_answers:
            job = _with_expected(job, options, line, screen)
        outcomes = load_test.run_clients(job, options.load.clients)
        counts = _executions(target)
    found = load_test.together(outcomes, in_flight=options.load.clients * job.window)
    _show(found, options, tensors, screen, conventions)
    if counts:
        screen.line(counts)
    _write(found, options)
    return _check(outcomes, job, screen) if options.load.check_answers else 0


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
    if options.load.request_type == "SYNC" and "window" in typed:
        screen.line("note: --window has no effect without --request-type ASYNC")


@contextlib.contextmanager
def _target(options: BenchServeOptions, line: Sequence[Setting]) -> Iterator[Target]:
    if options.load.url is not None:
        with named_option("url"):
            target = Target.at(options.load.url, options.model.model)
            target.get()  # fails now, with the option's name, if no server answers
        yield target
        return
    with load_test.started(["serve", *_server_line(options, line)]) as target:
        yield target


def _server_line(options: BenchServeOptions, line: Sequence[Setting]) -> list[str]:
    """The options of the server: those of the line that it has too, and what only its measurement knows."""
    own = {setting.option: setting for setting in of_command(ServeOptions, line)}
    batch, most = options.data.micro_batch, options.serving.max_batch
    if most != "auto" and most < batch:
        raise ConfigError(
            f"--max-batch: got {most}, expected at least --micro-batch-size, the {batch} images of one request"
        )
    added: dict[str, object] = {}
    if options.serving.port == "auto":
        added["port"] = 0
    if options.serving.max_batch == "auto":
        added["max-batch"] = batch
    if options.serving.max_queue == "auto":
        added["max-queue"] = batch * options.load.clients * _window(options)
    if options.input.checkpoint_input_path is None:
        images = _images(options)
        added |= {
            "model": options.model.model,
            "image-size": images.preprocessing.image_size,
            "classes": images.classes,
        }
    settings = own | {name: Setting(name, spelled(value), LINE) for name, value in added.items()}
    return [word for setting in settings.values() for word in setting.argv()]


def _window(options: BenchServeOptions) -> int:
    return options.load.window if options.load.request_type == "ASYNC" else 1


def _images(options: BenchServeOptions) -> Dataset:
    data = options.data
    if data.data == "synthetic":
        raise ConfigError(
            "--data synthetic: exists only on the device, but requests come from the host; expected generated"
        )
    return open_to_measure(data, model=options.model.model, global_batch=data.micro_batch, seed=0)


def _job(options: BenchServeOptions, target: Target, tensors: Tensors, folder: Path) -> Job:
    count = min(options.data.iterations, MOST)
    data = replace(options.data, image_size=tensors.image_size, eight_bit_io=True, normalization_location="device")
    np.save(folder / "images.npy", _batches(replace(options, data=data), min(HELD, count)))
    return Job(
        host=target.host,
        port=target.port,
        path=f"{target.path}/infer",
        input=tensors.input,
        output=tensors.output,
        images=str(folder / "images.npy"),
        expected=None,
        tolerance=TOLERANCES[torch.float32],
        window=_window(options),
        count=count,
    )


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


def _with_expected(job: Job, options: BenchServeOptions, line: Sequence[Setting], screen: Screen) -> Job:
    """The same job with the scores that this process computes, in batches of the same size."""
    argv = of_command(ServeOptions, line)
    images = np.load(job.images)
    if options.input.checkpoint_input_path is None:
        classes = _images(options).classes
        argv += [
            Setting(name, (str(value),), LINE)
            for name, value in {
                "model": options.model.model,
                "image-size": images.shape[-1],
                "classes": classes,
            }.items()
        ]
    classifier, _ = open_served(argv, screen.line)
    predictor = Predictor(classifier, max_batch=images.shape[1], captured=False)
    expected = np.stack([predictor.logits(torch.from_numpy(batch)).cpu().numpy() for batch in images])
    path = Path(job.images).with_name("expected.npy")
    np.save(path, expected)
    return replace(
        job, expected=str(path), tolerance=TOLERANCES[classifier.regime.formats(classifier.device)["activations"]]
    )


def _executions(target: Target) -> str:
    """How requests were batched, if the server reports it."""
    try:
        (stats,) = target.get("/stats")["model_stats"]
        batches = counted(stats["execution_count"], "batch")
        return f"server: {counted(stats['inference_count'], 'image')} in {batches} since it started"
    except (ConfigError, KeyError, TypeError, ValueError):
        return ""


def _show(
    found: Together, options: BenchServeOptions, tensors: Tensors, screen: Screen, conventions: Conventions
) -> None:
    measured = settled(found.spacing, found.latencies, images=found.requests * options.data.micro_batch)
    assert measured.throughput is not None
    steady, load = measured.steady, options.load
    if load.request_type == "ASYNC":
        clients = f"{counted(load.clients, 'client')}, ASYNC, {counted(load.window, 'request')} in flight each"
    else:
        clients = f"{counted(load.clients, 'client')}, SYNC"
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
    screen.line(f"served to {clients}: {lines.rate(measured.throughput, low=spread.low, high=spread.high)}")
    screen.line(f"served: latency of a request in ms: {lines.percentiles(measured.latency())}")
    dropped = min(load_test.DROPPED, min(options.data.iterations, MOST) - 1)
    screen.line(
        f"the first {counted(dropped, 'request')} of each client dropped, then {steady.first} of {len(found.spacing)}"
        f" stretches of {found.requests} as warm-up ({steady.verdict})"
    )


def _write(found: Together, options: BenchServeOptions) -> None:
    """Write every time as `bench infer` does, for `falconet bench` and --output."""
    content = {
        "images_per_batch": found.requests * options.data.micro_batch,
        "model": options.model.model,
        "throughput_seconds": found.spacing,
        "latency_seconds": found.latencies,
    }
    with named_option("output"):
        leave(content, output=options.load.output)


def _check(outcomes: Sequence[Outcome], job: Job, screen: Screen) -> int:
    """Report how well the answers agree; exit code 1 if some do not."""
    answers, wrong = sum(len(one.times) for one in outcomes), sum(one.wrong for one in outcomes)
    apart = max(one.apart for one in outcomes)
    text = f"the largest difference is {apart:.1e} of an image's largest score, expected at most {job.tolerance:g}"
    if wrong:
        raise WorldError(f"{wrong} of {counted(answers, 'answer')} differ from the model's output here: {text}")
    screen.line(f"all {answers} answers match the model's output here: {text}")
    return 0
