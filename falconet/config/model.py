"""The options of the model, and what may not be combined among them."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from falconet.config.ranges import AtLeast, Auto, Between, MoreThan
from falconet.errors import did_you_mean

# The zoo's names, repeated here so that a typo is answered without importing torch; a test compares the two lists.
MODELS = (
    *("resnet10", "resnet14", "resnet18", "resnet26", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext14", "resnext26", "resnext50", "resnext101", "resnext152"),
    *(f"efficientnet-b{size}" for size in range(8)),
    "efficientnet-cifar",
    *("mobilenet", "mobilenet-v3-small", "mobilenet-v3-large"),
    *(f"resnet{depth}-cifar" for depth in (8, 14, 20, 32, 44, 56, 110, 11, 29, 38, 47, "56b", 65)),
    *(f"resnext{depth}-cifar" for depth in (11, 29, 38, 47, 56, 65)),
    *("squeezenet", "squeezenet-cifar"),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    model: str = "resnet8-cifar"
    """A name of `falconet models`, or timm:NAME for any other model of timm."""
    weight_init: Literal["auto", "uniform", "normal", "lecun", "he", "glorot", "channels"] = "auto"
    """Distribution of new convolutions and linear layers; auto: the library's own. Formulas: docs/numerics.md."""
    zero_init: Literal["auto", "none", "last", "identity", "shortcut"] = "auto"
    """ResNets: scales that begin at 0: every block's last, only that beside an identity, or else the shortcut's own."""
    padding: Literal["symmetric", "same"] = "symmetric"
    """Zeros around what a convolution or pooling strides over: alike on both sides, or TensorFlow's SAME."""
    norm_type: Literal["batch", "group", "none"] = "batch"
    """Normalisation layers: as the model has them, group norm instead, or none."""
    norm_eps: Annotated[float, MoreThan(0)] | Auto = "auto"
    """Epsilon of the normalisation layers; auto: the model's own."""
    norm_num_groups: Annotated[int, AtLeast(1)] = 32
    """Groups of group norm; must divide the channels of every layer."""
    enable_fast_groupnorm: bool = False
    """Group norm by a fused kernel on CUDA; the same groups and checkpoints as without."""
    norm_grouping: Literal["contiguous", "strided"] = "contiguous"
    """Channels of a group: neighbours, or every G-th, as in the TensorFlow original (then without a fused kernel)."""
    disable_stable_batchnorm: bool = False
    """Batch norm's variance in one pass over the images: less exact where the mean is far from zero."""
    batchnorm_momentum: Annotated[float, Between(0, 1)] | Auto = "auto"
    """Weight of a new batch in batch norm's running statistics; auto: the model's own."""
    proxy_norm: bool = False
    """EfficientNet: subtract mean and divide by deviation of the activation of a Gaussian; for --norm-type group."""
    proxy_epsilon: Annotated[float, MoreThan(0)] = 0.03
    """Epsilon under the root of proxy norm's deviation."""
    proxy_recompute: bool = True
    """Compute proxy norm's activations again in the backward pass; no: keep them, two more tensors for each."""
    efficientnet_expand_ratio: Annotated[int, AtLeast(1)] = 6
    """EfficientNet: expansion of every stage after the first."""
    efficientnet_group_dim: Annotated[int, AtLeast(1)] = 1
    """EfficientNet: channels per group of the depthwise convolutions."""
    efficientnet_dropout: Annotated[float, Between(0, 1)] | Auto = "auto"
    """EfficientNet: dropout before the classifier; auto: by its size."""
    efficientnet_drop_path: Annotated[float, Between(0, 1)] = 0.2
    """EfficientNet: chance that the last block is skipped, growing from 0 at the first."""
    efficientnet_se: bool = True
    """EfficientNet: squeeze and excitation in every block."""
    efficientnet_activation: Literal["silu", "relu"] = "silu"
    """EfficientNet: the activation."""
    efficientnet_depth_divisor: Annotated[int, AtLeast(1)] = 8
    """EfficientNet: channels are multiples of this."""
    efficientnet_top_width: Annotated[int, AtLeast(1)] = 1280
    """EfficientNet: channels of the last convolution, before the width is applied."""
    efficientnet_width: Annotated[float, MoreThan(0)] | Auto = "auto"
    """EfficientNet: factor of all channels; auto: by its size."""
    efficientnet_depth: Annotated[float, MoreThan(0)] | Auto = "auto"
    """EfficientNet: factor of all repeats; auto: by its size."""
    resnext_groups: Annotated[int, AtLeast(1)] = 32
    """ResNeXt: groups of the middle convolutions."""
    resnext_group_dim: Annotated[int, AtLeast(1)] = 4
    """ResNeXt: channels per group in the first stage."""
    resnext_wide: bool = False
    """ResNeXt for CIFAR: stages of 256, 512 and 1024 channels instead of 64, 128 and 256."""
    squeezenet_bypass: bool = False
    """SqueezeNet: add the input of fire modules 3, 5, 7 and 9 to their output."""
    mobilenet_wide_head: bool = False
    """MobileNetV3: 1,280 channels and no bias before the classifier; else 1,024 for the small one, with a bias."""
    bottleneck_stride: Literal["1x1", "3x3"] = "3x3"
    """ResNets of 50 layers and more: which convolution of a block strides; 1x1 is He's original, 3x3 is v1.5."""
    shortcut_type: Literal["auto", "A", "B", "C", "stages"] = "auto"
    """ResNets: zero channels (A), projections where the shape changes (B), everywhere (C), or at each stage's start."""
    stem: Literal["auto", "imagenet", "cifar"] = "auto"
    """ResNets: begin with 7 x 7 pixels and pooling, or with 3 x 3 as for small images; auto: by the model's name."""
    conv_bias: bool = False
    """Convolutions have biases; for --norm-type none."""
    input_image_padding: bool = False
    """Give the first convolution a fourth, zero, input channel: the same function, sometimes faster."""


