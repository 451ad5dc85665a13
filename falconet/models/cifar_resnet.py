"""The residual networks of He et al. for 32 x 32 images, which timm does not have."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from falconet.config.options import Model
from falconet.models.resnet import ZeroPadShortcut

DEPTHS = (8, 14, 20, 32, 44, 56, 110)  # 6n + 2
BOTTLENECK_DEPTHS = (11, 29, 38, 47, 56, 65)  # 9n + 2
EXPANSION = 4  # of a bottleneck
BASIC = {f"resnet{depth}-cifar": depth for depth in DEPTHS}
# There are two networks with 56 layers; 56b is the one with bottlenecks.
BOTTLENECKS = {f"resnet{depth}{'b' if depth in DEPTHS else ''}-cifar": depth for depth in BOTTLENECK_DEPTHS}
GROUPED = {f"resnext{depth}-cifar": depth for depth in BOTTLENECK_DEPTHS}
NAMES = (*BASIC, *BOTTLENECKS, *GROUPED)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut."""

    def __init__(self, channels: int, *, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels, out_channels=out_channels, stride=stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(out_channels, out_channels=out_channels, stride=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        changes = stride != 1 or channels != out_channels
        self.downsample = (
            ZeroPadShortcut(added_channels=out_channels - channels, stride=stride) if changes else nn.Identity()
        )
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu2(residual + self.downsample(x))
        return out


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, with a shortcut that is projected if the shape changes."""

    def __init__(self, channels: int, *, inner: int, out_channels: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(inner, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != out_channels:
            projection = nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out_channels))
        self.relu3 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.relu2(self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x))))))
        out: Tensor = self.relu3(self.bn3(self.conv3(residual)) + self.downsample(x))
        return out


class _ThreeStages(nn.Module):
    """A 3 x 3 convolution, then three stages, each twice as wide as the last; takes images of 8 x 8 and larger."""

    def __init__(
        self, width: int, layer: Callable[[int, int, int], nn.Sequential], *, expansion: int, classes: int
    ) -> None:
        """`layer` makes a stage from (channels in, width, stride); its output is `expansion` times as wide."""
        super().__init__()
        self.conv1 = _conv3x3(3, out_channels=width, stride=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = layer(width, width, 1)
        self.layer2 = layer(width * expansion, 2 * width, 2)
        self.layer3 = layer(2 * width * expansion, 4 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width * expansion, classes)
        self.init_weights()

    def init_weights(self) -> None:
        """He's normal for convolutions; a block whose shortcut carries every channel starts as its shortcut alone.

        If the shortcut appends zero channels, a zero-initialised norm would leave those channels dead at first.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock | Bottleneck) and isinstance(module.downsample, nn.Identity):
                last = module.bn2 if isinstance(module, BasicBlock) else module.bn3
                nn.init.zeros_(last.weight)

    def forward(self, images: Tensor) -> Tensor:  # N x 3 x H x W -> N x classes
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


class CifarResNet(_ThreeStages):
    """Three stages of n basic blocks, 16, 32 and 64 channels wide."""

    def __init__(self, depth: int, *, classes: int) -> None:
        assert depth in DEPTHS
        blocks = (depth - 2) // 6

        def layer(channels: int, width: int, stride: int) -> nn.Sequential:
            first = BasicBlock(channels, out_channels=width, stride=stride)
            return nn.Sequential(first, *(BasicBlock(width, out_channels=width, stride=1) for _ in range(blocks - 1)))

        super().__init__(16, layer, expansion=1, classes=classes)


class CifarBottleneckNet(_ThreeStages):
    """Three stages of n bottlenecks, 64, 128 and 256 channels wide, or four times that; with groups, a ResNeXt."""

    def __init__(self, depth: int, *, classes: int, first: int = 16, groups: int = 1, group_dim: int = 16) -> None:
        """`first`: width of the first stage, in which a group has `group_dim` inner channels."""
        assert depth in BOTTLENECK_DEPTHS
        times = groups * group_dim / first

        def layer(channels: int, width: int, stride: int) -> nn.Sequential:
            shape = {"inner": int(width * times), "out_channels": EXPANSION * width, "groups": groups}
            rest = [Bottleneck(EXPANSION * width, stride=1, **shape) for _ in range((depth - 2) // 9 - 1)]
            return nn.Sequential(Bottleneck(channels, stride=stride, **shape), *rest)

        super().__init__(first, layer, expansion=EXPANSION, classes=classes)


def create(options: Model, *, classes: int) -> nn.Module:
    """A new network; its weights come from torch's generator."""
    name = options.model
    if name in BASIC:
        return CifarResNet(BASIC[name], classes=classes)
    if name in BOTTLENECKS:
        return CifarBottleneckNet(BOTTLENECKS[name], classes=classes)
    return CifarBottleneckNet(
        GROUPED[name],
        classes=classes,
        first=64 if options.resnext_wide else 16,
        groups=options.resnext_groups,
        group_dim=options.resnext_group_dim,
    )


def _conv3x3(channels: int, *, out_channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
