"""The TensorFlow program's options about model and data."""

from collections.abc import Iterable

from falconet.legacy import tensorflow_facts
from falconet.legacy.layer_names import BASIC, CIFAR_BASIC
from falconet.legacy.table import Effect, Note, Old, To, Values, becomes, nothing, part_of, same, short

LOADER = "the loader reads every format in one way, reproducible with any number of threads"


def model(old: Values) -> Iterable[Effect]:
    yield To("model", (tensorflow_facts.model(old),))
    if (
        tensorflow_facts.is_imagenet(old)
        and tensorflow_facts.family(old) == "resnet"
        and tensorflow_facts.size(old) in BASIC
    ):
        yield To("shortcut-type", ("stages",))  # the same as B where blocks have three convolutions


def own(old: Values) -> Iterable[Effect]:
    """The program's fixed behaviour: resizing, padding, initial weights; for a SqueezeNet, ours."""
    if tensorflow_facts.is_imagenet(old) and not tensorflow_facts.is_random(old):
        yield To("no-antialias")
    kind = tensorflow_facts.family(old)
    if kind == "squeezenet":
        return
    yield To("weight-init", ("he" if kind == "efficientnet" else "lecun",))
    yield To("padding", ("same",))
    if kind != "efficientnet":
        basic = BASIC if tensorflow_facts.is_imagenet(old) else CIFAR_BASIC
        yield To("zero-init", ("none" if kind == "resnet" and tensorflow_facts.size(old) in basic else "identity",))


def norm(old: Values) -> Iterable[Effect]:
    """Batch norm for CIFAR, group norm of every G-th channel for ImageNet and EfficientNets, none for SqueezeNet."""
    if tensorflow_facts.family(old) == "squeezenet":
        yield from (Note(f"{name}: SqueezeNet has no norms") for name in _NORM_OPTIONS if old.given(name))
        return
    efficient = tensorflow_facts.family(old) == "efficientnet"
    if tensorflow_facts.uses_batch_norm(old):
        yield To("norm-type", ("batch",))
        yield To("batchnorm-momentum", (short(round(1 - old.number("--BN-decay"), 12)),))
        if efficient:
            yield To("norm-eps", (old.text("--norm-epsilon"),))
        return
    yield To("norm-type", ("group",))
    yield To("norm-num-groups", (str(tensorflow_facts.groups(old)),))
    yield To("norm-grouping", ("strided",))
    yield To("norm-eps", (old.text("--norm-epsilon") if efficient else "1.53e-05",))


def stable_norm(old: Values) -> Iterable[Effect]:
    """The original took one pass by default, except for ResNeXts and EfficientNets on ImageNet."""
    stable = old.flag("--stable-norm") or (
        tensorflow_facts.is_imagenet(old) and tensorflow_facts.family(old) in ("resnext", "efficientnet")
    )
    spans = old.whole("--BN-span") > 1  # ours has only the stable form
    one_pass = (
        tensorflow_facts.family(old) != "squeezenet"
        and tensorflow_facts.uses_batch_norm(old)
        and not stable
        and not spans
    )
    yield To("disable-stable-batchnorm" if one_pass else "no-disable-stable-batchnorm")


_NORM_OPTIONS = ("--batch-norm", "--group-norm", "--groups", "--BN-decay", "--norm-epsilon")


def group_dim(old: Values) -> Iterable[Effect]:
    if tensorflow_facts.family(old) == "efficientnet" and old.has("--group-dim"):
        yield To("efficientnet-group-dim", (old.text("--group-dim"),))
    elif tensorflow_facts.family(old) == "resnext" and old.has("--group-dim"):
        yield To("resnext-group-dim", (old.text("--group-dim"),))
    elif old.given("--group-dim"):
        yield Note(f"--group-dim: has no effect on a {tensorflow_facts.family(old)}")


def image_size(old: Values) -> Iterable[Effect]:
    if old.has("--image-size"):
        yield To("image-size", (old.text("--image-size"),))
    elif not tensorflow_facts.is_imagenet(old) and (
        tensorflow_facts.is_random(old) or not tensorflow_facts.model(old).endswith("-cifar")
    ):
        yield To("image-size", ("32",))  # otherwise the size of the data and the model


def data(old: Values) -> Iterable[Effect]:
    kind = tensorflow_facts.dataset(old)
    if tensorflow_facts.is_random(old):
        yield To("data", ("synthetic" if old.flag("--synthetic-data") else "generated",))
        yield To("classes", (str(tensorflow_facts.CLASSES[kind]),))
        return
    yield To("data", (kind.replace("-", ""),))
    if old.has("--data-dir"):  # the canonical program reads DATA_DIR too
        yield To("data-dir", (old.text("--data-dir"),))


def mixing(old: Values) -> Iterable[Effect]:
    """Random images are not mixed, as in the original."""
    alpha, share = old.number("--mixup-alpha"), old.number("--cutmix-lambda")
    if tensorflow_facts.is_random(old):
        if alpha or share < 1:
            yield Note("--mixup-alpha and --cutmix-lambda: random images are not mixed, as in the original")
        return
    yield To("mixup-alpha", (short(alpha),))
    if share < 1:
        yield from _cutmix(share, version=old.text("--cutmix-version"))


