"""The PopART original's programs and their options."""

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import pairwise

from falconet.errors import ConfigError
from falconet.legacy.pytorch_training import FP_EXCEPTIONS
from falconet.legacy.table import (
    IPU,
    Effect,
    Note,
    Old,
    Program,
    To,
    Values,
    Variable,
    becomes,
    nothing,
    part_of,
    power_of_two,
    same,
    short,
)
from falconet.legacy.tensorflow_machine import in_a_row

IMAGES = {"IMAGENET": 1_281_167, "CIFAR-10": 50_000, "CIFAR-100": 50_000}
COLLECTIVES = "--bucket-size groups reductions"
CIFAR_DEVIATION = ("0.2023", "0.1994", "0.201")
CIFAR_SIZES = ("8", "14", "20", "32", "44", "56", "110")


def micro_batch(old: Values) -> int:
    batch, factor = old.whole("--batch-size"), old.whole("--replication-factor")
    if batch % factor:
        raise ConfigError(f"--batch-size: got {batch}, expected a multiple of --replication-factor, which is {factor}")
    return batch // factor


def batch_size(old: Values) -> Iterable[Effect]:
    """The original's batch was that of all replicas together, before accumulation."""
    yield To("micro-batch-size", (str(micro_batch(old)),))


def model(old: Values) -> Iterable[Effect]:
    """The data alone determines the first layers and the image size."""
    size, cifar = old.text("--size"), old.text("--dataset") != "IMAGENET"
    yield from model_of(size)
    if cifar != (size in CIFAR_SIZES):
        yield To("stem", ("cifar" if cifar else "imagenet",))
        yield To("image-size", ("32" if cifar else "224",))


def model_of(size: str) -> Iterable[Effect]:
    if size.startswith("x"):
        yield To("model", (f"resnext{size[1:]}",))
    elif size not in CIFAR_SIZES:
        yield To("model", (f"resnet{size}",))
    else:
        yield To("model", (f"resnet{size}-cifar",))
        return
    if size not in ("18", "34"):
        yield To("bottleneck-stride", ("1x1",))


def shortcut(old: Values) -> Iterable[Effect]:
    """The networks' default is A for CIFAR and B for the others; resnet_main.py's default is B for all."""
    own = "A" if old.text("--size") in CIFAR_SIZES else "B"
    kind = old.text("--shortcut-type") if old.has("--shortcut-type") else own
    yield To("shortcut-type", ("auto" if kind == own else kind,))


def data(old: Values) -> Iterable[Effect]:
    """CIFAR-100 was documented only. CIFAR-10's deviations were means over single images, smaller than the data's."""
    yield To("data", (old.text("--dataset").lower().replace("-", ""),))
    if old.text("--dataset") == "CIFAR-10":
        yield To("pixel-deviation", CIFAR_DEVIATION)


def norm(old: Values) -> Iterable[Effect]:
    kind = old.text("--norm-type").lower()
    yield To("norm-type", (kind,))
    if kind == "group":
        yield To("norm-num-groups", (old.text("--norm-groups"),))
    elif old.given("--norm-groups"):
        yield Note("--norm-groups: no effect without --norm-type GROUP")
    if kind == "none":
        yield To("conv-bias")


def learning_rate(old: Values) -> Iterable[Effect]:
    """The rate: 2**x times the batch of all replicas, without accumulation."""
    first = _multipliers(old)[0]
    rate = power_of_two("--base-learning-rate", old.whole("--base-learning-rate")) * old.whole("--batch-size")
    yield To("lr", (short(rate * first),))


