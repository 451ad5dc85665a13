"""The PyTorch original's programs, and its benchmark runner, `python3 -m examples_utils benchmark`."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from falconet.errors import ConfigError
from falconet.legacy.pytorch_training import COMMON, IMAGENET, OFFLINE, TRAINING, first_weights
from falconet.legacy.table import Effect, Needs, Note, Program, To, Values, becomes, nothing, part_of, same, unused

BOXES = "imagenet_2012_bounding_boxes.csv"
# The name of a served test, as pytest gives it: test_single_model[resnet50-resnet50-RequestType.SYNC-1].
_SERVED = {
    "model": re.compile(r"(?<![\w-])(resnet50|efficientnet-b0|efficientnet-b4)(?![\w])"),
    "request type": re.compile(r"(?<![A-Za-z])(SYNC|ASYNC)(?![A-Za-z])"),
    "number of processes": re.compile(r"(?:SYNC-|[^\w.-])(\d+)(?!\w)"),
}
_SERVED_REQUESTS = "200"  # per client, a micro-batch each
_FIRST = ("resnet50", "SYNC", "1")


def own(old: Values) -> Iterable[Effect]:
    """The trainer's fixed behaviour, without an option."""
    yield from first_weights(old)
    require_partners(old)
    yield To("checkpoints-kept", ("all",))  # the original removed none


def require_partners(old: Values) -> None:
    """Refuse fewer than three images for cutmix, or four with mixup: an image's partner is the second before it."""
    low, high, mixes = (old.number(f"--{name}") for name in ("cutmix-lambda-low", "cutmix-lambda-high", "mixup-alpha"))
    size, least = old.whole("--micro-batch-size"), 4 if mixes else 3
    if (low, high) not in ((0, 0), (1, 1)) and size < least:
        asked_by = f"--cutmix-lambda-low and -high{' with --mixup-alpha' if mixes else ''}"
        raise ConfigError(f"--micro-batch-size: got {size}, expected at least {least} for {asked_by}")


def samples(old: Values) -> Iterable[Effect]:
    """The folder of sample photos, which `make get-data` puts beside the program's folder."""
    above = old.place.folder.parent if old.place.folder else Path()
    folder = above / "data" / "images"
    yield To("data", ("folder",))
    yield To("data-dir", (str(folder),))
    how = f"`make get-data` in {above} puts sample photos there, your own can be copied there, and --data generated"
    yield Needs(folder, f"{how} needs none")


def inference_data(old: Values) -> Iterable[Effect]:
    """The original read its sample photos once and repeated them; ours is any folder of photos."""
    if old.text("--data") == "real":
        yield from samples(old)
    else:
        yield To("data", (old.text("--data"),))


def weights(old: Values) -> Iterable[Effect]:
    """Published weights by default, random ones on a machine without a network.

    None were published for the original's MobileNetV3.
    """
    unpublished = old.text("--model").startswith("mobilenet-v3")
    yield To("weights", ("random" if old.flag("--random-weights") or unpublished else "auto",))


def device_batches(old: Values) -> Iterable[Effect]:
    if old.whole("--device-iterations") > 1:
        yield Note("--device-iterations: the host starts every batch; the number of batches is scaled")


def strategy(old: Values) -> Iterable[Effect]:
    """The original did nothing by default, contrary to its documents."""
    kind = old.text("--weight-avg-strategy")
    if kind == "none":
        yield Note("--weight-avg-strategy none: the mean is taken, because averaging is all that this program does")
    yield To("weight-avg-strategy", ("mean" if kind == "none" else kind,))


def served_test(old: Values) -> Iterable[Effect]:
    """The effects of running one of the originals' tests by its pytest name; choices that -k leaves open are noted."""
    expression = old.text("-k") if old.has("-k") else ""
    found = {name: set(pattern.findall(expression)) for name, pattern in _SERVED.items()}
    if expression and not found["model"]:
        example = "test_single_model[resnet50-resnet50-RequestType.SYNC-1]"
        raise ConfigError(
            f"-k: got '{expression}', expected a test of resnet50, efficientnet-b0 or -b4, such as {example}"
        )
    chosen = {name: _one(name, values, default) for (name, values), default in zip(found.items(), _FIRST, strict=True)}
    for name, values in found.items():
        if len(values) != 1:
            chose = f"of several, only {chosen[name]} is run" if values else f"{chosen[name]}, because it names none"
            yield Note(f"-k: {name}: {chose}")
    model, kind, processes = chosen.values()
    yield To("config", (model,))
    yield To("request-type", (kind,))
    yield To("clients", (processes,))
    yield To("iterations", (_SERVED_REQUESTS,))
    if old.has("--model-repository"):
        yield To("checkpoint-input-path", (f"{old.text('--model-repository').rstrip('/')}/{model}",))


def _one(name: str, values: set[str], default: str) -> str:
    return min(values, key=int if name == "number of processes" else str) if values else default


