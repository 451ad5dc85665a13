"""How an image becomes model input: one value, stored in every checkpoint."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from falconet.errors import CheckpointError, ConfigError, did_you_mean

Channels = tuple[float, float, float]  # red, green, blue, of pixels in 0..1
Interpolation = Literal["bilinear", "bicubic"]  # how photos are resized, as Pillow does

IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)
MOST_SIDE = 4096  # pixels, in a checkpoint: a larger one would be a way to exhaust memory
LEAST_STD, MOST_VALUE = 1e-6, 1e6  # for a stored deviation or mean, pixels in 0..1: others make inputs infinite
IMAGENET_MEAN_PIXEL = (123.68, 116.78, 103.94)  # 0 to 255; not exactly 255 times the mean above


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How evaluation, prediction, export and serving prepare an image."""

    image_size: int  # side of the model's square input, pixels
    resize: int  # short side before the centre crop, pixels
    mean: Channels
    std: Channels
    interpolation: Interpolation = "bilinear"
    antialias: bool = True  # shrink by averaging over all pixels, not the four nearest
    standardised: bool = False  # each image by its own mean and deviation, instead of those above

    def __post_init__(self) -> None:
        if self.resize < self.image_size:
            raise ConfigError(f"preprocessing: resize {self.resize} is less than the image size {self.image_size}")
        if self.interpolation != "bilinear" and not self.antialias:
            raise ConfigError(f"preprocessing: {self.interpolation} without antialiasing; expected bilinear")

    @property
    def unnormalised(self) -> "Preprocessing":
        """The same preprocessing with unchanged pixels, 0 to 255."""
        return replace(self, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255), standardised=False)

    @property
    def by_image(self) -> "Preprocessing":
        """The same preprocessing with each image standardised, as the TensorFlow original did for CIFAR."""
        return replace(self.unnormalised, standardised=True)

    @property
    def centred(self) -> "Preprocessing":
        """The same preprocessing, but minus ImageNet's mean of pixels 0 to 255, as in the TensorFlow original."""
        red, green, blue = IMAGENET_MEAN_PIXEL
        return replace(self, mean=(red / 255, green / 255, blue / 255), std=(1 / 255, 1 / 255, 1 / 255))

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_json(cls, stored: dict[str, object]) -> "Preprocessing":
        known = [field.name for field in fields(cls)]
        for name in stored:
            if name not in known:
                raise CheckpointError(f"preprocessing: unknown entry '{name}'{did_you_mean(name, known)}")
        for name in known:
            if name not in stored and name not in _LATER:
                raise CheckpointError(f"preprocessing: no entry '{name}'")
        return cls(
            image_size=_whole(stored, "image_size"),
            resize=_whole(stored, "resize"),
            mean=_channels(stored, "mean", least=-MOST_VALUE),
            std=_channels(stored, "std", least=LEAST_STD),
            interpolation=_interpolation(stored),
            antialias=_switch(stored, "antialias", absent=True),
            standardised=_switch(stored, "standardised", absent=False),
        )


_LATER = ("antialias", "standardised")  # entries missing from older checkpoints


def short_side(image_size: int, *, ratio: float = 7 / 8) -> int:
    """A photo's short side before a centre crop that keeps `ratio` of it: 256 for 224, rounded as in timm."""
    return int(image_size / ratio)


