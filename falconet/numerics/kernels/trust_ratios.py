"""The trust ratios of LARS in Triton: each weight and gradient read once, in two launches for many tensors."""
# Triton's language is not Python: its functions have no types that mypy could read, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.numerics.kernels import FUSED
from falconet.numerics.kernels.fused_updates import ELEMENTS_A_WARP, TYPES
from falconet.numerics.kernels.tensor_table import COLUMNS, Group, Tables

_COLUMNS = tl.constexpr(COLUMNS)
_PARTS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Constants of coefficient * |w| / (|g| + decay * |w| + eps)."""

    coefficient: float
    decay: float
    eps: float


@triton.jit
def _add(a, b):  # tl.sum is this, compiled when Triton is imported, so that the interpreter cannot run it
    return a + b


@triton.jit
def _squares(rows, chunks, parts, TYPE: tl.constexpr, GRAD: tl.constexpr, CHUNK: tl.constexpr):
    """Sums of squares of one chunk, of the weight and of the gradient."""
    program = tl.program_id(0)
    row = rows + tl.load(chunks + 2 * program) * _COLUMNS
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(TYPE)), 16)
    grad = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRAD)), 16)
    elements = tl.load(row + 4).to(tl.int32)
    start = tl.load(chunks + 2 * program + 1) * CHUNK
    offsets = start + tl.arange(0, CHUNK)
    if start + CHUNK <= elements:  # without a mask loads are 16 bytes wide
        w = tl.load(weight + offsets).to(tl.float32)
        g = tl.load(grad + offsets).to(tl.float32)
    else:
        w = tl.load(weight + offsets, mask=offsets < elements, other=0.0).to(tl.float32)
        g = tl.load(grad + offsets, mask=offsets < elements, other=0.0).to(tl.float32)
    tl.store(parts + 2 * program, tl.reduce(w * w, 0, _add))
    tl.store(parts + 2 * program + 1, tl.reduce(g * g, 0, _add))


@triton.jit
def _ratios(parts, firsts, scale, own, coefficient, decay, eps, AT_ONCE: tl.constexpr):
    """The trust ratio of one tensor, from the sums of its chunks, added in a fixed order."""
    tensor = tl.program_id(0)
    begin, end = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    lanes = tl.arange(0, AT_ONCE)
    w = tl.full((AT_ONCE,), 0.0, tl.float32)
    g = tl.full((AT_ONCE,), 0.0, tl.float32)
    for part in range(begin, end, AT_ONCE):
        inside = part + lanes < end
        w += tl.load(parts + 2 * (part + lanes), mask=inside, other=0.0)
        g += tl.load(parts + 2 * (part + lanes) + 1, mask=inside, other=0.0)
    weights = tl.sqrt_rn(tl.reduce(w, 0, _add))
    grads = tl.div_rn(tl.sqrt_rn(tl.reduce(g, 0, _add)), tl.load(scale))
    ratio = tl.div_rn(coefficient * weights, grads + decay * weights + eps)
    ratio = tl.where((weights > 0) & (grads > 0), ratio, 1.0)
    tl.store(own + 2 * tensor, ratio)
    tl.store(own + 2 * tensor + 1, ratio)


def trust_ratios(group: Group, trust: Trust, *, scale: Tensor, tables: Tables) -> Tensor:  # tensors x 2, twice the same
    """The trust ratio of each weight, 1 where its norm or its gradient's is 0; nothing is read by the host."""
    weight, grad = group.weights[0], group.grads[0]
    rows, chunks = tables.rows(group), tables.chunks(group)
    parts = torch.empty((len(chunks), 2), device=weight.device)
    own = torch.empty((len(group.weights), 2), device=weight.device)
    _squares[(len(chunks),)](
        rows,
        chunks,
        parts,
        TYPE=TYPES[weight.dtype],
        GRAD=TYPES[grad.dtype],
        CHUNK=tables.chunk,
        num_warps=tables.chunk // ELEMENTS_A_WARP,
        **FUSED,
    )
    _ratios[(len(group.weights),)](
        parts,
        tables.firsts(group),
        scale,
        own,
        trust.coefficient,
        trust.decay,
        trust.eps,
        AT_ONCE=_PARTS_AT_ONCE,
        enable_fp_fusion=False,
    )
    return own
