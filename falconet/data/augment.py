"""Random changes of pixels: auto-augment policies, colour jitter, vertical flips, erasing.

What happens to each image is drawn on the host from keyed numbers, and done on the device, on bytes. Operations and
magnitudes are torchvision's, with its defaults: nearest pixel, black outside the image.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from falconet.config.options import Augmentation
from falconet.data.keyed import FloatArray, IntArray, Purpose, uniform
from falconet.data.preprocessing import Channels

GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
BLENDS = ("Brightness", "Color", "Contrast", "Sharpness")
SIGNED = (*GEOMETRIC, *BLENDS)  # the opposite magnitude is equally likely
OPERATIONS = (
    "Identity",
    *SIGNED,
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
    "Invert",
    "VerticalFlip",
    "Erase",
)
NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
COMMON = OPERATIONS[: NUMBERS["Equalize"] + 1]  # what randaugment and trivialaugment choose from
BINS = 31  # magnitudes of an operation, from none to the strongest
POLICY_BINS = 10  # magnitudes in AutoAugment's policies
JITTERED = ("Brightness", "Contrast", "Color")
ORDERS = np.array([(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
ERASED = (0.02, 0.33)  # share of an image
ERASED_RATIO = (0.3, 3.3)  # height over width
ATTEMPTS = 10
VALUES = 7  # numbers per image that an operation may need

Magnitudes = Mapping[str, FloatArray]  # BINS for each operation; one without an entry has a single strength
ValueArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class Round(NamedTuple):
    """One operation for each of N images."""

    operations: IntArray  # N, numbers of OPERATIONS
    magnitudes: FloatArray  # N; for Erase, N x VALUES


class Chain(NamedTuple):
    """The changes to the pixels of a micro-batch: N images, R rounds."""

    operations: Tensor  # R x N, int32, numbers of OPERATIONS
    values: Tensor  # R x N x VALUES, float32: what the operations need

    def to(self, device: torch.device) -> "Chain":
        """Copy to a device through pinned memory, so that the host does not wait."""
        if device.type != "cuda":
            return self
        return Chain(*(tensor.pin_memory().to(device, non_blocking=True) for tensor in self))


@dataclass(frozen=True, kw_only=True)
class PixelChanges:
    """The changes that the options ask for."""

    augmentation: Augmentation
    seed: int = 0
    fill: Channels = (0.0, 0.0, 0.0)  # what replaces erased pixels, in 0..1

    @property
    def is_nothing(self) -> bool:
        asked = self.augmentation
        strengths = (asked.vertical_flip, asked.color_jitter, asked.random_erasing, asked.cutout)
        return asked.auto_augment == "none" and not any(strengths)

    def draw(self, indices: IntArray, *, epoch: int, side: int) -> Chain:
        """Draw the changes to these images, each side x side pixels."""
        rounds = list(self._rounds(indices, epoch, side))
        operations = np.empty((len(rounds), len(indices)), np.int32)
        values = np.empty((len(rounds), len(indices), VALUES), np.float32)
        for number, (chosen, magnitudes) in enumerate(rounds):
            operations[number] = chosen
            values[number] = _values(chosen, magnitudes, side)
        return Chain(torch.from_numpy(operations), torch.from_numpy(values))

    def _rounds(self, indices: IntArray, epoch: int, side: int) -> Iterator[Round]:
        asked = self.augmentation

        def draws(purpose: Purpose, count: int) -> FloatArray:  # count x N
            return uniform(seed=self.seed, epoch=epoch, indices=indices, purpose=purpose, draws=count).T

        if asked.vertical_flip:
            flipped = draws(Purpose.VERTICAL_FLIP, 1)[0] < asked.vertical_flip
            yield Round(np.where(flipped, NUMBERS["VerticalFlip"], 0), np.zeros(len(indices)))
        if asked.auto_augment == "randaugment":
            for operation, sign in draws(Purpose.POLICY, 2 * asked.randaugment_ops).reshape(-1, 2, len(indices)):
                bins = np.full(len(indices), asked.randaugment_magnitude)
                yield _chosen(operation, bins, sign, randaugment_magnitudes(side))
        elif asked.auto_augment == "trivialaugment":
            operation, strength, sign = draws(Purpose.POLICY, 3)
            yield _chosen(operation, (strength * BINS).astype(np.int64), sign, trivialaugment_magnitudes())
        elif asked.auto_augment != "none":
            yield from _policy_rounds(asked.autoaugment_policy, draws(Purpose.POLICY, 5), side)
        if asked.color_jitter:
            yield from _jitter_rounds(asked.color_jitter, draws(Purpose.JITTER, 4))
        if asked.random_erasing:
            erased, boxes = erased_boxes(draws(Purpose.ERASE, 2 * ATTEMPTS + 3), side, share=asked.random_erasing)
            yield Round(np.where(erased, NUMBERS["Erase"], 0), self._filled(boxes))
        if asked.cutout:
            boxes = cutout_boxes(draws(Purpose.CUTOUT, 2), side, square=min(asked.cutout, side))
            yield Round(np.full(len(indices), NUMBERS["Erase"]), self._filled(boxes))

    def _filled(self, boxes: IntArray) -> FloatArray:  # N x 4 -> N x VALUES
        fill = np.broadcast_to(np.rint(255 * np.array(self.fill)), (len(boxes), 3))
        return np.concatenate((boxes, fill), axis=1)


def cutout_boxes(draws: FloatArray, side: int, *, square: int) -> IntArray:  # 2 x N -> N x 4
    """Top, bottom, left and right of a square in each image; every place is equally likely."""
    top, left = (draws * (side - square + 1)).astype(np.int64)
    return np.stack((top, top + square, left, left + square), axis=1)


def erased_boxes(draws: FloatArray, side: int, *, share: float) -> tuple[BoolArray, IntArray]:  # N; N x 4
    """Which images lose a box, and its top, bottom, left and right: the first of ten attempts that fits.

    This is torchvision's RandomErasing; draws: 3 + 2 * ATTEMPTS x N.
    """
    luck, down, right, *attempts = draws
    area = side * side * (ERASED[0] + np.stack(attempts[::2]) * (ERASED[1] - ERASED[0]))  # ATTEMPTS x N
    low, high = math.log(ERASED_RATIO[0]), math.log(ERASED_RATIO[1])
    ratio = np.exp(low + np.stack(attempts[1::2]) * (high - low))
    heights, widths = np.rint(np.sqrt(area * ratio)).astype(np.int64), np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (heights < side) & (widths < side)
    first, images = np.argmax(fits, axis=0), np.arange(draws.shape[1])
    height, width = heights[first, images], widths[first, images]
    top, left = (down * (side - height + 1)).astype(np.int64), (right * (side - width + 1)).astype(np.int64)
    return fits[first, images] & (luck < share), np.stack((top, top + height, left, left + width), axis=1)


# Magnitudes of torchvision's transforms with these names.


def _evenly(strongest: Mapping[str, float], *, least_bits: int, bins: int) -> Magnitudes:
    """Evenly spaced magnitudes from 0 to the strongest; for bits and thresholds, downwards from all of them."""
    return {
        **{name: np.linspace(0.0, most, bins) for name, most in strongest.items()},
        "Posterize": np.rint(8 - np.arange(bins) / ((bins - 1) / (8 - least_bits))),
        "Solarize": np.linspace(1.0, 0.0, bins),
    }


@cache
def randaugment_magnitudes(side: int, bins: int = BINS) -> Magnitudes:
    moved = 150.0 / 331.0 * side
    strongest = {"ShearX": 0.3, "ShearY": 0.3, "TranslateX": moved, "TranslateY": moved, "Rotate": 30.0}
    return _evenly({**strongest, **dict.fromkeys(BLENDS, 0.9)}, least_bits=4, bins=bins)


@cache
def trivialaugment_magnitudes() -> Magnitudes:
    strongest = {"ShearX": 0.99, "ShearY": 0.99, "TranslateX": 32.0, "TranslateY": 32.0, "Rotate": 135.0}
    return _evenly({**strongest, **dict.fromkeys(BLENDS, 0.99)}, least_bits=2, bins=BINS)


def _chosen(operation: FloatArray, bins: IntArray, sign: FloatArray, magnitudes: Magnitudes) -> Round:
    """Choose among the common operations with equal probability, by numbers in [0, 1)."""
    table = np.stack([magnitudes.get(name, np.zeros(BINS)) for name in COMMON])
    numbers = (operation * len(COMMON)).astype(np.int64)
    return Round(numbers, table[numbers, bins] * _signs(numbers, sign <= 0.5))


def _policy_rounds(policy: str, draws: FloatArray, side: int) -> Iterator[Round]:
    """Two operations per image, one of the policy's pairs; each is skipped with its own probability."""
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy  # takes half a second

    pairs = AutoAugment(AutoAugmentPolicy(policy)).policies
    magnitudes = randaugment_magnitudes(side, POLICY_BINS)
    pair = (draws[0] * len(pairs)).astype(np.int64)
    for place, (luck, sign) in enumerate(((draws[1], draws[2]), (draws[3], draws[4]))):
        entries = [both[place] for both in pairs]
        strengths = [0.0 if bin is None else magnitudes[name][bin] for name, _, bin in entries]
        numbers = np.array([NUMBERS[name] for name, _, _ in entries])[pair]
        done = luck <= np.array([probability for _, probability, _ in entries])[pair]
        yield Round(np.where(done, numbers, 0), np.array(strengths)[pair] * _signs(numbers, sign < 0.5))


