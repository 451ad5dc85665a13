"""The options of the PyTorch program's train.py, some of which its other programs share."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from falconet.errors import ConfigError
from falconet.legacy.layer_names import mobilenet_layer, pytorch_layer, recomputed_layers
from falconet.legacy.table import (
    IPU,
    Effect,
    Kind,
    Note,
    Old,
    To,
    Values,
    becomes,
    nothing,
    part_of,
    same,
    short,
)

MODELS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "mobilenet", "efficientnet-b0"),
    *("efficientnet-b4", "mobilenet-v3-large", "mobilenet-v3-small"),
    # Releases up to SDK 2.6; their benchmarks measure some of them.
    *("resnext50", "resnext101", *(f"efficientnet-b{size}" for size in (1, 2, 3, 5, 6, 7))),
)
TRACED_UPDATES = 6  # four before, two under the profiler
IMAGENET_PIXELS = (("0.485", "0.456", "0.406"), ("0.229", "0.224", "0.225"))  # mean and deviation
IMAGENET = "/localdata/datasets/imagenet-raw-data"  # the original's default
OFFLINE = "there is no ahead-of-time compilation; the plan is printed instead, without running it"
MEMORY = "the same share, of the GPU's memory: cuDNN's workspace for a convolution"
EXCHANGE = "cuDNN chooses convolutions by speed; --available-memory-proportion limits the memory that they may take"
FP_EXCEPTIONS = "always on: a loss that is not finite stops the run and names the update"


def model(old: Values) -> Iterable[Effect]:
    """The original had its own MobileNetV3; all other models are torchvision's or timm's."""
    yield To("model", (old.text("--model"),))
    if old.text("--model").startswith("mobilenet-v3"):
        yield To("mobilenet-wide-head")


def first_weights(old: Values) -> Iterable[Effect]:
    """The initial weights: torchvision's, timm's or torch's; some norms of ResNet-50 start at zero.

    Group norms replaced those norms, so that none of them started at zero.
    """
    name = old.text("--model")
    if name.startswith("mobilenet"):
        yield To("weight-init", ("normal" if name == "mobilenet" else "uniform",))
    if name.startswith("resne"):
        zeroed = name == "resnet50" and old.text("--norm-type") == "batch"
        yield To("zero-init", ("shortcut" if zeroed else "none",))


def efficientnet(name: str, default: str) -> Old:
    """A part of the shape of an EfficientNet; the other models ignored it."""

    def rule(old: Values) -> Iterable[Effect]:
        if old.text("--model").startswith("efficientnet"):
            yield To(name.lstrip("-"), (old.text(name),))
        elif old.given(name):
            yield Note(f"{name}: has no effect on --model {old.text('--model')}")

    return becomes(name, "whole", default, name.lstrip("-"), rule, "the same; no effect on other models")


def norm_eps(old: Values) -> Iterable[Effect]:
    """Batch norm keeps the model's value unless one is given; group norms take the program's default."""
    if old.given("--norm-eps") or old.text("--norm-type") == "group":
        yield To("norm-eps", (old.text("--norm-eps"),))


def batchnorm_momentum(old: Values) -> Iterable[Effect]:
    if old.given("--batchnorm-momentum"):
        yield To("batchnorm-momentum", (old.text("--batchnorm-momentum"),))


def fast_groupnorm(old: Values) -> Iterable[Effect]:
    """The original grouped every G-th channel, and its checkpoints need that."""
    if old.flag("--enable-fast-groupnorm") and old.text("--norm-type") == "group":
        yield To("norm-grouping", ("strided",))
    elif old.flag("--enable-fast-groupnorm"):
        yield Note("--enable-fast-groupnorm: has no effect without --norm-type group")


def splits(old: Values) -> Iterable[Effect]:
    if old.has("--pipeline-splits"):
        names = old.texts("--pipeline-splits")
        yield To("pipeline-splits", tuple(_layer(name, old.text("--model")) for name in names))


def training_data(old: Values) -> Iterable[Effect]:
    yield To("data", (_data(old),))
    if _data(old) == "cifar10":
        yield To("validation-crop", ("centre",))
        yield To("pixel-mean", IMAGENET_PIXELS[0])
        yield To("pixel-deviation", IMAGENET_PIXELS[1])
    if _data(old) != old.text("--data"):
        yield Note(f"--compile-only: --data {_data(old)} instead of {old.text('--data')}, as in the original")


def _data(old: Values) -> str:
    """The data; compiling alone needs no images."""
    return "generated" if old.flag("--compile-only") and old.text("--data") != "synthetic" else old.text("--data")


def imagenet_path(old: Values) -> Iterable[Effect]:
    if _data(old) == "imagenet":
        if old.given("--imagenet-data-path") or not old.place.environment.get("DATA_DIR"):
            yield To("data-dir", (old.text("--imagenet-data-path"),))
    elif old.given("--imagenet-data-path"):
        yield Note(f"--imagenet-data-path: has no effect with --data {_data(old)}")


def use_boxes(old: Values) -> Iterable[Effect]:
    """A tenth of the crop is to lie in the box; TensorFlow's rule is a tenth of the box in the crop."""
    if old.flag("--use-bbox-info") and not old.flag("--compile-only"):
        yield To("use-bbox-info")
        yield To("object-overlap", ("crop",))


