"""The networks that are compared: their names in each library, image size and batch."""

from collections.abc import Callable
from dataclasses import dataclass

import timm
import torchvision
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

CLASSES = 1000


@dataclass(frozen=True)
class Network:
    title: str
    falconet: str
    timm: str
    torchvision: Callable[[], nn.Module]
    image_size: int
    batch: int
    goal: int  # images per second on one H200

    def of_timm(self) -> nn.Module:
        model: nn.Module = timm.create_model(self.timm, num_classes=CLASSES)
        return model


def _resnext101() -> nn.Module:
    """A ResNeXt-101 from torchvision's class and layers, which has no function for it."""
    model: nn.Module = ResNet(Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)
    return model


_NETWORKS = (
    Network("ResNet-50", "resnet50", "resnet50", torchvision.models.resnet50, 224, 512, 10_000),
    Network(
        "EfficientNet-B0", "efficientnet-b0", "efficientnet_b0", torchvision.models.efficientnet_b0, 224, 256, 12_000
    ),
    Network(
        "EfficientNet-B4", "efficientnet-b4", "efficientnet_b4", torchvision.models.efficientnet_b4, 380, 96, 1_600
    ),
    Network("ResNeXt-50 32x4d", "resnext50", "resnext50_32x4d", torchvision.models.resnext50_32x4d, 224, 256, 7_200),
    Network("ResNeXt-101 32x4d", "resnext101", "resnext101_32x4d", _resnext101, 224, 128, 3_800),
    Network(
        "MobileNetV3-large",
        "mobilenet-v3-large",
        "mobilenetv3_large_100",
        torchvision.models.mobilenet_v3_large,
        224,
        512,
        20_000,
    ),
)
NETWORKS = {network.falconet: network for network in _NETWORKS}