def _jitter_rounds(strength: float, draws: FloatArray) -> Iterator[Round]:
    """Brightness, contrast and saturation in random order, each multiplied by a factor around 1."""
    low = max(0.0, 1.0 - strength)
    factors = low + draws[:3] * (1.0 + strength - low)
    order = ORDERS[(draws[3] * len(ORDERS)).astype(np.int64)]  # N x 3
    numbers, images = np.array([NUMBERS[name] for name in JITTERED]), np.arange(draws.shape[1])
    for chosen in order.T:
        yield Round(numbers[chosen], factors[chosen, images] - 1.0)


def _signs(numbers: IntArray, negative: BoolArray) -> FloatArray:
    signed = np.isin(numbers, [NUMBERS[name] for name in SIGNED])
    return np.where(signed & negative, -1.0, 1.0)


def _values(operations: IntArray, magnitudes: FloatArray, side: int) -> ValueArray:  # N x VALUES
    """The numbers that the operations take: a matrix, the two weights of a blend, a mask, a threshold, a box."""
    found = np.zeros((len(operations), VALUES))
    for number in np.unique(operations).tolist():
        name, rows = OPERATIONS[number], operations == number
        own = magnitudes[rows]
        if name in GEOMETRIC:
            found[rows, :6] = _matrices(name, own, side)
        elif name in BLENDS:
            found[rows, :2] = np.stack((1.0 + own, -own), axis=1)
        elif name == "Posterize":
            found[rows, 0] = 256 - 2.0 ** (8 - own)
        elif name == "Solarize":
            found[rows, 0] = 255 * own
        elif name == "Erase":
            found[rows] = own
    return found.astype(np.float32)


