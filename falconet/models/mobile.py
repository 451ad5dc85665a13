"""MobileNets of timm, under the names of the originals."""

from dataclasses import dataclass

from torch import nn

_TIMM = {
    "mobilenet": "mobilenetv2_100",
    "mobilenet-v3-small": "mobilenetv3_small_100",
    "mobilenet-v3-large": "mobilenetv3_large_100",
}
NAMES = tuple(_TIMM)
THIRD = ("mobilenet-v3-small", "mobilenet-v3-large")
# The module before the classifier, where timm calls dropout as a function that torch.fx would freeze.
BEFORE_CLASSIFIER = {"mobilenet": "global_pool", "mobilenet-v3-small": "flatten", "mobilenet-v3-large": "flatten"}
DROPOUT = 0.2
WIDE = 1280  # channels


@dataclass(frozen=True, kw_only=True)
class MobileNetShape:
    """What the original changed about a MobileNetV3."""

    wide_head: bool = False  # 1,280 channels without a bias before the classifier, also of the small one


def create(name: str, *, classes: int, shape: MobileNetShape | None) -> nn.Module:
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
