"""MobileNets of timm, under the names of the originals."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from falconet.config.options import Model
from falconet.errors import ConfigError, did_you_mean
from falconet.models import cifar, init, norms, padding, resnet
from falconet.models.init import Draw, Zeros
from falconet.models.norms import Norm
from falconet.models.padding import Padding
from falconet.models.proxynorm import Proxy
from falconet.models.resnet import ResidualShape

_TIMM = {
    "mobilenet": "mobilenetv2_100",
    "mobilenet-v3-small": "mobilenetv3_small_100",
    "mobilenet-v3-large": "mobilenetv3_large_100",
}
MOBILENETS = tuple(_TIMM)
THIRD = ("mobilenet-v3-small", "mobilenet-v3-large")
# The module before the classifier, where timm calls dropout as a function that torch.fx would freeze.
BEFORE_CLASSIFIER = {"mobilenet": "global_pool", "mobilenet-v3-small": "flatten", "mobilenet-v3-large": "flatten"}
DROPOUT = 0.2
WIDE = 1280  # channels


@dataclass(frozen=True, kw_only=True)
class MobileNetShape:
    """What the original changed about a MobileNetV3."""

    wide_head: bool = False  # 1,280 channels without a bias before the classifier, also of the small one


def create_mobilenet(name: str, *, classes: int, shape: MobileNetShape | None) -> nn.Module:
    """A new model without dropout; its weights come from torch's generator."""
    import timm  # takes two seconds, and the networks for CIFAR need none of it

    model: nn.Module = timm.create_model(_TIMM[name], pretrained=False, num_classes=classes)
    if shape is not None and shape.wide_head:
        channels = model.get_submodule("conv_head").in_channels
        assert isinstance(channels, int)
        model.set_submodule("conv_head", nn.Conv2d(channels, WIDE, 1, bias=False))
        model.set_submodule("classifier", nn.Linear(WIDE, classes))
        _draw_anew(model)
    return model


def _draw_anew(model: nn.Module) -> None:
    """By timm's rule for all the others too, in one order."""
    from timm.models._efficientnet_builder import efficientnet_init_weights

    efficientnet_init_weights(model)


SQUEEZENETS = ("squeezenet", "squeezenet-cifar")
SMALLEST_SQUEEZENET = {
    "squeezenet": 21,
    "squeezenet-cifar": 8,
}  # pixels a side: below, nothing is left for the last layers
_BYPASSED = ("features.4", "features.7", "features.9", "features.12")  # fire 3, 5, 7 and 9, as wide as what they get


@dataclass(frozen=True, kw_only=True)
class SqueezeNetShape:
    """What the original changed about a SqueezeNet."""

    bypass: bool = False  # fire 3, 5, 7 and 9 add their input: the simple bypass of Iandola et al.


def create_squeezenet(name: str, *, classes: int, shape: SqueezeNetShape | None) -> nn.Module:
    """A new network of that name; its weights come from torch's generator.

    They begin as the original's did, after Glorot and Bengio: with torchvision's larger ones the bypass, which no norm
    tames, overflows within ten updates at the original's learning rate. So does the last layer, which was nearer to
    zero there: then its rectified logits never come alive (docs/log.md, both).
    """
    from falconet.models.fire import BypassedFire, SqueezeNet  # torchvision takes two seconds to import

    model: nn.Module = SqueezeNet("1_0", num_classes=classes)
    if name == "squeezenet-cifar":
        model.set_submodule("features.0", nn.Conv2d(3, 96, 3, padding=1))  # 32 pixels are 32, 16, 8, 4; not 13, 6, 3, 1
        model.set_submodule("classifier.2", nn.Identity())  # a relu of few classes' logits often leaves none alive
    init.draw(model, "glorot")
    if shape is not None and shape.bypass:
        for path in _BYPASSED:
            model.get_submodule(path).__class__ = BypassedFire  # the layers stay the very same
    return model


# timm is imported where it is used: it takes two seconds, and the networks for CIFAR need none of it.
TIMM_PREFIX = "timm:"


@dataclass(frozen=True)
class _Size:
    """How an EfficientNet of one size differs from B0, after Tan and Le."""

    width: float
    depth: float
    side: int  # pixels
    dropout: float
    small: bool = False  # for images of 32 x 32: strides neither in the stem nor in the second stage