def _matrices(name: str, magnitudes: FloatArray, side: int) -> FloatArray:  # N x 6
    """Where pixels come from: x' = a x + b y + c, y' = d x + e y + f, from the centre of the image."""
    one, zero = np.ones_like(magnitudes), np.zeros_like(magnitudes)
    cosine, sine = np.cos(np.radians(magnitudes)), np.sin(np.radians(magnitudes))
    half, moved = magnitudes * side / 2, np.trunc(magnitudes)
    columns = {
        "ShearX": (one, magnitudes, half, zero, one, zero),  # about the upper left corner
        "ShearY": (one, zero, zero, magnitudes, one, half),
        "TranslateX": (one, zero, -moved, zero, one, zero),
        "TranslateY": (one, zero, zero, zero, one, -moved),
        "Rotate": (cosine, -sine, zero, sine, cosine, zero),
    }
    return np.stack(columns[name], axis=1)


# Operations on N x S x S x 3 bytes, each image with its own row of values.


def _moved(pixels: Tensor, values: Tensor) -> Tensor:
    """Move pixels by a matrix: the nearest source pixel, black outside."""
    count, side = pixels.shape[:2]
    middle = (side - 1) / 2
    at = torch.arange(side, device=pixels.device) - middle
    a, b, c, d, e, f = (column[:, None, None] for column in values.T[:6])
    x = (a * at + (b * at[:, None] + (c + middle))).round_()  # N x S x S
    y = (d * at + (e * at[:, None] + (f + middle))).round_()
    inside = (x >= 0) & (x < side) & (y >= 0) & (y < side)
    first = torch.arange(count, device=pixels.device)[:, None, None] * (side * side)
    place = torch.where(inside, y * side + x, 0).long() + first
    found = pixels.view(-1, 3).index_select(0, place.view(-1)).view(pixels.shape)
    return found.mul_(inside[..., None])


def _planes(pixels: Tensor) -> Tensor:  # N x 3 x S x S
    """Separate the channels in memory: work on one channel, or on neighbours, is up to six times as fast on a CPU."""
    return pixels.permute(0, 3, 1, 2).contiguous()


def _bytes(levels: Tensor) -> Tensor:  # N x S x S x 3
    return levels.clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def _blended(planes: Tensor, others: Tensor, values: Tensor) -> Tensor:
    own, other = (column[:, None, None, None] for column in values.T[:2])
    return _bytes(planes.float().mul_(own).addcmul_(others, other))


def _brightened(pixels: Tensor, values: Tensor) -> Tensor:
    return pixels.float().mul_(values[:, 0, None, None, None]).clamp_(0, 255).to(torch.uint8)


