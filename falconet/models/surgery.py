"""Changes to a built model that leave its function as it was."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from falconet.errors import ConfigError

PADDED_CHANNELS = 4  # what half-precision convolution kernels want: 8-byte aligned pixels


class PaddedConv2d(nn.Conv2d):
    """A convolution of 3 channels whose kernel sees 4, the last one zero.

    The weight keeps its 3 channels, so state dicts and optimizer state are those of the plain convolution.
    """

    def forward(self, images: Tensor) -> Tensor:  # images: N x 3 (or 4, already padded) x H x W
        # Arithmetic on the shape and no branch, so that torch.fx can trace it.
        images = functional.pad(images, (0, 0, 0, 0, 0, PADDED_CHANNELS - images.shape[1]))
        weight = functional.pad(self.weight, (0, 0, 0, 0, 0, PADDED_CHANNELS - self.in_channels))
        out: Tensor = self._conv_forward(images, weight, self.bias)
        return out


def pad_input(model: nn.Module) -> nn.Module:
    """`model` with its first convolution replaced, in place, by a padded one with the same parameters."""
    name, conv = _first_conv(model)
    geometry: dict[str, Any] = {
        field: getattr(conv, field) for field in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    }
    padded = PaddedConv2d(conv.in_channels, conv.out_channels, bias=conv.bias is not None, device="meta", **geometry)
    padded.weight, padded.bias = conv.weight, conv.bias
    model.set_submodule(name, padded.train(conv.training))
    return model


def _first_conv(model: nn.Module) -> tuple[str, nn.Conv2d]:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            # A subclass computes something of its own, which the padded forward would lose.
            if type(layer) is not nn.Conv2d or layer.in_channels != 3 or layer.groups != 1:
                raise ConfigError(
                    f"--input-image-padding: the first convolution '{name}' is {type(layer).__name__} of "
                    f"{layer.in_channels} channels in {layer.groups} group(s); wanted a plain Conv2d of 3 in 1"
                )
            return name, layer
    raise ConfigError("--input-image-padding: this model has no convolution to pad")