_EFFICIENTNETS = {
    "efficientnet-b0": _Size(1.0, 1.0, 224, 0.2),
    "efficientnet-b1": _Size(1.0, 1.1, 240, 0.2),
    "efficientnet-b2": _Size(1.1, 1.2, 260, 0.3),
    "efficientnet-b3": _Size(1.2, 1.4, 300, 0.3),
    "efficientnet-b4": _Size(1.4, 1.8, 380, 0.4),
    "efficientnet-b5": _Size(1.6, 2.2, 456, 0.4),
    "efficientnet-b6": _Size(1.8, 2.6, 528, 0.5),
    "efficientnet-b7": _Size(2.0, 3.1, 600, 0.5),
    "efficientnet-cifar": _Size(0.5, 1.0, 32, 0.0, small=True),
}
_STEM_CHANNELS = 32


@dataclass(frozen=True, kw_only=True)
class EfficientNetShape:
    """What the originals changed about an EfficientNet."""

    expand_ratio: int = 6  # of every stage after the first
    group_dim: int = 1  # channels per group of the depthwise convolutions
    dropout: float | None = None  # before the classifier; None: by the size
    drop_path: float = 0.2  # at the last block, growing linearly from 0 at the first
    se: bool = True  # squeeze and excitation
    activation: Literal["silu", "relu"] = "silu"
    divisor: int = 8  # of the channels
    top_width: int = 1280  # channels of the last convolution, before the width
    width: float | None = None  # factor of the channels; None: by the size
    depth: float | None = None  # factor of the repeats; None: by the size


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a model begins and pads, where that is not as its library has it."""

    weights: Draw = "auto"
    zeros: Zeros = "auto"  # residual networks: norms whose scale begins at zero
    padding: Padding = "symmetric"
    padded_input: bool = False  # the first convolution sees a fourth, zero, channel


Shape = EfficientNetShape | ResidualShape | SqueezeNetShape | MobileNetShape
_TAN_AND_LE = EfficientNetShape()
_AS_BUILT = Norm()
_AS_MADE = Variant()


def build(
    name: str,
    *,
    classes: int,
    seed: int,
    norm: Norm = _AS_BUILT,
    shape: Shape | None = None,
    variant: Variant = _AS_MADE,
) -> nn.Module:
    """A new fp32 model on the CPU, channels last; its weights depend on `seed` and nothing else."""
    _check_name(name)
    _check_shape(shape, name=name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs
        model = _create(name, classes=classes, shape=shape)
        init.draw(model, variant.weights)
        init.set_zeros(model, variant.zeros)
    norms.apply(model, norm)
    if variant.padded_input:
        padding.pad_input(model)
    if variant.padding == "same":
        padding.pad_as_tensorflow(model)
    return model.to(memory_format=torch.channels_last)


def names() -> tuple[str, ...]:
    """The names `build` knows without a `timm:` before them."""
    return (*resnet.NAMES, *_EFFICIENTNETS, *MOBILENETS, *cifar.NAMES, *SQUEEZENETS)


def image_size(name: str) -> int:
    """The side, in pixels, of the images the model was designed for."""
    _check_name(name)
    if name in _EFFICIENTNETS:
        return _EFFICIENTNETS[name].side
    if name in names():
        return 32 if name.endswith("-cifar") else 224
    import timm

    timm_config = timm.get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
    assert timm_config is not None  # only a model missing from timm's list may have none
    _, height, width = timm_config.input_size
    if height != width:
        raise ConfigError(f"--model: '{name}' wants images of {height} x {width}; only square ones are read here")
    return int(height)


def check_image_size(name: str, size: int) -> None:
    """Refuse images of which the model's strides would leave nothing."""
    least = SMALLEST_SQUEEZENET.get(name, 1)
    if size < least:
        smaller = "" if name.endswith("-cifar") else f"; {name}-cifar takes smaller ones"
        raise ConfigError(f"--image-size: got {size}, wanted at least {least} for {name}{smaller}")


def count_parameters(model: nn.Module) -> int:
    """How many numbers `model` has, without the running statistics of its norms."""
    return sum(parameter.numel() for parameter in model.parameters())