def _grey(planes: Tensor) -> Tensor:  # N x 1 x S x S, whole levels as float32
    red, green, blue = planes[:, 0:1], planes[:, 1:2], planes[:, 2:3]
    return (red.float() * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def _mean_grey(planes: Tensor) -> Tensor:
    """Each image's mean grey, from an integer sum: its last bits do not depend on the order."""
    total = _grey(planes).to(torch.int32).sum(dim=(1, 2, 3), keepdim=True)
    return total.float() / torch.full_like(total, planes[0, 0].numel())


def _saturated(pixels: Tensor, values: Tensor) -> Tensor:
    planes = _planes(pixels)
    return _blended(planes, _grey(planes), values)


def _contrasted(pixels: Tensor, values: Tensor) -> Tensor:
    planes = _planes(pixels)
    return _blended(planes, _mean_grey(planes), values)


def _sharpened(pixels: Tensor, values: Tensor) -> Tensor:
    """Blend with a 3 x 3 blur that counts the middle five times; the border is unchanged."""
    levels = _planes(pixels).float()
    blurred = levels.clone()
    across = levels[..., :-2] + levels[..., 1:-1] + levels[..., 2:]
    around = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :]
    blurred[..., 1:-1, 1:-1].mul_(4).add_(around).div_(13).round_()
    # From the difference, as in torchvision: where there is none, the level is exactly the same.
    return _bytes(blurred.sub_(levels).mul_(values[:, 1, None, None, None]).add_(levels))


def _posterized(pixels: Tensor, values: Tensor) -> Tensor:
    return pixels & values[:, 0, None, None, None].to(torch.uint8)


def _solarized(pixels: Tensor, values: Tensor) -> Tensor:
    threshold = values[:, 0, None, None, None].ceil().to(torch.int16)  # in whole levels, so that bytes are compared
    return torch.where(pixels >= threshold, 255 - pixels, pixels)


def _erased(pixels: Tensor, values: Tensor) -> Tensor:
    """Fill the box top, bottom, left, right with one colour."""
    at = torch.arange(pixels.shape[1], device=pixels.device)
    top, bottom, left, right = (column[:, None] for column in values.T[:4])
    rows, columns = (at >= top) & (at < bottom), (at >= left) & (at < right)  # N x S
    inside = (rows[:, :, None] & columns[:, None, :])[..., None]
    return torch.where(inside, values[:, None, None, 4:].to(torch.uint8), pixels)


def _stretched(pixels: Tensor, _: Tensor) -> Tensor:
    from torchvision.transforms.v2.functional import autocontrast

    found: Tensor = autocontrast(_planes(pixels))
    return found.permute(0, 2, 3, 1)


def _equalized(pixels: Tensor, _: Tensor) -> Tensor:
    from torchvision.transforms.v2.functional import equalize

    found: Tensor = equalize(_planes(pixels))
    return found.permute(0, 2, 3, 1)


APPLY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Identity": lambda pixels, _: pixels,
    **dict.fromkeys(GEOMETRIC, _moved),
    "Brightness": _brightened,
    "Color": _saturated,
    "Contrast": _contrasted,
    "Sharpness": _sharpened,
    "Posterize": _posterized,
    "Solarize": _solarized,
    "AutoContrast": _stretched,
    "Equalize": _equalized,
    "Invert": lambda pixels, _: 255 - pixels,
    "VerticalFlip": lambda pixels, _: pixels.flip(1),
    "Erase": _erased,
}


def apply(images: Tensor, chain: Chain) -> Tensor:
    """Change images (N x 3 x S x S, uint8, channels-last) on the device of the chain, without waiting for it."""
    if images.is_cuda:
        from falconet.data import augment_kernels  # Triton comes with CUDA only

        changed: Tensor = augment_kernels.apply(images, chain)
        return changed
    return applied(images, chain)


def applied(images: Tensor, chain: Chain) -> Tensor:
    """Change images on the host, by one operation at a time for all of its images."""
    pixels = images.permute(0, 2, 3, 1)
    place = torch.arange(len(images))  # of each image after the sorting of the previous round
    for operations, values in zip(chain.operations, chain.values, strict=True):
        numbers, order = torch.sort(operations, stable=True)
        rows, values, found = place[order], values[order], []
        for name, first, end in _runs(numbers.numpy()):
            found.append(APPLY[name](pixels.index_select(0, rows[first:end]), values[first:end]))
        pixels, place = torch.cat(found), torch.argsort(order)
    return pixels.index_select(0, place).permute(0, 3, 1, 2)


def _runs(operations: IntArray) -> Iterator[tuple[str, int, int]]:
    """Each operation in a sorted list, with its first place and the one after its last."""
    found, first = np.unique(operations, return_index=True)
    ends = [*first[1:].tolist(), len(operations)]
    for number, begin, end in zip(found.tolist(), first.tolist(), ends, strict=True):
        yield OPERATIONS[number], begin, end