def normalization(old: Values) -> Iterable[Effect]:
    """The place of normalisation: the host, except that 8-bit images are normalised on the device."""
    place = {"ipu": "device"}.get(old.text("--normalization-location"), old.text("--normalization-location"))
    if place == "host" and old.flag("--eight-bit-io"):
        place = "device"
        if old.given("--normalization-location"):
            yield Note("--normalization-location host: 8-bit images are normalised on the device")
    yield To("normalization-location", (place,))


def eight_bit(old: Values) -> Iterable[Effect]:
    yield To("eight-bit-io" if old.flag("--eight-bit-io") else "no-eight-bit-io")


def iterations(old: Values) -> Iterable[Effect]:
    """An epoch of random data had this many host calls, each of several updates."""
    calls, updates = old.whole("--iterations", least=1), old.whole("--device-iterations", least=1)
    yield To("iterations", (str(calls * updates),))


def device_iterations(old: Values) -> Iterable[Effect]:
    if old.whole("--device-iterations", least=1) > 1:
        yield To("device-iterations", (old.text("--device-iterations"),))


def replicas(old: Values) -> Iterable[Effect]:
    """A launcher's number takes precedence over the option, as in the original."""
    count = old.place.replicas or old.whole("--replicas", least=1)
    if old.place.replicas and old.given("--replicas") and old.place.replicas != old.whole("--replicas"):
        yield Note(f"--replicas {old.whole('--replicas')}: the launcher's {count} in all take precedence")
    if count > 1:
        yield To("replicas", (str(count),))


def recompute_layers(old: Values) -> Iterable[Effect]:
    """The stages of a pipeline always recompute, as in the original."""
    recomputes = old.flag("--enable-recompute") or _recompute_mode(old) == "manual" or old.has("--pipeline-splits")
    if old.has("--recompute-checkpoints") and recomputes:
        rules = old.texts("--recompute-checkpoints")
        kept = [layer for rule in rules for layer in recomputed_layers(rule, model=old.text("--model"))]
        yield To("recompute-checkpoints", tuple(dict.fromkeys(kept)))
    elif old.given("--recompute-checkpoints"):
        yield Note("--recompute-checkpoints: has no effect without --recompute-mode manual or --enable-recompute")


def _recompute_mode(old: Values) -> str:
    return old.text("--recompute-mode")


def recompute_mode(old: Values) -> Iterable[Effect]:
    if _recompute_mode(old) != "none":
        yield To("recompute-mode", (_recompute_mode(old),))


def warmup(old: Values) -> Iterable[Effect]:
    """A warm-up longer than training is cut off where training ends, at the rate reached; some benchmarks had one."""
    warm, epochs = old.number("--warmup-epoch"), old.whole("--epoch", least=1)
    if warm > epochs:
        reached = short(old.number("--lr") * epochs / warm)
        yield Note(f"warm-up of {warm:g} epochs is longer than the training: it ends at {reached}, as in the original")
        yield To("lr", (reached,))
    yield To("warmup-epoch", (short(min(warm, epochs)),))


