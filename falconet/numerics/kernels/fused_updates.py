"""The update rules and LARS's trust ratios in Triton: one launch for many tensors, each read and written once."""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803, N806, SIM108, SIM300

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.numerics.kernels import FUSED
from falconet.numerics.kernels.tensor_table import COLUMNS, Control, Group, Tables
from falconet.numerics.rounding import MIX, SLOT_STRIDE, SMALLEST, TENSOR_STRIDE, UPDATE_STRIDE, seed_bits

_MIX1, _MIX2 = tl.constexpr(MIX[0]), tl.constexpr(MIX[1])
_UPDATE_STRIDE, _TENSOR_STRIDE = tl.constexpr(UPDATE_STRIDE), tl.constexpr(TENSOR_STRIDE)
_SMALLEST = tl.constexpr(SMALLEST)
_FIRST_SLOT, _SECOND_SLOT = tl.constexpr(SLOT_STRIDE), tl.constexpr(2 * SLOT_STRIDE % 2**32)
_COLUMNS = tl.constexpr(COLUMNS)
_PARTS_AT_ONCE = 1024  # sums of chunks that are added at a time
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
ELEMENTS_PER_WARP = 256  # 8 per thread: one 16-byte load, and few enough registers for many warps


@triton.jit
def _mix(x):  # uint32
    x = x ^ (x >> 16)
    x = x * _MIX1
    x = x ^ (x >> 15)
    x = x * _MIX2
    return x ^ (x >> 16)