def unknown(options: Any) -> str | None:
    """A name that is neither ours nor timm's."""
    name = options.model.model
    if name in MODELS or name.startswith("timm:"):
        return None
    meant = did_you_mean(name, MODELS) or "; `falconet models` lists them, timm:NAME takes any other"
    return f"--model: '{name}' is not a model{meant}"


def is_residual(name: str) -> bool:
    """Whether a model's name is that of a ResNet or ResNeXt for photos."""
    return name in MODELS and name.startswith(("resnet", "resnext")) and not name.endswith("-cifar")


def of_another_family(options: Any) -> str | None:
    """An option of a model's shape must not seem to be obeyed by another family."""
    model = options.model
    name = model.model
    families = {
        "efficientnet_": (name.startswith("efficientnet"), "an EfficientNet"),
        "proxy_": (name.startswith("efficientnet"), "an EfficientNet"),
        "resnext_": (name.startswith("resnext"), "a ResNeXt"),
        "resnext_wide": (name.startswith("resnext") and name.endswith("-cifar"), "a ResNeXt for CIFAR"),
        "squeezenet_": (name.startswith("squeezenet"), "a SqueezeNet"),
        "mobilenet_": (name.startswith("mobilenet-v3"), "a MobileNetV3"),
        "zero_init": (name.startswith(("resnet", "resnext")), "a ResNet"),
        "bottleneck_": (is_residual(name), "a ResNet"),
        "shortcut_": (name.startswith(("resnet", "resnext")), "a ResNet"),
        "stem": (name.startswith(("resnet", "resnext")), "a ResNet"),
    }
    for field in fields(model):
        for prefix, (is_one, kind) in families.items():
            if field.name.startswith(prefix) and not is_one and getattr(model, field.name) != field.default:
                return f"--{field.name.replace('_', '-')}: '{name}' is not {kind}"
    return None


def proxy_without_norm(options: Any) -> str | None:
    if options.model.proxy_norm and options.model.norm_type == "none":
        return "--proxy-norm: contradicts --norm-type none: it follows a norm; wanted --norm-type group"
    return None


def proxy_with_lars(options: Any) -> str | None:
    """As in the original, whose layer-wise rates it was never tried with."""
    if options.model.proxy_norm and options.optimizer.optimizer == "lars":
        return "--proxy-norm: not with --optimizer lars; wanted sgd, rmsprop_tf or adamw"
    return None