def loss_scaling(old: Values) -> Iterable[Effect]:
    """The automatic scale always starts at 1, as in the original."""
    if not old.flag("--auto-loss-scaling"):
        yield To("loss-scaling", (old.text("--loss-scaling"),))
        return
    if old.given("--loss-scaling", "--initial-loss-scaling"):
        yield Note("--loss-scaling: the automatic scale starts at 1, as in the original")


def initial_loss_scaling(old: Values) -> Iterable[Effect]:
    if old.has("--initial-loss-scaling") and not old.flag("--auto-loss-scaling"):
        yield To("initial-loss-scaling", (old.text("--initial-loss-scaling"),))


def _same_text(text: str, _model: str) -> str:
    return text


def _layer(text: str, model: str) -> str:
    return mobilenet_layer(text, model=model) or pytorch_layer(text, model=model)


def fine_tune(
    name: str,
    kind: Kind,
    default: str | None,
    *,
    effect: str = "the same",
    renamed: Callable[[str, str], str] = _same_text,
) -> Old:
    """An option of the phase after the half-resolution one; its default is the original's."""

    def rule(old: Values) -> Iterable[Effect]:
        if not old.flag("--half-res-training"):
            if old.given(name):
                yield Note(f"{name}: has no effect without --half-res-training")
        elif old.has(name) and (name, old.text(name)) != (
            "--fine-tune-epoch",
            "0",
        ):  # the default is refused, as in the original
            yield To(name.lstrip("-"), (renamed(old.text(name), old.text("--model")),))

    return becomes(name, kind, default, name.lstrip("-"), rule, effect)


def profile(old: Values) -> Iterable[Effect]:
    """The original ended after the first host call, which was traced."""
    if not old.flag("--profile"):
        return
    yield To("profile")
    if _ends_when_traced(old):
        yield To("updates", (str(TRACED_UPDATES),))
        yield Note(f"--profile: ends after {TRACED_UPDATES} updates, the last two of them traced; nothing is validated")
    else:
        yield Note(
            "--profile: two updates are traced; training continues after them, because --half-res-training and"
            " --initial-loss-scaling need whole epochs"
        )


def _ends_when_traced(old: Values) -> bool:
    scaled = old.has("--initial-loss-scaling") and not old.flag("--auto-loss-scaling")
    return old.flag("--profile") and not old.flag("--half-res-training") and not scaled


def validation_mode(old: Values) -> Iterable[Effect]:
    yield To("validation-mode", ("none" if _ends_when_traced(old) else old.text("--validation-mode"),))


def checkpoint_input(old: Values) -> Iterable[Effect]:
    """The folder of checkpoints for the validation after training; empty, the default, means the last weights."""
    folder = old.text("--checkpoint-input-path") if old.has("--checkpoint-input-path") else ""
    if not folder:
        return
    if _ends_when_traced(old):
        return  # it ends before there is anything to measure, which is noted
    validates, averages = old.text("--validation-mode") == "after", old.text("--weight-avg-strategy") != "none"
    if validates:
        yield To("validate-checkpoints", (folder,))
    own = old.has("--checkpoint-output-path") and old.text("--checkpoint-output-path") == folder
    if averages and not own:
        yield Note("--checkpoint-input-path: this run's checkpoints are averaged; `falconet average` averages others")
    elif not validates and not averages:
        yield Note("--checkpoint-input-path: has no effect without --validation-mode after or a --weight-avg-strategy")


def checkpoint_output(old: Values) -> Iterable[Effect]:
    """The folder of checkpoints; the original's default is empty."""
    if old.given("--checkpoint-output-path") and old.text("--checkpoint-output-path"):
        yield To("checkpoint-output-path", (old.text("--checkpoint-output-path"),))


def wandb(old: Values) -> Iterable[Effect]:
    if old.flag("--wandb"):
        yield To("wandb")
        yield To("wandb-project", ("pytorch-cnn",))


def weight_histogram(old: Values) -> Iterable[Effect]:
    if old.flag("--wandb-weight-histogram"):
        if not old.flag("--wandb"):
            raise ConfigError("--wandb-weight-histogram: needs --wandb, where the histograms go")
        yield To("weight-histogram")


