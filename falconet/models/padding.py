"""Padding: a fourth input channel for the first convolution, and TensorFlow's SAME padding."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from falconet.errors import ConfigError

PADDED_CHANNELS = 4  # half-precision convolution kernels need 8-byte aligned pixels


class PaddedConv2d(nn.Conv2d):
    """A convolution of 3 channels whose kernel gets 4, the last one zero.

    The weight keeps its 3 channels, so state dicts and optimizer state are those of the plain convolution.
    """

    def forward(self, images: Tensor) -> Tensor:  # images: N x 3 (or 4, already padded) x H x W
        # Arithmetic on the shape and no branch, so that torch.fx can trace it.
        images = functional.pad(images, (0, 0, 0, 0, 0, PADDED_CHANNELS - images.shape[1]))
        weight = functional.pad(self.weight, (0, 0, 0, 0, 0, PADDED_CHANNELS - self.in_channels))
        out: Tensor = self._conv_forward(images, weight, self.bias)
        return out


def pad_input(model: nn.Module) -> nn.Module:
    """Replace the first convolution, in place, by a padded one with the same parameters."""
    name, conv = _first_conv(model)
    geometry: dict[str, Any] = {
        field: getattr(conv, field) for field in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    }
    four = PaddedConv2d(conv.in_channels, conv.out_channels, bias=conv.bias is not None, device="meta", **geometry)
    four.weight, four.bias = conv.weight, conv.bias
    model.set_submodule(name, four.train(conv.training))
    return model


def _first_conv(model: nn.Module) -> tuple[str, nn.Conv2d]:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            # A subclass may compute something else, which the padded forward would lose.
            if type(layer) is not nn.Conv2d or layer.in_channels != 3 or layer.groups != 1:
                raise ConfigError(
                    f"the first convolution '{name}' is {type(layer).__name__} with {layer.in_channels} channels in "
                    f"{layer.groups} group(s); expected a plain Conv2d with 3 channels in 1 group"
                )
            return name, layer
    raise ConfigError("this model has no convolution to pad")


class SameConv2d(nn.Conv2d):
    """A convolution that pads by its input's size; its parameters are those of nn.Conv2d."""

    def forward(self, images: Tensor) -> Tensor:  # N x C x H x W -> N x C' x ceil(H / stride) x ceil(W / stride)
        return super().forward(padded(images, self.kernel_size, self.stride))


class SamePaddedConv2d(SameConv2d, PaddedConv2d):
    """SAME padding for a convolution with a fourth input channel."""


class SameMaxPool2d(nn.MaxPool2d):
    """SAME padding for max pooling; the padding is never the maximum."""

    def forward(self, images: Tensor) -> Tensor:
        kernel, stride = _pair(self.kernel_size), _pair(self.stride)
        halves = [
            same_padding(size, kernel=k, stride=s) for size, k, s in zip(images.shape[2:], kernel, stride, strict=True)
        ]
        if not any(first for first, _ in halves):  # padding on the far sides alone needs no copy
            return functional.max_pool2d(images, kernel, stride, ceil_mode=True)
        return functional.max_pool2d(padded(images, kernel, stride, value=float("-inf")), kernel, stride)


def pads_same(conv: nn.Conv2d) -> bool:
    """Whether a convolution is plain apart from SAME padding, ours or timm's."""
    return type(conv) is SameConv2d or type(conv).__name__ == "Conv2dSame"


def pad_as_tensorflow(model: nn.Module) -> None:
    """Give every strided layer SAME padding, in place; without a stride, symmetric padding already is SAME."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Conv2d) and type(layer) in _SAME and max(layer.stride) > 1 < max(layer.kernel_size):
            model.set_submodule(name, _same_conv(layer).train(layer.training))
        elif type(layer) is nn.MaxPool2d and _pair(layer.stride) != (1, 1):
            model.set_submodule(name, SameMaxPool2d(layer.kernel_size, layer.stride).train(layer.training))


def _same_conv(conv: nn.Conv2d) -> SameConv2d:
    assert conv.dilation == (1, 1)  # no model here has both dilation and stride
    geometry: dict[str, Any] = {field: getattr(conv, field) for field in ("kernel_size", "stride", "groups")}
    same = _SAME[type(conv)](conv.in_channels, conv.out_channels, bias=conv.bias is not None, device="meta", **geometry)
    same.weight, same.bias = conv.weight, conv.bias
    return same


def padded(images: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], *, value: float = 0.0) -> Tensor:
    """Pad for every window that starts inside the image, with the smaller half of the padding first."""
    (down, right), (height, width) = stride, images.shape[2:]
    above, below = same_padding(height, kernel=kernel[0], stride=down)
    left, beyond = same_padding(width, kernel=kernel[1], stride=right)
    return functional.pad(images, (left, beyond, above, below), value=value)


def same_padding(size: int, *, kernel: int, stride: int) -> tuple[int, int]:
    """The padding before and after a side, for all windows that start inside it."""
    windows = -(-size // stride)
    missing = max((windows - 1) * stride + kernel - size, 0)
    return missing // 2, missing - missing // 2


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else value


_SAME: dict[type[nn.Conv2d], type[SameConv2d]] = {nn.Conv2d: SameConv2d, PaddedConv2d: SamePaddedConv2d}
