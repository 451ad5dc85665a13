"""The modules of SqueezeNet that are torchvision's, or made of them; apart, because torchvision is slow to import."""

from torch import Tensor
from torchvision.models.squeezenet import Fire
from torchvision.models.squeezenet import SqueezeNet as SqueezeNet


class BypassedFire(Fire):  # type: ignore[misc]  # torchvision has no types
    """A fire module around which its input goes as well."""

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W, both
        out: Tensor = x + super().forward(x)
        return out
