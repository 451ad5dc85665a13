"""Every model by its name: timm's under the names of the originals, ours, and any other of timm."""

from dataclasses import dataclass
from functools import partial

import timm
import torch
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet
from torch import nn

from falconet.errors import ConfigError, did_you_mean
from falconet.models import cifar, norms, surgery
from falconet.models.norms import Norm

TIMM_PREFIX = "timm:"

_RESIDUAL = {
    "resnet18": "resnet18",
    "resnet34": "resnet34",
    "resnet50": "resnet50",
    "resnet101": "resnet101",
    "resnet152": "resnet152",
    "resnext50": "resnext50_32x4d",
    "resnext101": "resnext101_32x4d",
}
_MOBILE = {
    "mobilenet": "mobilenetv2_100",
    "mobilenet-v3-small": "mobilenetv3_small_100",
    "mobilenet-v3-large": "mobilenetv3_large_100",
}
_TIMM_NAMES = _RESIDUAL | _MOBILE

# The module before the classifier, where timm calls dropout as a function that torch.fx would freeze.
_BEFORE_CLASSIFIER = {"mobilenet": "global_pool", "mobilenet-v3-small": "flatten", "mobilenet-v3-large": "flatten"}
_MOBILENET_DROPOUT = 0.2

_CIFAR_DEPTHS = {f"resnet{depth}-cifar": depth for depth in cifar.DEPTHS}


@dataclass(frozen=True)
class _Size:
    """How an EfficientNet of one size differs from B0, after Tan and Le."""

    width: float
    depth: float
    side: int  # pixels
    dropout: float


_EFFICIENTNETS = {
    "efficientnet-b0": _Size(1.0, 1.0, 224, 0.2),
    "efficientnet-b1": _Size(1.0, 1.1, 240, 0.2),
    "efficientnet-b2": _Size(1.1, 1.2, 260, 0.3),
    "efficientnet-b3": _Size(1.2, 1.4, 300, 0.3),
    "efficientnet-b4": _Size(1.4, 1.8, 380, 0.4),
    "efficientnet-b5": _Size(1.6, 2.2, 456, 0.4),
    "efficientnet-b6": _Size(1.8, 2.6, 528, 0.5),
    "efficientnet-b7": _Size(2.0, 3.1, 600, 0.5),
}
_DROP_PATH = 0.2  # at the last block, growing linearly from 0 at the first
_STEM_CHANNELS = 32
_HEAD_CHANNELS = 1280


@dataclass(frozen=True, kw_only=True)
class EfficientNetShape:
    """What the originals changed about an EfficientNet."""

    expand_ratio: int = 6  # of every stage after the first
    group_dim: int = 1  # channels per group of the depthwise convolutions


_TAN_AND_LE = EfficientNetShape()
_AS_BUILT = Norm()


def build(
    name: str,
    *,
    classes: int,
    seed: int,
    norm: Norm = _AS_BUILT,
    efficientnet: EfficientNetShape = _TAN_AND_LE,
    padded_input: bool = False,
) -> nn.Module:
    """A new fp32 model on the CPU, channels last; its weights depend on `seed` and nothing else."""
    _check_name(name)
    if name not in _EFFICIENTNETS:
        _check_shape_unasked(efficientnet, name=name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs
        model = _create(name, classes=classes, efficientnet=efficientnet)
    norms.apply(model, norm)
    if padded_input:
        surgery.pad_input(model)
    return model.to(memory_format=torch.channels_last)


def names() -> tuple[str, ...]:
    """The names `build` knows without a `timm:` before them."""
    return (*_RESIDUAL, *_EFFICIENTNETS, *_MOBILE, *_CIFAR_DEPTHS)


def image_size(name: str) -> int:
    """The side, in pixels, of the images the model was designed for."""
    _check_name(name)
    if name in _EFFICIENTNETS:
        return _EFFICIENTNETS[name].side
    if name in _CIFAR_DEPTHS:
        return 32
    if name in _TIMM_NAMES:
        return 224
    timm_config = timm.get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
    assert timm_config is not None  # only a model missing from timm's list may have none
    _, height, width = timm_config.input_size
    if height != width:
        raise ConfigError(f"--model: '{name}' wants images of {height} x {width}; only square ones are read here")
    return int(height)


def count_parameters(model: nn.Module) -> int:
    """How many numbers `model` has, without the running statistics of its norms."""
    return sum(parameter.numel() for parameter in model.parameters())


def _create(name: str, *, classes: int, efficientnet: EfficientNetShape) -> nn.Module:
    if name in _EFFICIENTNETS:
        return _create_efficientnet(_EFFICIENTNETS[name], shape=efficientnet, classes=classes)
    if name in _CIFAR_DEPTHS:
        return cifar.CifarResNet(_CIFAR_DEPTHS[name], classes=classes)
    timm_name = _TIMM_NAMES.get(name, name.removeprefix(TIMM_PREFIX))
    model: nn.Module = timm.create_model(timm_name, pretrained=False, num_classes=classes)
    if name in _BEFORE_CLASSIFIER:
        _append_dropout(model, after=_BEFORE_CLASSIFIER[name], rate=_MOBILENET_DROPOUT)
    return model


def _create_efficientnet(size: _Size, *, shape: EfficientNetShape, classes: int) -> nn.Module:
    """timm's EfficientNet from an architecture of our own, because timm's builders fix the expand ratio."""
    assert shape.expand_ratio >= 1
    assert shape.group_dim >= 1
    expand = shape.expand_ratio
    # ds: depthwise separable; ir: inverted residual; r: repeats; k: kernel; s: stride; e: expand; c: channels out
    stages = [
        ["ds_r1_k3_s1_e1_c16_se0.25"],
        [f"ir_r2_k3_s2_e{expand}_c24_se0.25"],
        [f"ir_r2_k5_s2_e{expand}_c40_se0.25"],
        [f"ir_r3_k3_s2_e{expand}_c80_se0.25"],
        [f"ir_r3_k5_s1_e{expand}_c112_se0.25"],
        [f"ir_r4_k5_s2_e{expand}_c192_se0.25"],
        [f"ir_r1_k3_s1_e{expand}_c320_se0.25"],
    ]
    rounded = partial(round_channels, multiplier=size.width)
    block_args = decode_arch_def(stages, size.depth)  # type: ignore[no-untyped-call]
    channels = rounded(_STEM_CHANNELS)
    for block in (block for stage in block_args for block in stage):
        expanded = channels * int(block.get("exp_ratio", 1))
        block["group_size"] = _group_size(expanded, at_least=shape.group_dim)
        channels = rounded(block["out_chs"])
    model: nn.Module = EfficientNet(
        block_args,
        num_classes=classes,
        stem_size=_STEM_CHANNELS,
        num_features=rounded(_HEAD_CHANNELS),
        round_chs_fn=rounded,
        act_layer=nn.SiLU,
        norm_layer=nn.BatchNorm2d,
        drop_path_rate=_DROP_PATH,
    )
    _append_dropout(model, after="global_pool", rate=size.dropout)
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


def _check_shape_unasked(shape: EfficientNetShape, *, name: str) -> None:
    asked = {
        f"--efficientnet-expand-ratio {shape.expand_ratio}": shape.expand_ratio != _TAN_AND_LE.expand_ratio,
        f"--efficientnet-group-dim {shape.group_dim}": shape.group_dim != _TAN_AND_LE.group_dim,
    }
    for option, given in asked.items():
        if given:
            raise ConfigError(f"{option}: '{name}' has no such shape; wanted efficientnet-b0 to efficientnet-b7")
