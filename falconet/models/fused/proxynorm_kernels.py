"""Proxy norm for channels-last memory in Triton: moments of the proxy, then the elements."""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.fused.batchnorm_kernels import ACTIVATIONS, activated, passed
from falconet.numerics.kernels import FUSED

TILE = 4096  # elements, of whole channels: pixels by channels
CHANNELS = 128  # of a tile, at most: 256 bytes of fp16 in a row
TILES = 8  # that one program of the backward pass handles in turn, to write their sums once
PROXIED = 8  # channels whose moments one program computes


@triton.jit
def _factor(factors, number, columns, channels):
    """Row `number` of a matrix with a column for each channel, 1 x C."""
    return tl.load(factors + number * channels + columns, mask=columns < channels, other=0.0).to(tl.float32)


@triton.jit
def _proxies(factors, samples, count, channels, ROWS: tl.constexpr, SAMPLES: tl.constexpr):
    """The program's channels, mask, samples and weights, then the proxies and their affine images, rows x samples."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SAMPLES)
    inside = (rows < channels)[:, None] & (columns < count)[None, :]
    points = tl.load(samples + columns, mask=columns < count, other=0.0).to(tl.float32)[None, :]
    weight, bias = _factor(factors, 0, rows, channels)[:, None], _factor(factors, 1, rows, channels)[:, None]
    scale, shift = _factor(factors, 2, rows, channels)[:, None], _factor(factors, 3, rows, channels)[:, None]
    proxies = (1.0 + scale) * points + shift
    return rows, inside, points, weight, proxies, weight * proxies + bias


@triton.jit
def _moments(factors, samples, moments, count, channels, eps,
             ACT: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr):  # fmt: skip
    rows, inside, _p, _w, _q, inputs = _proxies(factors, samples, count, channels, ROWS, SAMPLES)
    values = tl.where(inside, activated(inputs, ACT), 0.0)
    mean = tl.sum(values, 1) / count
    around = tl.where(inside, values - mean[:, None], 0.0)
    variance = tl.sum(around * around, 1) / count
    tl.store(moments + rows, mean, mask=rows < channels)
    tl.store(moments + channels + rows, 1.0 / tl.sqrt(variance + eps), mask=rows < channels)


@triton.jit
def _moments_slopes(factors, samples, moments, sums, dfactors, count, channels,
                    ACT: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr):  # fmt: skip
    """Compute the gradients of the factors, through the elements and through the moments."""
    rows, inside, points, weight, proxies, inputs = _proxies(factors, samples, count, channels, ROWS, SAMPLES)
    mean, rstd = _factor(moments, 0, rows, channels), _factor(moments, 1, rows, channels)
    dmean, drstd = _factor(sums, 2, rows, channels), _factor(sums, 3, rows, channels)
    dvariance = -0.5 * drstd * rstd * rstd * rstd
    slopes = (dmean[:, None] + 2.0 * dvariance[:, None] * (activated(inputs, ACT) - mean[:, None])) / count
    slopes = tl.where(inside, passed(inputs, slopes, ACT), 0.0)
    exists = rows < channels
    through_weight = _factor(sums, 0, rows, channels) + tl.sum(slopes * proxies, 1)
    through_bias = _factor(sums, 1, rows, channels) + tl.sum(slopes, 1)
    tl.store(dfactors + rows, through_weight, mask=exists)
    tl.store(dfactors + channels + rows, through_bias, mask=exists)
    tl.store(dfactors + 2 * channels + rows, tl.sum(slopes * weight * points, 1), mask=exists)
    tl.store(dfactors + 3 * channels + rows, tl.sum(slopes * weight, 1), mask=exists)


@triton.jit
def _elements(x, y, factors, moments, pixels, channels,
              ACT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (rows < pixels)[:, None] & (columns < channels)[None, :]
    offsets = rows[:, None] * channels + columns[None, :]
    weight, bias = _factor(factors, 0, columns, channels)[None, :], _factor(factors, 1, columns, channels)[None, :]
    mean, rstd = _factor(moments, 0, columns, channels)[None, :], _factor(moments, 1, columns, channels)[None, :]
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    result = (activated(values * weight + bias, ACT) - mean) * rstd
    tl.store(y + offsets, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _slopes(x, dy, dx, factors, moments, sums, pixels, channels,
            ACT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Compute the input's gradient and, for some tiles, the sums for the gradients of weight, bias, mean and rstd."""
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = columns < channels
    weight, bias = _factor(factors, 0, columns, channels)[None, :], _factor(factors, 1, columns, channels)[None, :]
    mean, rstd = _factor(moments, 0, columns, channels)[None, :], _factor(moments, 1, columns, channels)[None, :]
    dweight, dbias = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    dmean, drstd = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    for tile in range(TILES):
        rows = (tl.program_id(0).to(tl.int64) * TILES + tile) * PIXELS + tl.arange(0, PIXELS)
        inside = (rows < pixels)[:, None] & exists[None, :]
        offsets = rows[:, None] * channels + columns[None, :]
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)  # 0 outside, and so is everything below
        inputs = values * weight + bias
        slope = passed(inputs, given * rstd, ACT)
        tl.store(dx + offsets, (slope * weight).to(dx.dtype.element_ty), mask=inside)
        dweight += tl.sum(slope * values, 0)
        dbias += tl.sum(slope, 0)
        dmean -= tl.sum(given * rstd, 0)
        drstd += tl.sum(given * (activated(inputs, ACT) - mean), 0)
    place = sums + tl.program_id(0) * 4 * channels + columns
    tl.store(place, dweight, mask=exists)
    tl.store(place + channels, dbias, mask=exists)
    tl.store(place + 2 * channels, dmean, mask=exists)
    tl.store(place + 3 * channels, drstd, mask=exists)