def compile_only(old: Values) -> Iterable[Effect]:
    if old.flag("--compile-only"):
        yield To("plan")
        yield Note(f"--compile-only: {OFFLINE}")


COMMON: tuple[Old, ...] = (
    same("--micro-batch-size", "whole", "1", aliases=("--batch-size",)),
    same("--dataloader-rebatch-size", "whole"),
    becomes("--iterations", "whole", "100", "iterations", iterations, "times --device-iterations: updates per epoch"),
    becomes(
        "--model",
        "text",
        "resnet18",
        "model mobilenet-wide-head",
        model,
        "the same; a MobileNetV3 has the original's head",
        choices=MODELS,
    ),
    becomes("--pipeline-splits", "text", None, "pipeline-splits", splits, "layers under our names", count="some"),
    becomes("--replicas", "whole", "1", "replicas", replicas, "the same; a launcher's number takes precedence"),
    becomes(
        "--device-iterations",
        "whole",
        "1",
        "device-iterations iterations",
        device_iterations,
        "the same, fewer up to a log, a save or a validation; scales --iterations",
    ),
    same("--half-partial", "flag"),
    nothing("--exchange-memory-target", "text", EXCHANGE, choices=("cycles", "balanced", "memory")),
    same("--norm-type", "text", "batch", aliases=("--normlayer",), choices=("batch", "group", "none")),
    becomes("--norm-eps", "number", "1e-05", "norm-eps", norm_eps, "the same, for batch norm too"),
    same("--norm-num-groups", "whole", "32", aliases=("--groupnorm-group-num",)),
    becomes(
        "--enable-fast-groupnorm",
        "flag",
        None,
        "norm-grouping",
        fast_groupnorm,
        "strided: every G-th channel in a group, as in the original",
    ),
    becomes(
        "--batchnorm-momentum", "number", "0.1", "batchnorm-momentum", batchnorm_momentum, "the same; auto by default"
    ),
    becomes(
        "--normalization-location",
        "text",
        "host",
        "normalization-location",
        normalization,
        "ipu becomes device",
        choices=("host", "ipu", "none"),
    ),
    becomes("--eight-bit-io", "flag", None, "eight-bit-io", eight_bit, "the same; off by default"),
    same("--dataloader-worker", "whole", new="dataloader-workers", effect="threads instead of processes"),
    same("--model-cache-path", "text", effect="the same, for compiled kernels"),
    same("--input-image-padding", "flag"),
    nothing("--num-io-tiles", "whole", "copies always overlap with compute", "0"),
    becomes("--compile-only", "flag", None, "plan", compile_only, OFFLINE),
    nothing("--offline-target-ipu-version", "whole", IPU, "2"),
    efficientnet("--efficientnet-expand-ratio", "6"),
    efficientnet("--efficientnet-group-dim", "1"),
    part_of("--config", "text", None, "config", "a named config of configs.yml; the command line takes precedence"),
    part_of("-h", "flag", None, "help", "prints the options and what each becomes", aliases=("--help",)),
)
ENDING: tuple[Old, ...] = (
    becomes(
        "--profile",
        "flag",
        None,
        "profile updates validation-mode",
        profile,
        f"torch.profiler; training ends after {TRACED_UPDATES} updates; the original ended after its first host call",
    ),
    becomes(
        "--checkpoint-input-path",
        "text",
        None,
        "validate-checkpoints",
        checkpoint_input,
        "with --validation-mode after, each checkpoint of this folder is validated at the end",
        aliases=("--checkpoint-input-dir",),
    ),
    becomes(
        "--validation-mode",
        "text",
        "after",
        "validation-mode",
        validation_mode,
        "the same; none with --profile",
        choices=("none", "during", "after"),
    ),
)
TRAINING: tuple[Old, ...] = (
    becomes(
        "--data",
        "text",
        "cifar10",
        "data validation-crop pixel-mean pixel-deviation",
        training_data,
        "the same; CIFAR-10 is normalised and validated like ImageNet; generated with --compile-only",
        choices=("cifar10", "imagenet", "synthetic", "generated"),
    ),
    same("--precision", "text", "16.16", choices=("16.16", "16.32", "32.32")),
    becomes("--imagenet-data-path", "text", IMAGENET, "data-dir", imagenet_path, "the same; DATA_DIR if it is set"),
    same("--gradient-accumulation", "whole", "1"),
    same("--lr", "number", "0.01"),
    same("--weight-decay", "number", "0.0001"),
    same("--optimizer", "text", "sgd", choices=("sgd", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf")),
    same("--optimizer-eps", "number", "1e-08"),
    same("--momentum", "number", "0.0"),
    same("--rmsprop-decay", "number", "0.99"),
    same("--epoch", "whole", "10"),
    becomes(
        "--checkpoint-output-path",
        "text",
        None,
        "checkpoint-output-path",
        checkpoint_output,
        "the same",
        aliases=("--checkpoint-output-dir", "--checkpoint-path"),
    ),
    same("--checkpoint-save-freq", "whole", "1"),
    same("--validation-frequency", "whole", "4"),
    becomes("--wandb", "flag", None, "wandb wandb-project", wandb, "to the project pytorch-cnn"),
    becomes(
        "--wandb-weight-histogram",
        "flag",
        None,
        "weight-histogram",
        weight_histogram,
        "the same: every trained weight, at every log point; needs --wandb, as in the original",
    ),
    same("--seed", "whole", effect="the same; 0 by default, where the original drew one at random"),
    becomes(
        "--recompute-mode",
        "text",
        "none",
        "recompute-mode",
        recompute_mode,
        "the same",
        choices=("none", "auto", "manual"),
    ),
    same("--enable-recompute", "flag"),
    becomes(
        "--recompute-checkpoints",
        "text",
        None,
        "recompute-checkpoints",
        recompute_layers,
        "layers under our names; add_N is the layer after that addition",
        count="some",
    ),
    same("--disable-stable-batchnorm", "flag"),
    same("--offload-optimizer", "flag"),
    same("--enable-optimizer-rts", "flag"),
    same("--available-memory-proportion", "number", count="some", effect=MEMORY),
    same("--logs-per-epoch", "whole", "1"),
    same("--label-smoothing", "number", "0.0"),
    same("--lr-schedule", "text", "step", choices=("step", "cosine", "exponential")),
    same("--lr-decay", "number", "0.5"),
    same("--lr-epoch-decay", "number", count="some"),
    becomes("--warmup-epoch", "number", "0", "warmup-epoch", warmup, "the same; cut off where training ends"),
    same("--lr-scheduler-freq", "number", "0"),
    becomes("--loss-scaling", "number", "1.0", "loss-scaling", loss_scaling, "the same; 1 with --auto-loss-scaling"),
    becomes(
        "--initial-loss-scaling",
        "number",
        None,
        "initial-loss-scaling",
        initial_loss_scaling,
        "the same, as documented: doubles until it reaches --loss-scaling",
    ),
    same("--auto-loss-scaling", "flag"),
    same("--enable-stochastic-rounding", "flag"),
    nothing("--enable-fp-exceptions", "flag", FP_EXCEPTIONS),
    becomes(
        "--use-bbox-info",
        "flag",
        None,
        "use-bbox-info object-overlap",
        use_boxes,
        "the same: a tenth of a crop lies in the box, or it is the last of ten",
    ),
    same("--mixup-alpha", "number", "0.0"),
    same("--cutmix-lambda-low", "number", "0.0"),
    same("--cutmix-lambda-high", "number", "0.0"),
    same("--cutmix-disable-prob", "number", "0.0"),
    same("--half-res-training", "flag"),
    fine_tune(
        "--fine-tune-epoch", "whole", "0", effect="the same; needed with --half-res-training, as in the original"
    ),
    fine_tune("--fine-tune-lr", "number", "0.25"),
    replace(fine_tune("--fine-tune-micro-batch-size", "whole", "1"), aliases=("--fine-tune-batch-size",)),
    fine_tune("--fine-tune-gradient-accumulation", "whole", "1"),
    fine_tune("--fine-tune-first-trainable-layer", "text", None, effect="layers under our names", renamed=_layer),
    same("--weight-avg-strategy", "text", "none", choices=("mean", "exponential", "none")),
    same("--weight-avg-exp-decay", "number", "0.99"),
    same("--weight-avg-N", "whole", "-1"),
    *ENDING,
)
