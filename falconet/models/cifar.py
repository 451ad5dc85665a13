"""The residual networks of He et al. for 32 x 32 images, which timm does not have."""

import torch
from torch import Tensor, nn
from torch.nn import functional

DEPTHS = (8, 14, 20, 32, 44, 56, 110)  # 6n + 2


class ZeroPadShortcut(nn.Module):
    """He's option A: every second pixel, zero channels appended, no parameters."""

    def __init__(self, *, added_channels: int, stride: int) -> None:
        super().__init__()
        self.added_channels = added_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W -> N x (C + added) x ceil(H / stride) x ceil(W / stride)
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added_channels))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

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


class CifarResNet(nn.Module):
    """Three stages of n basic blocks, 16, 32 and 64 channels wide; any image of 8 x 8 or more."""

    def __init__(self, depth: int, *, classes: int) -> None:
        super().__init__()
        assert depth in DEPTHS
        blocks = (depth - 2) // 6
        self.conv1 = _conv3x3(3, out_channels=16, stride=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _layer(16, out_channels=16, blocks=blocks, stride=1)
        self.layer2 = _layer(16, out_channels=32, blocks=blocks, stride=2)
        self.layer3 = _layer(32, out_channels=64, blocks=blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)
        self.init_weights()

    def init_weights(self) -> None:
        """He's normal for the convolutions; a block whose shortcut carries every channel starts as that alone.

        Where the shortcut appends zero channels, a zero-initialised norm would leave those channels dead at the start.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock) and isinstance(module.downsample, nn.Identity):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, images: Tensor) -> Tensor:  # N x 3 x H x W -> N x classes
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def _conv3x3(channels: int, *, out_channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)


def _layer(channels: int, *, out_channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(channels, out_channels=out_channels, stride=stride)
    rest = [BasicBlock(out_channels, out_channels=out_channels, stride=1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)