def _create(name: str, *, classes: int, shape: Shape | None) -> nn.Module:
    if name in _EFFICIENTNETS:
        own = shape if isinstance(shape, EfficientNetShape) else _TAN_AND_LE
        return _create_efficientnet(_EFFICIENTNETS[name], shape=own, classes=classes)
    if name in resnet.NAMES or name in cifar.NAMES:
        return _create_residual(name, classes=classes, shape=shape if isinstance(shape, ResidualShape) else None)
    if name in SQUEEZENETS:
        return create_squeezenet(name, classes=classes, shape=shape if isinstance(shape, SqueezeNetShape) else None)
    if name in MOBILENETS:
        model = create_mobilenet(name, classes=classes, shape=shape if isinstance(shape, MobileNetShape) else None)
        _append_dropout(model, after=BEFORE_CLASSIFIER[name], rate=DROPOUT)
        return model
    import timm

    other: nn.Module = timm.create_model(name.removeprefix(TIMM_PREFIX), pretrained=False, num_classes=classes)
    return other


def _create_residual(name: str, *, classes: int, shape: ResidualShape | None) -> nn.Module:
    if name in resnet.NAMES:
        model = resnet.create(name, classes=classes, shape=shape or ResidualShape())
    else:
        model = cifar.create(name, classes=classes, shape=shape)
    if shape:
        resnet.set_shortcuts(model, shape.shortcut)
        resnet.set_stem(model, shape.stem)
    return model


def _create_efficientnet(size: _Size, *, shape: EfficientNetShape, classes: int) -> nn.Module:
    """timm's EfficientNet from an architecture of our own, because timm's builders fix the expand ratio."""
    from timm.models._efficientnet_builder import decode_arch_def, round_channels
    from timm.models.efficientnet import EfficientNet

    assert shape.expand_ratio >= 1
    assert shape.group_dim >= 1
    expand, se = shape.expand_ratio, "_se0.25" if shape.se else ""
    stride = 1 if size.small else 2
    width = size.width if shape.width is None else shape.width
    # ds: depthwise separable; ir: inverted residual; r: repeats; k: kernel; s: stride; e: expand; c: channels out
    stages = [
        [f"ds_r1_k3_s1_e1_c16{se}"],
        [f"ir_r2_k3_s{stride}_e{expand}_c24{se}"],
        [f"ir_r2_k5_s2_e{expand}_c40{se}"],
        [f"ir_r3_k3_s2_e{expand}_c80{se}"],
        [f"ir_r3_k5_s1_e{expand}_c112{se}"],
        [f"ir_r4_k5_s2_e{expand}_c192{se}"],
        [f"ir_r1_k3_s1_e{expand}_c320{se}"],
    ]
    rounded = partial(round_channels, multiplier=width, divisor=shape.divisor)
    depth = size.depth if shape.depth is None else shape.depth
    block_args = decode_arch_def(stages, depth)  # type: ignore[no-untyped-call]
    channels = rounded(_STEM_CHANNELS)
    for block in (block for stage in block_args for block in stage):
        expanded = channels * int(block.get("exp_ratio", 1))
        block["group_size"] = _group_size(expanded, at_least=shape.group_dim)
        channels = rounded(block["out_chs"])
    model: nn.Module = EfficientNet(
        block_args,
        num_classes=classes,
        stem_size=_STEM_CHANNELS,
        num_features=rounded(shape.top_width),
        round_chs_fn=rounded,
        act_layer=nn.SiLU if shape.activation == "silu" else nn.ReLU,
        norm_layer=nn.BatchNorm2d,
        drop_path_rate=shape.drop_path,
    )
    if size.small:
        model.get_submodule("conv_stem").stride = (1, 1)  # type: ignore[assignment]  # a convolution
    _append_dropout(model, after="global_pool", rate=size.dropout if shape.dropout is None else shape.dropout)
    return model