def served_check(old: Values) -> Iterable[Effect]:
    """Any value turns it on, as in the original, even false."""
    if not old.given("--benchmark_only"):
        yield To("check-answers")


def served_port(old: Values) -> Iterable[Effect]:
    if old.has("--grpc-port"):
        yield To("port", (old.text("--grpc-port"),))
        yield Note("--grpc-port: the server uses it for HTTP, not gRPC")


def bench_data(old: Values) -> Iterable[Effect]:
    """The original used the boxes of objects, and needed their file."""
    kind = old.text("--data")
    if kind == "real":
        yield from samples(old)
    else:
        yield To("data", (kind,))
    if kind == "imagenet" and Path(_imagenet(old), BOXES).is_file():
        yield To("use-bbox-info")
        yield To("object-overlap", ("crop",))


def bench_path(old: Values) -> Iterable[Effect]:
    if old.text("--data") == "imagenet":
        if old.given("--imagenet-data-path") or not old.place.environment.get("DATA_DIR"):
            yield To("data-dir", (_imagenet(old),))
    elif old.given("--imagenet-data-path"):
        yield Note(f"--imagenet-data-path: has no effect with --data {old.text('--data')}")


def _imagenet(old: Values) -> str:
    stored = old.text("--imagenet-data-path")
    return stored if old.given("--imagenet-data-path") else old.place.environment.get("DATA_DIR") or stored


def bench_place(old: Values) -> Iterable[Effect]:
    place = old.text("--normalization-location")
    on_device = place == "ipu" or old.flag("--eight-bit-io")
    yield To("normalization-location", ("device" if on_device else "host",))


def bench_eight_bit(old: Values) -> Iterable[Effect]:
    yield To("eight-bit-io" if old.flag("--eight-bit-io") else "no-eight-bit-io")


def bench_workers(old: Values) -> Iterable[Effect]:
    in_loop = old.flag("--disable-async-loading")
    yield To("dataloader-workers", ("0" if in_loop else old.text("--dataloader-worker"),))
    if in_loop and old.given("--dataloader-worker"):
        yield Note("--dataloader-worker: has no effect with --disable-async-loading")


def bench_model(_: Values) -> Iterable[Effect]:
    yield To("model", ("resnet50",))


def digest(old: Values) -> Iterable[Effect]:
    yield from bench_model(old)
    yield To("data", ("imagenet",))
    yield To("md5")


