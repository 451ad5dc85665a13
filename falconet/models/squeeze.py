"""SqueezeNet: torchvision's version 1.0, with a bypass on request, and one for small images."""

from dataclasses import dataclass

from torch import nn

from falconet.models import initial

NAMES = ("squeezenet", "squeezenet-cifar")
SMALLEST = {"squeezenet": 21, "squeezenet-cifar": 8}  # pixels a side: below, nothing is left for the last layers
_BYPASSED = ("features.4", "features.7", "features.9", "features.12")  # fire 3, 5, 7 and 9, as wide as what they get


@dataclass(frozen=True, kw_only=True)
class SqueezeNetShape:
    """What the original changed about a SqueezeNet."""

    bypass: bool = False  # fire 3, 5, 7 and 9 add their input: the simple bypass of Iandola et al.


def create(name: str, *, classes: int, shape: SqueezeNetShape | None) -> nn.Module:
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
    initial.draw(model, "glorot")
    if shape is not None and shape.bypass:
        for path in _BYPASSED:
            model.get_submodule(path).__class__ = BypassedFire  # the layers stay the very same
    return model