def _group_size(channels: int, *, at_least: int) -> int:
    """The original's groups, `channels // group_dim`, but as many of them as divide the channels evenly."""
    groups = max(channels // at_least, 1)
    while channels % groups:
        groups -= 1
    return channels // groups


def _append_dropout(model: nn.Module, *, after: str, rate: float) -> None:
    """Dropout as a module, which model.train() and eval() reach in a traced model too; no key changes."""
    model.set_submodule(after, nn.Sequential(model.get_submodule(after), nn.Dropout(rate)))


def _check_name(name: str) -> None:
    if name in names():
        return
    import timm

    known = {*timm.list_models(), *timm.list_pretrained()}  # the latter with their tags, as resnet50.a1_in1k
    if not name.startswith(TIMM_PREFIX):
        # resnet20 means resnet20-cifar, though resnet50 is nearer by spelling.
        begun = [each for each in names() if each.startswith(name)]
        with_prefix = [TIMM_PREFIX + name] if name in known else []
        raise ConfigError(f"--model: '{name}' is not a model{did_you_mean(name, begun or [*names(), *with_prefix])}")
    timm_name = name.removeprefix(TIMM_PREFIX)
    if timm_name not in known:
        # Sorted, so that of two equally near names it is always the same one.
        meant = did_you_mean(name, sorted(TIMM_PREFIX + each for each in known))
        raise ConfigError(f"--model: '{name}' is not a model of timm{meant}")


def _check_shape(shape: Shape | None, *, name: str) -> None:
    """A model must not seem to have a shape that it cannot have."""
    if isinstance(shape, EfficientNetShape) and name not in _EFFICIENTNETS:
        raise ConfigError(f"--model: '{name}' has no such shape; wanted efficientnet-b0 to efficientnet-b7")
    if isinstance(shape, ResidualShape) and name not in (*resnet.NAMES, *cifar.NAMES):
        raise ConfigError(f"--model: '{name}' has no such shape; wanted a resnet or resnext")
    if isinstance(shape, SqueezeNetShape) and name not in SQUEEZENETS:
        raise ConfigError(f"--model: '{name}' has no such shape; wanted a squeezenet")
    if isinstance(shape, MobileNetShape) and name not in THIRD:
        raise ConfigError(f"--model: '{name}' has no such shape; wanted mobilenet-v3-small or mobilenet-v3-large")


def build_model(model: Model, *, classes: int, seed: int) -> nn.Module:
    norm = Norm(
        kind=model.norm_type,
        eps=None if model.norm_eps == "auto" else model.norm_eps,
        groups=model.norm_num_groups,
        momentum=None if model.batchnorm_momentum == "auto" else model.batchnorm_momentum,
        fast=model.enable_fast_groupnorm,
        stable=not model.disable_stable_batchnorm,
        strided=model.norm_grouping == "strided",
        proxy=Proxy(eps=model.proxy_epsilon, recompute=model.proxy_recompute) if model.proxy_norm else None,
        biases=model.conv_bias,
    )
    return build(
        model.model,
        classes=classes,
        seed=seed,
        norm=norm,
        shape=shape_of(model),
        variant=Variant(
            weights=model.weight_init,
            zeros=model.zero_init,
            padding=model.padding,
            padded_input=model.input_image_padding,
        ),
    )


def shape_of(model: Model) -> Shape | None:
    """What the options change about the model's family; the rules refuse those of another family."""
    if model.model.startswith("efficientnet"):
        return EfficientNetShape(
            expand_ratio=model.efficientnet_expand_ratio,
            group_dim=model.efficientnet_group_dim,
            dropout=None if model.efficientnet_dropout == "auto" else model.efficientnet_dropout,
            drop_path=model.efficientnet_drop_path,
            se=model.efficientnet_se,
            activation=model.efficientnet_activation,
            divisor=model.efficientnet_depth_divisor,
            top_width=model.efficientnet_top_width,
            width=None if model.efficientnet_width == "auto" else model.efficientnet_width,
            depth=None if model.efficientnet_depth == "auto" else model.efficientnet_depth,
        )
    if model.model.startswith(("resnet", "resnext")):
        return ResidualShape(
            groups=model.resnext_groups,
            group_dim=model.resnext_group_dim,
            stride=model.bottleneck_stride,
            wide=model.resnext_wide,
            shortcut=model.shortcut_type,
            stem=model.stem,
        )
    if model.model.startswith("mobilenet-v3"):
        return MobileNetShape(wide_head=model.mobilenet_wide_head)
    return SqueezeNetShape(bypass=True) if model.squeezenet_bypass else None
