"""Random changes of pixels in two Triton launches per round, equal to the plain functions in `augment`.

Torch takes about 240 launches per round. Each waits for a gap between the kernels of the update that is computed at the
same time, so that batches took longer than the updates of small networks.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.data.augment import NUMBERS, VALUES, Chain

PIXELS = 1024  # per program, or per step of one that looks at all pixels of an image
LEVELS = 256
ROUNDED = {"enable_fp_fusion": False}  # after every product, as torch does
# Branches depend on a number that the whole program shares, so that each program takes one branch.
SHEAR_X, ROTATE = tl.constexpr(NUMBERS["ShearX"]), tl.constexpr(NUMBERS["Rotate"])  # the first and last that move
BRIGHTNESS, COLOR = tl.constexpr(NUMBERS["Brightness"]), tl.constexpr(NUMBERS["Color"])
CONTRAST, SHARPNESS = tl.constexpr(NUMBERS["Contrast"]), tl.constexpr(NUMBERS["Sharpness"])
POSTERIZE, SOLARIZE = tl.constexpr(NUMBERS["Posterize"]), tl.constexpr(NUMBERS["Solarize"])
AUTO_CONTRAST, EQUALIZE = tl.constexpr(NUMBERS["AutoContrast"]), tl.constexpr(NUMBERS["Equalize"])
INVERT, FLIP = tl.constexpr(NUMBERS["Invert"]), tl.constexpr(NUMBERS["VerticalFlip"])
ERASE = tl.constexpr(NUMBERS["Erase"])


@triton.jit
def _byte(levels):
    return tl.minimum(tl.maximum(levels, 0.0), 255.0).to(tl.uint8)


@triton.jit
def _plus(levels, others, factor):
    """Compute levels + others * factor, rounded once, as in torch."""
    return tl.fma(others.to(tl.float32), tl.zeros_like(levels) + factor, levels)


@triton.jit
def _grey(red, green, blue):
    return tl.floor(_plus(_plus(red.to(tl.float32) * 0.2989, green, 0.587), blue, 0.114))


@triton.jit
def _mean_grey(pixels, count, PIXELS: tl.constexpr):
    """The mean grey of an image, from an integer sum."""
    total = tl.zeros((PIXELS,), tl.int32)
    for begin in range(0, count, PIXELS):
        place = begin + tl.arange(0, PIXELS)
        inside = place < count
        red = tl.load(pixels + place * 3, mask=inside, other=0)
        green = tl.load(pixels + place * 3 + 1, mask=inside, other=0)
        blue = tl.load(pixels + place * 3 + 2, mask=inside, other=0)
        total += _grey(red, green, blue).to(tl.int32)
    return tl.div_rn(tl.sum(total.to(tl.int64)).to(tl.float32), count.to(tl.float32))


@triton.jit
def _counted(pixels, count, LEVELS: tl.constexpr, PIXELS: tl.constexpr):
    """The number of pixels at each level of one channel."""
    found = tl.zeros((LEVELS,), tl.int32)
    for begin in range(0, count, PIXELS):
        place = begin + tl.arange(0, PIXELS)
        inside = place < count
        found += tl.histogram(tl.load(pixels + place * 3, mask=inside, other=0).to(tl.int32), LEVELS, mask=inside)
    return found


@triton.jit
def _equalized(counts, count, level):
    """The level that each level becomes when equalised, in Pillow's integer arithmetic."""
    highest = tl.max(tl.where(counts > 0, level, 0), 0)
    step = (count - tl.sum(tl.where(level == highest, counts, 0), 0)) // 255
    below = tl.cumsum(counts, 0) - counts
    becomes = tl.minimum((below + step // 2) // tl.maximum(step, 1), 255)
    return tl.where(step > 0, becomes, level).to(tl.uint8)


@triton.jit
def _stretched(counts, level):
    """The level that each level becomes when the lowest turns into 0 and the highest into 255."""
    lowest = tl.min(tl.where(counts > 0, level, 255), 0)
    highest = tl.max(tl.where(counts > 0, level, 0), 0)
    least = tl.where(highest > lowest, lowest, 0).to(tl.float32)
    scale = tl.where(highest > lowest, (highest - lowest).to(tl.float32) * (1.0 / 255.0), 1.0)
    return _byte(tl.div_rn(level.to(tl.float32) - least, scale))


@triton.jit(do_not_specialize=["count"])
def _look(images, operations, values, tables, count,
          VALUES: tl.constexpr, LEVELS: tl.constexpr, PIXELS: tl.constexpr):  # fmt: skip
    """Write a table of levels for operations that map levels. One program handles one channel of an image."""
    image, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    operation, first = tl.load(operations + image), tl.load(values + image * VALUES)
    pixels, table = images + image * count * 3, tables + (image * 3 + channel) * LEVELS
    level = tl.arange(0, LEVELS)
    if operation == EQUALIZE:
        tl.store(table + level, _equalized(_counted(pixels + channel, count, LEVELS, PIXELS), count, level))
    elif operation == AUTO_CONTRAST:
        tl.store(table + level, _stretched(_counted(pixels + channel, count, LEVELS, PIXELS), level))
    else:
        becomes = level.to(tl.uint8)
        if operation == BRIGHTNESS:
            becomes = _byte(level.to(tl.float32) * first)
        elif operation == CONTRAST:
            mean = _mean_grey(pixels, count, PIXELS)
            scaled = level.to(tl.float32) * first
            becomes = _byte(_plus(scaled, tl.zeros_like(scaled) + mean, tl.load(values + image * VALUES + 1)))
        elif operation == POSTERIZE:
            becomes = (level & first.to(tl.int32)).to(tl.uint8)
        elif operation == SOLARIZE:
            becomes = tl.where(level >= tl.ceil(first).to(tl.int32), 255 - level, level).to(tl.uint8)
        elif operation == INVERT:
            becomes = (255 - level).to(tl.uint8)
        tl.store(table + level, becomes)


@triton.jit
def _whole(place):
    """Round to the nearest whole number, ties to even: a float as large as this sum has no fraction."""
    return (place + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["side"])
def _change(images, operations, values, tables, out, side,
            VALUES: tl.constexpr, LEVELS: tl.constexpr, PIXELS: tl.constexpr):  # fmt: skip
    """Change some pixels of one image per program. Offsets within an image fit in 32 bits."""
    image = tl.program_id(0).to(tl.int64)
    operation, value = tl.load(operations + image), values + image * VALUES
    source, target = images + image * side * side * 3, out + image * side * side * 3
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    row, column = pixel // side, pixel % side
    exists = pixel < side * side
    if (operation >= SHEAR_X) & (operation <= ROTATE):
        middle = (side - 1).to(tl.float32) / 2
        right, down = column.to(tl.float32) - middle, row.to(tl.float32) - middle
        x = right * tl.load(value) + (down * tl.load(value + 1) + (tl.load(value + 2) + middle))
        y = right * tl.load(value + 3) + (down * tl.load(value + 4) + (tl.load(value + 5) + middle))
        x, y = _whole(x), _whole(y)
        inside = exists & (x >= 0) & (x < side) & (y >= 0) & (y < side)
        place = tl.where(inside, y * side + x, 0.0).to(tl.int32) * 3
        for channel in tl.static_range(3):
            tl.store(target + pixel * 3 + channel, tl.load(source + place + channel, mask=inside, other=0), mask=exists)
    elif operation == FLIP:
        place = ((side - 1 - row) * side + column) * 3
        for channel in tl.static_range(3):
            tl.store(target + pixel * 3 + channel, tl.load(source + place + channel, mask=exists), mask=exists)
    elif operation == COLOR:
        own, other = tl.load(value), tl.load(value + 1)
        red, green = tl.load(source + pixel * 3, mask=exists), tl.load(source + pixel * 3 + 1, mask=exists)
        grey = _grey(red, green, tl.load(source + pixel * 3 + 2, mask=exists))
        for channel in tl.static_range(3):
            level = tl.load(source + pixel * 3 + channel, mask=exists).to(tl.float32)
            tl.store(target + pixel * 3 + channel, _byte(_plus(level * own, grey, other)), mask=exists)
    elif operation == SHARPNESS:
        # A 3 x 3 blur that counts the middle five times, by the difference, as in torchvision; the border is unchanged.
        factor = tl.load(value + 1)
        blurs = exists & (row > 0) & (row < side - 1) & (column > 0) & (column < side - 1)
        for channel in tl.static_range(3):
            own = tl.load(source + pixel * 3 + channel, mask=exists, other=0).to(tl.int32)
            around = own * 4
            for near in tl.static_range(9):
                place = pixel + (near // 3 - 1) * side + near % 3 - 1
                around += tl.load(source + place * 3 + channel, mask=blurs, other=0).to(tl.int32)
            blurred = tl.where(blurs, (2 * around + 13) // 26, own)  # 13 is odd, so there are no halves
            sharpened = (blurred - own).to(tl.float32) * factor + own.to(tl.float32)
            tl.store(target + pixel * 3 + channel, _byte(sharpened), mask=exists)
    elif operation == ERASE:
        top, bottom = tl.load(value).to(tl.int32), tl.load(value + 1).to(tl.int32)
        left, end = tl.load(value + 2).to(tl.int32), tl.load(value + 3).to(tl.int32)
        inside = (row >= top) & (row < bottom) & (column >= left) & (column < end)
        for channel in tl.static_range(3):
            level = tl.load(source + pixel * 3 + channel, mask=exists)
            colour = tl.load(value + 4 + channel).to(tl.uint8)
            tl.store(target + pixel * 3 + channel, tl.where(inside, colour, level), mask=exists)
    else:
        for channel in tl.static_range(3):
            level = tl.load(source + pixel * 3 + channel, mask=exists, other=0)
            becomes = tl.load(tables + (image * 3 + channel) * LEVELS + level, mask=exists)
            tl.store(target + pixel * 3 + channel, becomes, mask=exists)


def apply(images: Tensor, chain: Chain) -> Tensor:
    """Change images: N x 3 x S x S, uint8, channels-last."""
    pixels = images.permute(0, 2, 3, 1).contiguous()
    count, side = pixels.shape[:2]
    tables = torch.empty((count, 3, LEVELS), dtype=torch.uint8, device=images.device)
    constants = {"VALUES": VALUES, "LEVELS": LEVELS, "PIXELS": PIXELS, **ROUNDED}
    for operations, values in zip(chain.operations, chain.values, strict=True):
        changed = torch.empty_like(pixels)
        _look[(count, 3)](pixels, operations, values, tables, side * side, **constants)
        _change[(count, -(-side * side // PIXELS))](pixels, operations, values, tables, changed, side, **constants)
        pixels = changed
    return pixels.permute(0, 3, 1, 2)
