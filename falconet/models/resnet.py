"""ResNets and ResNeXts for photos from timm's blocks; shortcuts and stems for any residual network."""

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from falconet.config.options import Model

Side = Literal["back", "both"]  # of zero channels: after the others, or half before and half after them
# Models that timm names; the others are built from its blocks.
_TIMM = {
    **{f"resnet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    "resnext50": "resnext50_32x4d",
    "resnext101": "resnext101_32x4d",
}
_TIMM_GROUPS = (32, 4)  # groups, and channels per group in the first stage: 32x4d
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


def create(options: Model, *, classes: int) -> nn.Module:
    """A new network; its weights come from torch's generator."""
    import timm  # takes two seconds, and the CIFAR networks do not need it
    from timm.models import resnet

    name = options.model
    assert name in NAMES, name
    grouped = name.startswith("resnext")
    groups = (options.resnext_groups, options.resnext_group_dim)
    model: nn.Module
    if name in _TIMM and (not grouped or groups == _TIMM_GROUPS):
        model = timm.create_model(_TIMM[name], pretrained=False, num_classes=classes)
    else:
        block, layers = _BLOCKS[name]
        widths: dict[str, Any] = {"cardinality": groups[0], "base_width": groups[1]} if grouped else {}
        model = resnet.ResNet(getattr(resnet, block), layers, num_classes=classes, **widths)
    if options.bottleneck_stride == "1x1":  # He's original: the same parameters, another function
        for module in model.modules():
            if isinstance(module, resnet.Bottleneck):
                module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
    return model


class ZeroPadShortcut(nn.Module):
    """He's option A: every second pixel, zero channels added, no parameters."""

    def __init__(self, *, added_channels: int, stride: int) -> None:
        super().__init__()
        self.added_channels = added_channels
        self.channels_before = 0  # of the added ones
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W -> N x (C + added) x ceil(H / stride) x ceil(W / stride)
        before = self.channels_before
        sides = (0, 0, 0, 0, before, self.added_channels - before)
        return functional.pad(x[:, :, :: self.stride, :: self.stride], sides)


def pad_shortcuts(model: nn.Module, side: Side) -> None:
    """Place the zero channels of shortcuts after the others, or half of them before."""
    for module in model.modules():
        if isinstance(module, ZeroPadShortcut):
            module.channels_before = module.added_channels // 2 if side == "both" else 0


def side_of_zeros(model: nn.Module) -> Side:
    """The side on which a model's shortcuts have their zero channels."""
    padded = (module for module in model.modules() if isinstance(module, ZeroPadShortcut))
    return "both" if any(module.channels_before for module in padded) else "back"


def set_shortcuts(model: nn.Module, kind: Literal["auto", "A", "B", "C", "stages"]) -> None:
    """Replace every block's shortcut in place; new projections draw their weights from torch's generator.

    A: zero channels; B: a projection where the shape changes; C: a projection in every block; stages: one at the start
    of every stage, including the first, whose shape does not change.
    """
    if kind == "auto":
        return
    for first, block in _blocks(model):
        last_conv, last_norm = (block.conv3, block.bn3) if hasattr(block, "conv3") else (block.conv2, block.bn2)
        stride = block.conv1.stride[0] * block.conv2.stride[0]
        channels, out_channels = block.conv1.in_channels, last_conv.out_channels
        changes = stride != 1 or channels != out_channels
        projects = {"A": False, "B": changes, "C": True, "stages": first or changes}[kind]
        if projects and not isinstance(block.downsample, nn.Sequential):
            conv = _drawn(nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False))
            block.downsample = nn.Sequential(conv, nn.BatchNorm2d(out_channels))
        elif changes and not projects:
            block.downsample = ZeroPadShortcut(added_channels=out_channels - channels, stride=stride)
            nn.init.ones_(last_norm.weight)  # zero would leave the appended channels dead


def set_stem(model: nn.Module, kind: Literal["auto", "imagenet", "cifar"]) -> None:
    """Replace the layers before the first block in place: 7 x 7 and pooling for photos, 3 x 3 for 32 x 32 images."""
    conv: Any = model.conv1
    if kind == "cifar" and conv.kernel_size != (3, 3):
        model.conv1 = _drawn(nn.Conv2d(3, conv.out_channels, 3, padding=1, bias=False))
        model.maxpool = nn.Identity()
    if kind == "imagenet" and conv.kernel_size != (7, 7):
        model.conv1 = _drawn(nn.Conv2d(3, conv.out_channels, 7, stride=2, padding=3, bias=False))
        model.relu = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))


def blocks_of(model: nn.Module) -> Iterator[Any]:
    """The residual blocks in the order in which they run."""
    return (block for _, block in _blocks(model))


def _blocks(model: nn.Module) -> Iterator[tuple[bool, Any]]:
    """Each block, and whether it starts a stage."""
    for name in ("layer1", "layer2", "layer3", "layer4"):
        for number, block in enumerate(getattr(model, name, ())):
            yield number == 0, block


def _drawn(conv: nn.Conv2d) -> nn.Conv2d:
    """Draw He's weights for a convolution, as for the other ones."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