_SHARED = {option.name: option for option in COMMON}
_PREDICTED = {  # what differs without training
    "--pipeline-splits": replace(_SHARED["--pipeline-splits"], effect="stages on as many devices, layers by our names"),
    "--iterations": replace(_SHARED["--iterations"], effect="times --device-iterations: batches, at most 2,000"),
    "--device-iterations": replace(
        _SHARED["--device-iterations"],
        rule=device_batches,
        new=("iterations",),
        effect="scales --iterations; the host starts every batch",
    ),
    "--batchnorm-momentum": unused(_SHARED["--batchnorm-momentum"], "is for training"),
}
_CHECKPOINT = same("--checkpoint-input-path", "text", required=True, aliases=("--checkpoint-path",))
_CHECKPOINTS = becomes(
    "--checkpoint-input-path",
    "text",
    None,
    "checkpoint-input-path checkpoint",
    lambda old: (To("checkpoint-input-path", (old.text("--checkpoint-input-path"),)), To("checkpoint", ("all",))),
    "the same, with --checkpoint all: each checkpoint in a folder is measured",
    required=True,
    aliases=("--checkpoint-path",),
)
PROGRAMS = (
    Program(
        name="pytorch:train.py",
        options=(*COMMON, *TRAINING),
        command="train",
        about="trains from scratch",
        conventions="pytorch",
        rule=own,
    ),
    Program(
        name="pytorch:restore.py",
        options=(_CHECKPOINT,),
        command="restore",
        about="continues a run from a checkpoint",
        whole=False,
        conventions="pytorch",
    ),
    Program(
        name="pytorch:validate.py",
        options=(_CHECKPOINTS,),
        command="validate",
        about="the accuracy of a checkpoint, or of each one in a folder",
        whole=False,
        conventions="pytorch",
    ),
    Program(
        name="pytorch:weight_avg.py",
        options=(
            _CHECKPOINT,
            same("--checkpoint-output-path", "text"),
            becomes(
                "--weight-avg-strategy",
                "text",
                "none",
                "weight-avg-strategy",
                strategy,
                "the same; none becomes mean, because averaging is all that the program does",
                choices=("mean", "exponential", "none"),
            ),
            same("--weight-avg-exp-decay", "number", "0.99"),
            same("--weight-avg-N", "whole", "-1"),
        ),
        command="average",
        about="averages the checkpoints of a run",
        whole=False,
    ),
    Program(
        name="pytorch:inference/run_benchmark.py",
        options=(
            *(_PREDICTED.get(option.name, option) for option in COMMON),
            becomes(
                "--data",
                "text",
                "real",
                "data data-dir",
                inference_data,
                "real is --data folder with the sample photos of `make get-data`",
                choices=("real", "synthetic", "generated"),
            ),
            same("--precision", "text", "16.16", choices=("16.16", "32.32")),
            same("--profile", "flag", effect="torch.profiler for two batches; nothing is measured, as in the original"),
            becomes(
                "--random-weights",
                "flag",
                None,
                "weights",
                weights,
                "--weights random; without it, published weights if available, otherwise random ones, with a note",
            ),
            same("--checkpoint-input-path", "text", effect="weights to measure with; the original had no such option"),
        ),
        command="bench infer",
        about="throughput and latency of a model that predicts",
        conventions="pytorch",
    ),
    Program(
        name="pytorch:inference/run_benchmark_with_triton_server.py",
        options=(
            becomes(
                "-k",
                "text",
                None,
                "config request-type clients iterations",
                served_test,
                "model, request type and number of processes are taken from the test's name; one test is run",
            ),
            part_of(
                "--model-repository",
                "text",
                None,
                "checkpoint-input-path",
                "a folder with a checkpoint or a run folder of the model's name; without it, random weights",
            ),
            becomes("--grpc-port", "whole", None, "port", served_port, "the port, for HTTP; any free one by default"),
            becomes(
                "--benchmark_only",
                "text",
                None,
                "check-answers",
                served_check,
                "answers are compared with the model's unless given; the server is always measured",
            ),
            nothing("-s", "flag", "an option of pytest; results are always printed"),
            nothing("-v", "flag", "an option of pytest"),
        ),
        word=nothing("PATH", "text", "the folder of the originals' tests; Falconet's server is measured"),
        command="bench serve",
        about="throughput and latency through a server",
        conventions="pytorch",
    ),
    Program(
        name="pytorch:datasets/host_benchmark.py",
        options=(
            same("--micro-batch-size", "whole", "1024"),
            same("--iterations", "whole", "2", new="passes", effect="passes over the images"),
            becomes(
                "--data",
                "text",
                "imagenet",
                "data data-dir use-bbox-info object-overlap",
                bench_data,
                "real is --data folder with the sample photos; imagenet uses its file of boxes if there is one",
                choices=("real", "synthetic", "generated", "cifar10", "imagenet"),
            ),
            becomes(
                "--imagenet-data-path", "text", IMAGENET, "data-dir", bench_path, "the same; DATA_DIR if it is set"
            ),
            part_of("--disable-async-loading", "flag", None, "dataloader-workers", "0: the loop itself reads"),
            becomes(
                "--normalization-location",
                "text",
                "host",
                "normalization-location",
                bench_place,
                "ipu becomes device",
                choices=("host", "ipu"),
            ),
            becomes("--dataloader-worker", "whole", "32", "dataloader-workers", bench_workers, "threads"),
            becomes("--eight-bit-io", "flag", None, "eight-bit-io", bench_eight_bit, "the same; off unless given"),
            same("--dataloader-rebatch-size", "whole"),
            part_of("-h", "flag", None, "help", "prints the options and what each becomes", aliases=("--help",)),
        ),
        command="data bench",
        about="how fast the loader is",
        rule=bench_model,
    ),
    Program(
        name="pytorch:datasets/validate_dataset.py",
        options=(same("--imagenet-data-path", "text", new="data-dir", required=True),),
        command="data bench",
        about="whether the images are those of ILSVRC 2012, by md5 (--md5)",
        rule=digest,
    ),
)
RUNNERS = (
    Program(
        name="tool:examples_utils benchmark",
        options=(
            same("--spec", "text", count="some"),
            same("--benchmark", "text", count="some"),
            same("--allow-wandb", "flag"),
            nothing("--ignore-wandb", "flag", "always the case unless --allow-wandb is given"),
            becomes(
                "--compile-only",
                "flag",
                None,
                "plan",
                lambda old: [To("plan")] if old.flag("--compile-only") else [],
                OFFLINE,
            ),
            same("--include-convergence", "flag"),
            becomes(
                "--ignore-errors",
                "flag",
                None,
                "stop-on-error",
                lambda old: [To("no-stop-on-error" if old.flag("--ignore-errors") else "stop-on-error")],
                "without it, the first failure stops the rest",
            ),
            same("--log-dir", "text", aliases=("--logdir",)),
            nothing("--logging", "text", "failures are always reported; --show-output prints everything"),
            same("--profile", "flag"),
            same("--timeout", "number"),
            same("--csv-metrics", "text", count="some"),
            same("--additional-metrics", "flag"),
            part_of("--help", "flag", None, "help", "prints the options and what each becomes", aliases=("-h",)),
        ),
        command="bench",
        about="runs benchmark specs",
    ),
)
