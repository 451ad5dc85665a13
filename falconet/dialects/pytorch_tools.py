"""The PyTorch program's smaller programs: checkpoints, inference, loader."""

import re
from collections.abc import Iterable

from falconet.dialects.pytorch import COMMON, TRAINING
from falconet.dialects.rows import becomes, nothing, part_of, same
from falconet.dialects.table import Effect, Program, Say, To
from falconet.dialects.values import Values

SERVED = "the served measurement comes with `falconet serve`; the model itself is measured"
_SHOT = re.compile(r"(?:\[|^)(resnet50|efficientnet-b[04])")


def keeping(_: Values) -> Iterable[Effect]:
    yield To("checkpoints-kept", ("all",))  # theirs deleted none


def samples(old: Values) -> str:
    """Where `make get-data` leaves the sample photos: beside the folder of the program."""
    configs = old.place.configs
    return str(configs.parent.parent / "data" / "images") if configs else "data/images"


def inference_data(old: Values) -> Iterable[Effect]:
    """Their sample photos were read once and repeated; ours is any folder of photos."""
    kind = old.text("--data")
    if kind != "real":
        yield To("data", (kind,))
        return
    yield To("data", ("folder",))
    yield To("data-dir", (samples(old),))


def strategy(old: Values) -> Iterable[Effect]:
    """Theirs did nothing by default, which its documents did not say."""
    kind = old.text("--weight-avg-strategy")
    if kind == "none":
        yield Say("--weight-avg-strategy none: averages all the same, as that is what the program is for: the mean")
    yield To("weight-avg-strategy", ("mean" if kind == "none" else kind,))


def triton_model(old: Values) -> Iterable[Effect]:
    found = _SHOT.search(old.text("-k")) if old.has("-k") else None
    yield To("model", (found[1] if found else "resnet50",))
    yield To("data", ("generated",))
    yield Say(SERVED)


def bench_data(old: Values) -> Iterable[Effect]:
    kind = old.text("--data")
    yield To("data", ("folder" if kind == "real" else kind,))
    if kind == "real" and not old.given("--imagenet-data-path"):
        yield To("data-dir", (samples(old),))


def bench_place(old: Values) -> Iterable[Effect]:
    place = old.text("--normalization-location")
    on_device = place == "ipu" or old.flag("--eight-bit-io")
    yield To("normalization-location", ("device" if on_device else "host",))


def bench_eight_bit(old: Values) -> Iterable[Effect]:
    yield To("eight-bit-io" if old.flag("--eight-bit-io") else "no-eight-bit-io")


def bench_model(_: Values) -> Iterable[Effect]:
    yield To("model", ("resnet50",))


def digest(old: Values) -> Iterable[Effect]:
    yield from bench_model(old)
    yield To("data", ("imagenet",))
    yield To("md5")


def sync_loading(old: Values) -> Iterable[Effect]:
    if old.flag("--disable-async-loading"):
        yield To("dataloader-workers", ("0",))


_CHECKPOINT = same("--checkpoint-input-path", "text", required=True, aliases=("--checkpoint-path",))

PROGRAMS = (
    Program(
        name="pytorch:train.py",
        options=(*COMMON, *TRAINING),
        command="train",
        about="trains from scratch",
        style="pytorch",
        rule=keeping,
    ),
    Program(
        name="pytorch:restore.py",
        options=(_CHECKPOINT,),
        command="restore",
        about="continues a run from a checkpoint",
        whole=False,
        style="pytorch",
    ),
    Program(
        name="pytorch:validate.py",
        options=(_CHECKPOINT,),
        command="validate",
        about="the accuracy of a checkpoint, or of each one in a folder",
        whole=False,
        style="pytorch",
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
                "the same; none becomes mean, as the program would do nothing else",
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
            *COMMON,
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
            nothing("--random-weights", "flag", "always so here, unless --checkpoint-input-path is given"),
            same("--checkpoint-input-path", "text", effect="not of the original: weights to measure with"),
        ),
        command="bench infer",
        about="throughput and latency of a model that predicts",
        style="pytorch",
    ),
    Program(
        name="pytorch:inference/run_benchmark_with_triton_server.py",
        options=(
            becomes("-k", "text", None, "model", triton_model, "the model is read off it"),
            nothing("--model-repository", "text", SERVED),
            nothing("--grpc-port", "whole", SERVED),
            nothing("--benchmark_only", "text", SERVED),
            nothing("-s", "flag", "an option of pytest; what is measured is always printed"),
            nothing("-v", "flag", "an option of pytest"),
        ),
        command="bench infer",
        about="the same through a Triton server",
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
                "data",
                bench_data,
                "the same; real is --data folder",
                choices=("real", "synthetic", "generated", "cifar10", "imagenet"),
            ),
            same("--imagenet-data-path", "text", new="data-dir"),
            becomes(
                "--disable-async-loading", "flag", None, "dataloader-workers", sync_loading, "reads in the loop itself"
            ),
            becomes(
                "--normalization-location",
                "text",
                "host",
                "normalization-location",
                bench_place,
                "ipu becomes device",
                choices=("host", "ipu"),
            ),
            same("--dataloader-worker", "whole", "32", new="dataloader-workers"),
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
        about="whether the images are those of ILSVRC 2012, by md5",
        rule=digest,
    ),
)