@triton.jit
def _round_float16(x, noise):
    """`rounding._round_float16`, including signs and overflow; the fp32 result is exact in fp16."""
    pattern = x.to(tl.uint32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    exponent = (magnitude >> 23).to(tl.int32)
    dropped = tl.minimum(tl.maximum(126 - exponent, 13), 23).to(tl.uint32)
    one = dropped * 0 + 1
    below = (one << dropped) - 1
    rounded = (magnitude + (noise & below)) & ~below
    up = (noise & 0x3FFFFFFF).to(tl.int32).to(tl.float32) * 5.551115123125783e-17 < tl.abs(x)  # 2^-54
    rounded = tl.where(magnitude < 0x33800000, tl.where(up, one * 0x33800000, 0), rounded)  # 2^-24
    rounded = tl.where(magnitude < 0x477FE000, rounded, magnitude)
    return (rounded | (pattern & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _round_bfloat16(x, noise):
    pattern = x.to(tl.uint32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    rounded = (magnitude + (noise & 0xFFFF)) & 0xFFFF0000
    rounded = tl.where(magnitude < 0x7F7F0000, rounded, magnitude)
    return (rounded | (pattern & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _load(pointer, offsets, elements, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + offsets, mask=offsets < elements, other=0.0).to(tl.float32)
    return tl.load(pointer + offsets).to(tl.float32)


@triton.jit
def _store(pointer, value, offsets, elements, mixed, ROUNDED: tl.constexpr, MASKED: tl.constexpr):
    TYPE: tl.constexpr = pointer.dtype.element_ty
    if ROUNDED and TYPE != tl.float32:
        noise = _mix(mixed)
        if TYPE == tl.float16:
            value = _round_float16(value, noise)
        else:
            value = _round_bfloat16(value, noise)
    if MASKED:
        tl.store(pointer + offsets, value.to(TYPE), mask=offsets < elements)
    else:
        tl.store(pointer + offsets, value.to(TYPE))


@triton.jit
def _logical(offsets, row):
    """The logical index of the element at a position in memory."""
    numbers = offsets.to(tl.uint32)
    pixels = tl.load(row + 7).to(tl.uint32)
    if pixels > 1:  # channels last
        channels = tl.load(row + 6).to(tl.uint32)
        image = _divided(numbers, row + 8)
        within = numbers - image * (channels * pixels)
        pixel = _divided(within, row + 10)
        numbers = image * (channels * pixels) + (within - pixel * channels) * pixels + pixel
    return numbers


@triton.jit
def _divided(numbers, row):
    """Numbers divided as by `tensor_table._division`."""
    return tl.umulhi(numbers, tl.load(row).to(tl.uint32)) >> tl.load(row + 1).to(tl.uint32)


@triton.jit
def _apply(w, g, s, t, lr, own1, own2, decay, k1, k2, k3, k4, k5, RULE: tl.constexpr, TYPE: tl.constexpr):
    """The functions of `update_rules.py`, step by step; `own` numbers belong to a tensor, `k` numbers to the rule."""
    if RULE == "descent":
        w = w - (g + w * decay) * lr
    elif RULE == "momentum_descent":  # k1: momentum
        s = s * k1 + (g + w * decay)
        w = w - s * lr
    elif RULE == "lars":  # own1: trust; k1: momentum
        s = s * k1 + (g + w * decay) * (own1 * lr)
        w = w - s
    elif RULE == "rmsprop":  # k1: 1 - alpha; k2: eps
        g = g + w * decay
        s = s + (g * g - s) * k1
        w = w - tl.div_rn(g, tl.sqrt_rn(s + k2)) * lr
    elif RULE == "momentum_rmsprop":  # k3: momentum
        g = g + w * decay
        s = s + (g * g - s) * k1
        t = t * k3 + tl.div_rn(g, tl.sqrt_rn(s + k2)) * lr
        w = w - t
    elif RULE == "root_rmsprop":  # k1, k2: alpha, 1 - alpha; k3: eps
        g = g + w * decay
        s = tl.sqrt_rn(s * s * k1 + g * g * k2)
        w = w - tl.div_rn(g, s + k3) * lr
        if TYPE == tl.float16:
            s = tl.where(s > 0, tl.maximum(s, _SMALLEST), s)
    elif RULE == "momentum_root_rmsprop":  # k4: momentum
        g = g + w * decay
        s = tl.sqrt_rn(s * s * k1 + g * g * k2)
        t = t * k4 + tl.div_rn(g, s + k3)
        w = w - t * lr
        if TYPE == tl.float16:
            s = tl.where(s > 0, tl.maximum(s, _SMALLEST), s)
    else:  # own: corrections; k1, k2: beta1, 1 - beta1; k3, k4: beta2, 1 - beta2; k5: eps
        tl.static_assert(RULE == "adamw")
        s = s * k1 + g * k2
        t = tl.sqrt_rn(t * t * k3 + g * g * k4)
        w = w - (tl.div_rn(s * own1, t * own2 + k5) + w * decay) * lr
        if TYPE == tl.float16:
            t = tl.where(t > 0, tl.maximum(t, _SMALLEST), t)
    return w, s, t


@triton.jit
def _chunk(row, start, lr, inverse, base, own1, own2, decay, k1, k2, k3, k4, k5,
           RULE: tl.constexpr, STATES: tl.constexpr, TYPE: tl.constexpr, GRAD: tl.constexpr,
           ROUNDED: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    # Addresses are loaded as numbers: without the hint each element would be loaded separately.
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(TYPE)), 16)
    grad = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRAD)), 16)
    first = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(TYPE)), 16)
    second = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(TYPE)), 16)
    elements = tl.load(row + 4).to(tl.int32)
    offsets = start + tl.arange(0, CHUNK)
    stream = _mix(tl.load(row + 5).to(tl.uint32) * _TENSOR_STRIDE + base)
    places = tl.load(row + 12).to(tl.int32) + offsets  # in the whole tensor, of which this may be a piece
    mixed = _mix(_logical(places, row) ^ stream) + stream

    w = _load(weight, offsets, elements, MASKED)
    g = _load(grad, offsets, elements, MASKED) * inverse
    s, t = w, w  # ignored where the rule has fewer states
    if STATES >= 1:
        s = _load(first, offsets, elements, MASKED)
    if STATES == 2:
        t = _load(second, offsets, elements, MASKED)
    w, s, t = _apply(w, g, s, t, lr, own1, own2, decay, k1, k2, k3, k4, k5, RULE, TYPE)
    _store(weight, w, offsets, elements, mixed, ROUNDED, MASKED)
    if STATES >= 1:
        _store(first, s, offsets, elements, mixed + _FIRST_SLOT, ROUNDED, MASKED)
    if STATES == 2:
        _store(second, t, offsets, elements, mixed + _SECOND_SLOT, ROUNDED, MASKED)