def _cutmix(share: float, *, version: str) -> Iterable[Effect]:
    """Cutmix: version 2 has a fixed share; version 1 skips some batches or draws 1 + ln(U)/4, U from e**-4 to 1."""
    if version == "2":
        yield To("cutmix-lambda-low", (short(share),))
        yield To("cutmix-lambda-high", (short(share),))
        return
    yield To("cutmix-lambda-low", ("0",))
    yield To("cutmix-lambda-high", ("1",))
    yield To("cutmix-draw", ("exponential",))
    yield To("cutmix-disable-prob", (short(round(min(max(1.55 * share - 0.96, 0), 1), 6)),))


def eight_bit(old: Values) -> Iterable[Effect]:
    yield To("eight-bit-io" if old.flag("--eight-bit-io") or old.flag("--fused-preprocessing") else "no-eight-bit-io")


def normalisation_place(old: Values) -> Iterable[Effect]:
    """The place of normalisation: the device; on request the host, without 8-bit images and the fused step.

    CIFAR's images were always standardised on the host, before they were shifted.
    """
    asked = old.flag("--hostside-norm") or _is_standardised(old)
    on_host = asked and not old.flag("--eight-bit-io") and not old.flag("--fused-preprocessing")
    yield To("normalization-location", ("host" if on_host else "device",))


def normalise(old: Values) -> Iterable[Effect]:
    """Normalisation: without the option, only ImageNet's mean is subtracted; CIFAR's images are always standardised."""
    if _is_standardised(old):
        yield To("normalization", ("image",))
        if old.given("--normalise-input"):
            yield Note("--normalise-input: images of CIFAR are always standardised one by one, as in the original")
    elif not old.flag("--normalise-input") and not tensorflow_facts.is_random(old):
        yield To("normalization", ("mean",))


def _is_standardised(old: Values) -> bool:
    return not tensorflow_facts.is_imagenet(old) and not tensorflow_facts.is_random(old)


def fused(old: Values) -> Iterable[Effect]:
    if old.flag("--fused-preprocessing"):
        yield To("input-image-padding")


def cache(old: Values) -> Iterable[Effect]:
    if not tensorflow_facts.is_random(old):
        yield To("no-dataset-cache" if old.flag("--no-dataset-cache") else "dataset-cache")


def percentage(old: Values) -> Iterable[Effect]:
    if tensorflow_facts.is_imagenet(old) and not tensorflow_facts.is_random(old):
        yield To("dataset-percentage", (old.text("--dataset-percentage-to-use"),))
    elif old.given("--dataset-percentage-to-use"):
        yield Note("--dataset-percentage-to-use: has an effect on ImageNet only")


def valid_preprocessing(old: Values) -> Iterable[Effect]:
    """Crops: without the option, ImageNet's are drawn as by TensorFlow's sample_distorted_bounding_box."""
    if old.flag("--train-with-valid-preprocessing"):
        yield To("augment", ("none",))
    elif tensorflow_facts.is_imagenet(old) and not tensorflow_facts.is_random(old):
        yield To("use-bbox-info-if-there")
        yield To("crop-draw", ("height",))
        yield To("crop-area", ("0.05",))