def schedule(old: Values) -> Iterable[Effect]:
    """The original has multipliers of the first rate, at shares of training; ours are factors of the previous rate."""
    multipliers, shares = _multipliers(old), _shares(old, "--learning-rate-schedule")
    if len(multipliers) != len(shares) + 1:
        raise ConfigError(
            f"--learning-rate-decay: got {len(multipliers)} multipliers, expected {len(shares) + 1}, one more than"
            " --learning-rate-schedule has"
        )
    if min(multipliers) <= 0:
        raise ConfigError(
            f"--learning-rate-decay: got {old.text('--learning-rate-decay')}, expected multipliers above 0, such as"
            " 1,0.1,0.01"
        )
    factors = [round(after / before, 12) for before, after in pairwise(multipliers)] or [1.0]
    yield To("lr-schedule", ("step",))
    yield To("lr-decay", tuple(map(short, factors if len(set(factors)) > 1 else factors[:1])))
    yield To("lr-epoch-decay", tuple(short(share * old.whole("--epochs")) for share in shares))
    yield To("warmup-epoch", ("0",))


def _multipliers(old: Values) -> list[float]:
    found = _shares(old, "--learning-rate-decay")
    if not found:
        raise ConfigError(
            "--learning-rate-decay: got no number, expected at least the first rate's multiplier, such as 1,0.1"
        )
    return found


def _shares(old: Values, name: str) -> list[float]:
    return old.listed(name, expected="numbers separated by commas")


def stages(old: Values) -> Iterable[Effect]:
    """The devices of a replica; without --pipeline they ran one after the other."""
    devices, factor = old.whole("--num-ipus"), old.whole("--replication-factor")
    if devices % factor:
        raise ConfigError(f"--num-ipus: got {devices}, expected a multiple of --replication-factor, which is {factor}")
    if devices // factor > 1:
        yield To("pipeline-splits", (f"auto:{devices // factor}",))
        yield To("pipeline-schedule", ("grouped" if old.flag("--pipeline") else "sequential",))
    elif old.flag("--pipeline"):
        yield Note("--pipeline: no effect with one of --num-ipus per replica")


def rounding(old: Values) -> Iterable[Effect]:
    yield To("no-enable-stochastic-rounding" if old.flag("--no-prng") else "enable-stochastic-rounding")


def validation(old: Values) -> Iterable[Effect]:
    yield To("validation-mode", ("none" if old.flag("--no-validation") else "during",))