class Normalise(nn.Module):
    """Turns pixels 0..255 into (pixel / 255 - mean) / std, by one multiply and add in float32."""

    scale: Tensor
    shift: Tensor

    def __init__(self, preprocessing: Preprocessing, *, dtype: torch.dtype = torch.float32, channels: int = 3) -> None:
        """`channels`: in the result; those beyond three are 0."""
        super().__init__()
        mean = torch.tensor(preprocessing.mean, dtype=torch.float64).view(1, 3, 1, 1)
        std = torch.tensor(preprocessing.std, dtype=torch.float64).view(1, 3, 1, 1)
        # Not persistent: the checkpoint stores the Preprocessing.
        self.register_buffer("scale", (1 / (255 * std)).float(), persistent=False)
        self.register_buffer("shift", (-mean / std).float(), persistent=False)
        self.dtype, self.channels = dtype, channels

    def forward(self, images: Tensor) -> Tensor:  # N x 3 x H x W, uint8 -> dtype, memory format kept
        # A fused multiply-add in float32 and one rounding to dtype: half precision represents 1 / (255 std) poorly.
        if images.is_cuda and images.dtype == torch.uint8 and images.is_contiguous(memory_format=torch.channels_last):
            from falconet.data import pixel_kernels  # Triton comes with CUDA only

            factors = self.scale, self.shift
            done: Tensor = pixel_kernels.normalise(images, *factors, dtype=self.dtype, channels=self.channels)
            return done
        return self._padded(torch.addcmul(self.shift, images.float(), self.scale).to(self.dtype))

    def _padded(self, values: Tensor) -> Tensor:
        return values if self.channels == 3 else nn.functional.pad(values, (0, 0, 0, 0, 0, self.channels - 3))


class Standardise(Normalise):
    """Computes (image - mean) / deviation over all values of each image: TensorFlow's per_image_standardization.

    The deviation is at least 1 / sqrt(values), in levels of 0 to 255: an image of one colour becomes zeros.
    """

    def forward(self, images: Tensor) -> Tensor:  # N x 3 x H x W -> dtype, memory format kept
        values = images.float()
        # Two passes in float32: sums of 3 x 224 x 224 levels are accurate to 1e-6, without cancellation.
        centred = values - values.mean(dim=(1, 2, 3), keepdim=True)
        deviation = centred.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        return self._padded((centred / deviation.clamp(min=values[0].numel() ** -0.5)).to(self.dtype))


def standardise_pixels(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:  # N x H x W x 3
    """Standardise on the host, in numpy: on the loader's threads, torch would start further threads."""
    values = pixels.astype(np.float32)
    values -= values.mean(axis=(1, 2, 3), keepdims=True)
    deviation = np.sqrt(np.square(values).mean(axis=(1, 2, 3), keepdims=True))
    values /= np.maximum(deviation, np.float32(math.prod(pixels.shape[1:]) ** -0.5))
    return values


def normaliser(preprocessing: Preprocessing, *, dtype: torch.dtype = torch.float32, channels: int = 3) -> Normalise:
    """The module that turns pixels into model input; channels beyond three are 0."""
    kind = Standardise if preprocessing.standardised else Normalise
    return kind(preprocessing, dtype=dtype, channels=channels)


def _whole(stored: dict[str, object], name: str) -> int:
    value = stored[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_SIDE:
        raise CheckpointError(f"preprocessing: {name}: got {_cut(value)}, expected a whole number, 1 to {MOST_SIDE}")
    return value


def _channels(stored: dict[str, object], name: str, *, least: float) -> Channels:
    value = stored[name]
    found = value if isinstance(value, list | tuple) else ()
    fitting = [float(x) for x in found if type(x) in (int, float) and least <= x <= MOST_VALUE]  # which a nan is not
    if not len(fitting) == len(found) == 3:
        raise CheckpointError(
            f"preprocessing: {name}: got {_cut(value)}, expected three numbers, {least:g} to {MOST_VALUE:g}"
        )
    red, green, blue = fitting
    return (red, green, blue)


def _cut(value: object) -> str:
    """Shorten a value from another person's checkpoint, which may be long."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _switch(stored: dict[str, object], name: str, *, absent: bool) -> bool:
    value = stored.get(name, absent)
    if not isinstance(value, bool):
        raise CheckpointError(f"preprocessing: {name}: got {_cut(value)}, expected true or false")
    return value


def _interpolation(stored: dict[str, object]) -> Interpolation:
    value = stored["interpolation"]
    known: tuple[Interpolation, ...] = get_args(Interpolation)
    for each in known:
        if value == each:
            return each
    raise CheckpointError(f"preprocessing: interpolation: got {_cut(value)}, expected {' or '.join(map(repr, known))}")