@triton.jit(do_not_specialize=["seed"])
def _kernel(rows, chunks, own, lr_pointer, scale, found, update, seed, decay, k1, k2, k3, k4, k5,
            RULE: tl.constexpr, STATES: tl.constexpr, TYPE: tl.constexpr, GRAD: tl.constexpr,
            ROUNDED: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    if tl.load(found) == 0:
        program = tl.program_id(0)
        tensor = tl.load(chunks + 2 * program)
        start = tl.load(chunks + 2 * program + 1) * CHUNK
        row = rows + tensor * _COLUMNS
        own1, own2 = tl.load(own + 2 * tensor), tl.load(own + 2 * tensor + 1)
        lr = tl.load(lr_pointer)
        inverse = tl.div_rn(1.0, tl.load(scale))
        base = _mix(tl.load(update).to(tl.uint32) * _UPDATE_STRIDE + seed.to(tl.uint32))
        # Whole chunks, nearly all of them, go without a mask, which would keep loads from being 16 bytes wide.
        if start + CHUNK <= tl.load(row + 4).to(tl.int32):
            _chunk(row, start, lr, inverse, base, own1, own2, decay, k1, k2, k3, k4, k5,
                   RULE, STATES, TYPE, GRAD, ROUNDED, False, CHUNK)  # fmt: skip
        else:
            _chunk(row, start, lr, inverse, base, own1, own2, decay, k1, k2, k3, k4, k5,
                   RULE, STATES, TYPE, GRAD, ROUNDED, True, CHUNK)  # fmt: skip


def launch(
    rule: str, group: Group, control: Control, *, own: Tensor, constants: Sequence[float], tables: Tables
) -> None:
    """Update all tensors of the group, in place.

    own: 2 fp32 numbers per tensor; constants: weight decay, then `k1` and so on of the rule.
    """
    decay, *rest = map(float, constants)
    assert len(rest) <= 5
    weight, grad = group.weights[0], group.grads[0]
    chunks = tables.chunks(group)
    _kernel[(len(chunks),)](
        tables.rows(group),
        chunks,
        own,
        control.lr,
        control.scale,
        control.found.view(torch.uint8),
        control.update,
        seed_bits(control.rounding.seed) if control.rounding else 0,
        decay,
        *rest,
        *[0.0] * (5 - len(rest)),
        RULE=rule,
        STATES=len(group.states[0]),
        TYPE=TYPES[weight.dtype],
        GRAD=TYPES[grad.dtype],
        ROUNDED=control.rounding is not None,
        CHUNK=tables.chunk,
        num_warps=tables.chunk // ELEMENTS_PER_WARP,
        enable_fp_fusion=False,  # each operation rounded separately, as in torch
    )


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The constants of coefficient * |w| / (|g| + decay * |w| + eps)."""

    coefficient: float
    decay: float
    eps: float


@triton.jit
def _add(a, b):  # as tl.sum, which is compiled when Triton is imported, so that the interpreter cannot run it
    return a + b


@triton.jit
def _squares(rows, chunks, parts, TYPE: tl.constexpr, GRAD: tl.constexpr, CHUNK: tl.constexpr):
    """Sum the squares of one chunk of the weight and of its gradient."""
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
    """Compute the trust ratio of one tensor from the sums of its chunks, added in a fixed order."""
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


def trust_ratios(group: Group, trust: Trust, *, scale: Tensor, tables: Tables) -> Tensor:  # tensors x 2, equal columns
    """`update_rules.trust_ratios` of each weight and its gradient, without the host reading anything."""
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
        num_warps=tables.chunk // ELEMENTS_PER_WARP,
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