def moments(factors: Tensor, samples: Tensor, act: str, eps: float) -> Tensor:
    """Each channel's mean and 1 / deviation of the activation, 2 x C, fp32."""
    channels, count = factors.shape[1], samples.numel()
    found = factors.new_empty(2, channels, dtype=torch.float32)
    _moments[(triton.cdiv(channels, PROXIED),)](
        factors, samples, found, count, channels, eps,
        ACT=ACTIVATIONS[act], ROWS=PROXIED, SAMPLES=triton.next_power_of_2(count), **FUSED,
    )  # fmt: skip
    return found


def factor_gradients(factors: Tensor, samples: Tensor, found: Tensor, sums: Tensor, act: str) -> Tensor:
    """The factors' gradients, 4 x C, fp32; `sums`: gradients of weight and bias through elements, and of `found`."""
    channels, count = factors.shape[1], samples.numel()
    dfactors = torch.empty_like(sums)
    _moments_slopes[(triton.cdiv(channels, PROXIED),)](
        factors, samples, found, sums, dfactors, count, channels,
        ACT=ACTIVATIONS[act], ROWS=PROXIED, SAMPLES=triton.next_power_of_2(count), **FUSED,
    )  # fmt: skip
    return dfactors


def forward(x: Tensor, factors: Tensor, samples: Tensor, act: str, eps: float) -> tuple[Tensor, Tensor]:
    """The output, and the moments."""
    pixels, channels = x.numel() // x.shape[1], x.shape[1]
    found, y, tile = moments(factors, samples, act, eps), torch.empty_like(x), _tile(pixels, channels)
    grid = (triton.cdiv(pixels, tile["PIXELS"]), triton.cdiv(channels, tile["CHANNELS"]))
    _elements[grid](x, y, factors, found, pixels, channels, ACT=ACTIVATIONS[act], **tile)
    return y, found


def backward(x: Tensor, dy: Tensor, factors: Tensor, samples: Tensor, found: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """The gradients of the input and, in fp32, of the factors."""
    pixels, channels = x.numel() // x.shape[1], x.shape[1]
    tile = _tile(pixels, channels)
    grid = (triton.cdiv(pixels, tile["PIXELS"] * TILES), triton.cdiv(channels, tile["CHANNELS"]))
    sums = factors.new_empty(grid[0], 4, channels, dtype=torch.float32)
    dx = torch.empty_like(x)
    _slopes[grid](x, dy, dx, factors, found, sums, pixels, channels, ACT=ACTIVATIONS[act], TILES=TILES, **tile)
    return dx, factor_gradients(factors, samples, found, sums.sum(0), act)


def _tile(pixels: int, channels: int) -> dict[str, int]:
    columns = min(CHANNELS, triton.next_power_of_2(channels))
    return {"PIXELS": min(TILE // columns, triton.next_power_of_2(pixels)), "CHANNELS": columns, **FUSED}
