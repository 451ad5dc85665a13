"""ResNets and ResNeXts of timm, in the depths and shapes of the originals."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from falconet.models.shortcuts import Shortcut, Stem

# Those that timm has a name for; the others are built from its blocks.
NAMED = {
    **{f"resnet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    "resnext50": "resnext50_32x4d",
    "resnext101": "resnext101_32x4d",
}
_BLOCKS: dict[str, tuple[str, tuple[int, ...]]] = {
    "resnet10": ("BasicBlock", (1, 1, 1, 1)),
    "resnet14": ("Bottleneck", (1, 1, 1, 1)),
    "resnet26": ("Bottleneck", (2, 2, 2, 2)),
    "resnext14": ("Bottleneck", (1, 1, 1, 1)),
    "resnext26": ("Bottleneck", (2, 2, 2, 2)),
    "resnext50": ("Bottleneck", (3, 4, 6, 3)),
    "resnext101": ("Bottleneck", (3, 4, 23, 3)),
    "resnext152": ("Bottleneck", (3, 8, 36, 3)),
}
NAMES = (
    *(f"resnet{depth}" for depth in (10, 14, 18, 26, 34, 50, 101, 152)),
    *(f"resnext{depth}" for depth in (14, 26, 50, 101, 152)),
)


@dataclass(frozen=True, kw_only=True)
class ResidualShape:
    """What the originals changed about a ResNet or ResNeXt."""

    groups: int = 32  # ResNeXt: of the middle convolutions
    group_dim: int = 4  # ResNeXt: channels per group in the first stage
    stride: Literal["1x1", "3x3"] = "3x3"  # which convolution of a bottleneck strides
    wide: bool = False  # ResNeXt for CIFAR: 256, 512 and 1024 channels instead of 64, 128 and 256
    shortcut: Shortcut = "auto"  # CIFAR networks of basic blocks: A, all others: B
    stem: Stem = "auto"  # the layers before the first block


_USUAL = ResidualShape()


def create(name: str, *, classes: int, shape: ResidualShape = _USUAL) -> nn.Module:
    """A new model; its weights come from torch's generator."""
    import timm  # takes two seconds, and the networks for CIFAR need none of it
    from timm.models import resnet

    assert name in NAMES, name
    grouped = name.startswith("resnext")
    plain = not grouped or (shape.groups, shape.group_dim) == (_USUAL.groups, _USUAL.group_dim)
    model: nn.Module
    if name in NAMED and plain:
        model = timm.create_model(NAMED[name], pretrained=False, num_classes=classes)
    else:
        block, layers = _BLOCKS[name]
        widths: dict[str, Any] = {"cardinality": shape.groups, "base_width": shape.group_dim} if grouped else {}
        model = resnet.ResNet(getattr(resnet, block), layers, num_classes=classes, **widths)
    if shape.stride == "1x1":
        _stride_first(model)
    return model


def _stride_first(model: nn.Module) -> None:
    """He's original: the first, 1 x 1, convolution of a bottleneck strides; the same parameters, another function."""
    from timm.models.resnet import Bottleneck

    for module in model.modules():
        if isinstance(module, Bottleneck):
            module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
