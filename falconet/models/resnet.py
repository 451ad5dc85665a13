"""What the originals changed about a residual network's shortcuts and its first layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Shortcut = Literal["auto", "A", "B", "C", "stages"]
Stem = Literal["auto", "imagenet", "cifar"]


class ZeroPadShortcut(nn.Module):
    """He's option A: every second pixel, zero channels appended, no parameters."""

    def __init__(self, *, added_channels: int, stride: int) -> None:
        super().__init__()
        self.added_channels = added_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W -> N x (C + added) x ceil(H / stride) x ceil(W / stride)
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added_channels))


def set_shortcuts(model: nn.Module, kind: Shortcut) -> None:
    """Every block's shortcut, in place; new projections draw their weights from torch's generator.

    A: zero channels; B: a projection where the shape changes; C: one in every block; stages: one at the beginning of
    every stage, also of the first, whose shape stays.
    """
    for first, block in _blocks(model):
        last_conv, last_norm = (block.conv3, block.bn3) if hasattr(block, "conv3") else (block.conv2, block.bn2)
        stride = block.conv1.stride[0] * block.conv2.stride[0]
        shape = {"channels": block.conv1.in_channels, "out_channels": last_conv.out_channels, "stride": stride}
        changes = stride != 1 or shape["channels"] != shape["out_channels"]
        projects = {"A": False, "B": changes, "C": True, "stages": first or changes}
        if kind == "auto" or (projects[kind] and isinstance(block.downsample, nn.Sequential)):
            continue
        if projects[kind]:
            block.downsample = _projection(**shape)
        elif changes:
            added = shape["out_channels"] - shape["channels"]
            block.downsample = ZeroPadShortcut(added_channels=added, stride=stride)
            nn.init.ones_(last_norm.weight)  # zero would leave the appended channels dead


def set_stem(model: nn.Module, kind: Stem) -> None:
    """The layers before the first block, in place: 7 x 7 and pooling for photos, 3 x 3 for 32 x 32 pixels."""
    conv: Any = model.conv1
    if kind == "cifar" and conv.kernel_size != (3, 3):
        model.conv1 = _drawn(nn.Conv2d(3, conv.out_channels, 3, padding=1, bias=False))
        model.maxpool = nn.Identity()
    if kind == "imagenet" and conv.kernel_size != (7, 7):
        model.conv1 = _drawn(nn.Conv2d(3, conv.out_channels, 7, stride=2, padding=3, bias=False))
        model.relu = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))


def add_biases(model: nn.Module) -> None:
    """Give every convolution without a bias one of zeros, which a network without norms wants."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.bias is None:
            layer.bias = nn.Parameter(torch.zeros(layer.out_channels))


def blocks_of(model: nn.Module) -> Iterator[Any]:
    """The residual blocks in the order in which they run."""
    return (block for _, block in _blocks(model))


def _blocks(model: nn.Module) -> Iterator[tuple[bool, Any]]:
    """Whether a block begins a stage, and the block."""
    for name in ("layer1", "layer2", "layer3", "layer4"):
        for number, block in enumerate(getattr(model, name, ())):
            yield number == 0, block


def _projection(*, channels: int, out_channels: int, stride: int) -> nn.Sequential:
    conv = _drawn(nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False))
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


def _drawn(conv: nn.Conv2d) -> nn.Conv2d:
    """With He's weights, which the other convolutions have too."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


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