MODEL: tuple[Old, ...] = (
    becomes(
        "--model",
        "text",
        "resnet",
        "model shortcut-type",
        model,
        "with --model-size: resnet 50 is resnet50, efficientnet B0 is efficientnet-b0; squeezenet has one size",
    ),
    part_of(
        "--model-size",
        "text",
        None,
        "model",
        "a part of the model's name",
        about="The layers of a resnet or resnext; B0 to B7, also 0 to 7, of an efficientnet.",
    ),
    becomes(
        "--batch-norm",
        "flag",
        None,
        "norm-type batchnorm-momentum norm-eps norm-grouping",
        norm,
        "--norm-type batch",
    ),
    part_of("--group-norm", "flag", None, "norm-type", "--norm-type group, every G-th channel in a group"),
    part_of("--groups", "whole", None, "norm-num-groups", "32 for ImageNet, 16 for CIFAR, 4 for EfficientNets"),
    part_of("--BN-decay", "number", "0.97", "batchnorm-momentum", "1 - x, once per update"),
    same("--BN-span", "whole", "1", new="batchnorm-span"),
    same("--convolution-groups", "whole", new="resnext-groups"),
    becomes(
        "--group-dim",
        "whole",
        None,
        "efficientnet-group-dim resnext-group-dim",
        group_dim,
        "by the model",
        about="Channels per group of the grouped convolutions; of an efficientnet's, 1 is depthwise.",
    ),
    same("--widenet", "flag", new="resnext-wide"),
    same("--dropout-rate", "number", new="efficientnet-dropout", about="Dropout before the classifier."),
    becomes(
        "--block-survival-prob",
        "number",
        "0.8",
        "efficientnet-drop-path",
        lambda old: (
            [To("efficientnet-drop-path", (short(round(1 - old.number("--block-survival-prob"), 12)),))]
            if tensorflow_facts.family(old) == "efficientnet"
            else []
        ),
        "1 - x",
        about="Probability that the last block is kept in an update; it falls linearly from 1 at the first.",
    ),
    becomes(
        "--no-se",
        "flag",
        None,
        "efficientnet-se",
        lambda old: [To("no-efficientnet-se")] if old.flag("--no-se") else [],
        "--no-efficientnet-se",
    ),
    same("--depth-divisor", "whole", new="efficientnet-depth-divisor"),
    same("--top-width", "whole", new="efficientnet-top-width"),
    becomes(
        "--use-relu",
        "flag",
        None,
        "efficientnet-activation",
        lambda old: [To("efficientnet-activation", ("relu",))] if old.flag("--use-relu") else [],
        "--efficientnet-activation relu",
        about="ReLU instead of swish (SiLU).",
    ),
    same("--expand-ratio", "whole", new="efficientnet-expand-ratio"),
    part_of(
        "--norm-epsilon", "number", "1e-3", "norm-eps", "the same, for EfficientNets", about="Epsilon of the norms."
    ),
    same("--proxy-norm", "flag", effect="the same; also with --gradient-accumulation-count, and without a pipeline"),
    same("--proxy-epsilon", "number", "0.03"),
    becomes(
        "--no-proxy-recompute",
        "flag",
        None,
        "proxy-recompute",
        lambda old: [To("no-proxy-recompute")] if old.flag("--no-proxy-recompute") else [],
        "--no-proxy-recompute",
    ),
    same("--width-coefficient", "number", new="efficientnet-width", about="Width factor, of the channels."),
    same("--depth-coefficient", "number", new="efficientnet-depth", about="Depth factor, of the blocks in a stage."),
    same("--use-bypass", "flag", new="squeezenet-bypass"),
    becomes(
        "--stable-norm",
        "flag",
        None,
        "disable-stable-batchnorm",
        stable_norm,
        "without it, batch norm's variance takes one pass; with group norm or --BN-span it is always stable",
    ),
)
DATA: tuple[Old, ...] = (
    becomes(
        "--dataset",
        "text",
        None,
        "data classes data-dir",
        data,
        "imagenet, cifar10 or cifar100, in upper or lower case; guessed from --data-dir by default",
        choices=("imagenet", "cifar-10", "cifar-100"),
        lower=True,
    ),
    part_of("--data-dir", "text", None, "data-dir", "the same; DATA_DIR by default"),
    same("--pipeline-num-parallel", "whole", new="dataloader-workers", effect="threads of the loader; auto by default"),
    part_of("--generated-data", "flag", None, "data", "--data generated"),
    part_of("--synthetic-data", "flag", None, "data", "--data synthetic"),
    becomes("--no-dataset-cache", "flag", None, "dataset-cache", cache, "--no-dataset-cache; on by default"),
    becomes(
        "--normalise-input",
        "flag",
        None,
        "normalization",
        normalise,
        "deviation; without it, only ImageNet's mean is subtracted; CIFAR's images are always standardised one by one",
    ),
    becomes("--image-size", "whole", None, "image-size", image_size, "the same"),
    becomes(
        "--train-with-valid-preprocessing",
        "flag",
        None,
        "augment use-bbox-info-if-there crop-draw crop-area",
        valid_preprocessing,
        "--augment none; without it, ImageNet's crops overlap objects where there are boxes, as in the original",
    ),
    becomes(
        "--hostside-norm",
        "flag",
        None,
        "normalization-location",
        normalisation_place,
        "host, otherwise device; host for CIFAR",
    ),
    nothing("--no-hostside-norm", "flag", "always the case unless --hostside-norm is given"),
    nothing("--standard-imagenet", "flag", LOADER),
    becomes("--mixup-alpha", "number", "0.0", "mixup-alpha", mixing, "the same; not with random data"),
    part_of(
        "--cutmix-lambda",
        "number",
        "1.0",
        "cutmix-lambda-low cutmix-lambda-high cutmix-disable-prob cutmix-draw",
        "by version",
    ),
    part_of(
        "--cutmix-version",
        "text",
        "1",
        "cutmix-lambda-low",
        "2: a fixed share; 1: --cutmix-draw exponential, with the same probability of skipping",
        choices=("1", "2"),
    ),
    nothing("--hostside-image-mixing", "flag", "images are mixed on the device"),
    becomes("--eight-bit-io", "flag", None, "eight-bit-io", eight_bit, "the same; off by default"),
    becomes(
        "--dataset-percentage-to-use",
        "whole",
        "100",
        "dataset-percentage",
        percentage,
        "the same, of images instead of files; ImageNet only",
    ),
    becomes(
        "--fused-preprocessing", "flag", None, "input-image-padding eight-bit-io", fused, "8-bit images, 4 channels"
    ),
    same(
        "--valid-batch-size",
        "whole",
        new="validation-batch-size",
        effect="the same, under another name; --batch-size by default",
        least=1,
    ),
)