def logs(old: Values) -> Iterable[Effect]:
    """A step is --batches-per-step updates."""
    effective = old.whole("--batch-size") * old.whole("--gradient-accumulation-factor")
    updates = IMAGES[old.text("--dataset")] // effective
    steps = old.whole("--steps-per-log") * old.whole("--batches-per-step")
    yield To("logs-per-epoch", (str(max(1, updates // steps)),))
    yield from in_a_row(old)


def run_folder(old: Values) -> Iterable[Effect]:
    """The place of folders named by time and size, and the name of the run folder in them."""
    if old.given("--log_dir_string"):
        yield To("name-suffix", (old.text("--log_dir_string"),))
    if old.given("--log-dir"):
        yield Variable("FALCONET_RUNS", old.text("--log-dir"))


def recompute(old: Values) -> Iterable[Effect]:
    """Stages of a pipeline recompute here unless that is turned off."""
    staged = old.whole("--num-ipus") > old.whole("--replication-factor")
    if old.flag("--recompute") and not staged:
        yield To("enable-recompute")
    elif staged and not old.flag("--recompute"):
        yield To("recompute-mode", ("none",))


def replicas(old: Values) -> Iterable[Effect]:
    if old.whole("--replication-factor") > 1:
        yield To("replicas", (old.text("--replication-factor"),))


def first_weights(_: Values) -> Iterable[Effect]:
    """Glorot's bounds from the channels alone, and every norm's scale at 1."""
    yield To("weight-init", ("channels",))
    yield To("zero-init", ("none",))


def own(old: Values) -> Iterable[Effect]:
    """The program's fixed behaviour, without an option."""
    yield from first_weights(old)
    yield To("optimizer", ("sgd",))
    yield To("momentum", ("0",))
    yield To("weight-decay-exclude", ("nothing",))
    yield To("checkpoints-kept", ("1",))
    if find_spec("tensorboard"):
        yield To("tensorboard")
    else:
        yield Note("TensorBoard scalars, which the original always wrote, need: pip install falconet[tensorboard]")


def synthetic_command(old: Values) -> str:
    return "train" if old.text("--mode") == "train" else "bench infer"


def synthetic(old: Values) -> Iterable[Effect]:
    cifar = old.text("--size") in CIFAR_SIZES
    yield To("data", ("generated" if old.flag("--use-generated-data") else "synthetic",))
    yield To("classes", ("10" if cifar else "1000",))
    yield To("image-size", ("32" if cifar else "224",))
    yield To("iterations", (str(old.whole("--steps") * old.whole("--batches-per-step")),))
    yield from in_a_row(old)
    yield To("epoch", ("1",))
    yield To("warmup-epoch", ("0",))
    yield To("momentum", ("0",))


def shards(old: Values) -> Iterable[Effect]:
    """Stages in training; predictions are measured with the whole model."""
    count = old.whole("--shards")
    if count > 1 and synthetic_command(old) == "train":
        yield To("pipeline-splits", (f"auto:{count}",))
        yield To("pipeline-schedule", ("grouped" if old.flag("--pipeline") else "sequential",))
    elif count > 1:
        yield Note(f"--shards {count}: predictions are measured with the whole model on one device")
    elif old.flag("--pipeline"):
        yield Note("--pipeline: no effect without --shards")


_MODEL_NORMS = ("BATCH", "GROUP", "NONE")
_HELP = part_of("-h", "flag", None, "help", "prints the options and what each becomes", aliases=("--help",))

MAIN: tuple[Old, ...] = (
    becomes(
        "--dataset",
        "text",
        "CIFAR-10",
        "data pixel-deviation",
        data,
        "imagenet; cifar10 with the pixel deviations 0.2023 0.1994 0.201; cifar100, as documented",
        choices=("IMAGENET", "CIFAR-10", "CIFAR-100"),
    ),
    same("--data-dir", "text", required=True),
    same("--num-workers", "whole", "16", new="dataloader-workers", effect="threads instead of processes"),
    becomes("--batch-size", "whole", "32", "micro-batch-size", batch_size, "divided by --replication-factor", least=1),
    becomes(
        "--size",
        "text",
        "20",
        "model bottleneck-stride stem image-size",
        model,
        "20 is resnet20-cifar, 50 is resnet50, x50 is resnext50; bottlenecks stride in their first convolution",
        choices=("8", "14", "20", "32", "44", "56", "110", "18", "34", "50", "101", "152", "x50"),
    ),
    becomes(
        "--norm-type",
        "text",
        "GROUP",
        "norm-type norm-num-groups conv-bias",
        norm,
        "in lower case; NONE gives convolutions biases",
        choices=_MODEL_NORMS,
    ),
    part_of("--norm-groups", "whole", "16", "norm-num-groups", "the same"),
    becomes("--shortcut-type", "text", "B", "shortcut-type", shortcut, "the same", choices=("A", "B", "C")),
    becomes(
        "--precision",
        "text",
        "16",
        "precision",
        lambda old: [To("precision", (f"{old.text('--precision')}.{old.text('--precision')}",))],
        "16 is 16.16, 32 is 32.32",
        choices=("16", "32"),
    ),
    part_of("--prng", "flag", None, "enable-stochastic-rounding", "on, which is the default"),
    becomes("--no-prng", "flag", None, "enable-stochastic-rounding", rounding, "on unless given"),
    nothing("--fp-exceptions", "flag", FP_EXCEPTIONS),
    same("--half-partials", "flag", new="half-partial"),
    becomes(
        "--base-learning-rate", "whole", "-6", "lr", learning_rate, "2**x times --batch-size, without accumulation"
    ),
    becomes(
        "--learning-rate-decay",
        "text",
        "1,0.1,0.01",
        "lr-schedule lr-decay lr-epoch-decay",
        schedule,
        "the factors between neighbours; one if they are all equal",
    ),
    part_of("--learning-rate-schedule", "text", "0.5,0.75", "lr-epoch-decay", "shares of training, times --epochs"),
    same("--epochs", "whole", "30", new="epoch"),
    becomes("--no-validation", "flag", None, "validation-mode", validation, "validation-mode none, else during"),
    nothing("--valid-per-epoch", "number", "had no effect; each epoch is validated once", "1"),
    becomes("--steps-per-log", "whole", "1", "logs-per-epoch", logs, "log points per epoch: updates / steps", least=1),
    same("--weight-decay", "number", "0"),
    becomes("--num-ipus", "whole", "1", "pipeline-splits", stages, "stages: divided by --replication-factor", least=1),
    becomes("--replication-factor", "whole", "1", "replicas", replicas, "the same", least=1),
    becomes("--recompute", "flag", None, "enable-recompute recompute-mode", recompute, "the same"),
    part_of("--pipeline", "flag", None, "pipeline-schedule", "grouped, else sequential; stages of equal cost"),
    part_of(
        "--batches-per-step",
        "whole",
        "250",
        "logs-per-epoch device-iterations",
        "updates per step, in a row if it is given",
        least=1,
    ),
    nothing("--simulation", "flag", "runs on the devices of this machine; --device cpu leaves the GPU unused"),
    same("--gradient-accumulation-factor", "whole", "1", new="gradient-accumulation", least=1),
    nothing("--ckpt", "text", "checkpoints are folders of safetensors in the run folder, not ONNX files"),
    nothing("--syncless-collectives", "text", COLLECTIVES, choices=("true", "false", "auto")),
    nothing("--max-bytes-per-tile", "whole", COLLECTIVES),
    becomes("--log-dir", "text", "logs", "FALCONET_RUNS name-suffix", run_folder, "where run folders go"),
    part_of("--log_dir_string", "text", "net", "name-suffix", "the run folder is --log-dir/<time>/<size>/<this>"),
    nothing("--get-reports", "flag", "had no effect; --profile traces a few updates"),
    _HELP,
)
SYNTHETIC: tuple[Old, ...] = (
    same("--batch-size", "whole", "1", new="micro-batch-size"),
    becomes(
        "--size",
        "text",
        "18",
        "model bottleneck-stride",
        lambda old: model_of(old.text("--size")),
        "8 is resnet8-cifar, 50 is resnet50, x50 is resnext50",
        choices=("8", "14", "20", "32", "44", "56", "110", "18", "34", "50", "101", "152", "x50"),
    ),
    becomes(
        "--norm-type",
        "text",
        "BATCH",
        "norm-type norm-num-groups conv-bias",
        norm,
        "in lower case; NONE gives convolutions biases",
        choices=_MODEL_NORMS,
    ),
    part_of("--norm-groups", "whole", "32", "norm-num-groups", "the same"),
    becomes("--shortcut-type", "text", None, "shortcut-type", shortcut, "the same", choices=("A", "B", "C")),
    nothing("--log-dir", "text", "results are printed"),
    becomes(
        "--mode",
        "text",
        "infer",
        "data",
        synthetic,
        "train is `falconet train`, else `falconet bench infer`",
        choices=("infer", "eval", "train"),
    ),
    part_of("--use-generated-data", "flag", None, "data", "--data generated instead of synthetic"),
    part_of(
        "--batches-per-step",
        "whole",
        "1000",
        "iterations device-iterations",
        "times --steps: batches; in a row if it is given, with --mode train",
        least=1,
    ),
    part_of("--steps", "whole", "5", "iterations", "times --batches-per-step: batches", least=1),
    becomes("--shards", "whole", "1", "pipeline-splits", shards, "stages of equal cost, with --mode train", least=1),
    part_of("--pipeline", "flag", None, "pipeline-schedule", "grouped, else sequential"),
    nothing("--auto-sharding", "flag", "stages of equal cost are always found"),
    same("--report", "flag", new="profile"),
    nothing("--save-graph", "flag", "--report traces what runs"),
    nothing("--simulation", "flag", IPU),
    _HELP,
)

PROGRAMS = (
    Program(
        name="popart:resnet_main.py",
        options=MAIN,
        command="train",
        about="trains and validates",
        conventions="popart",
        rule=own,
    ),
    Program(
        name="popart:resnet_synthetic_benchmark.py",
        options=SYNTHETIC,
        command=synthetic_command,
        about="measures a model on random images",
        conventions="popart",
        rule=first_weights,
    ),
)
