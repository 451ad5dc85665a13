"""The Triton kernels, run by Triton's interpreter on the CPU, against the plain torch rules: the same bits."""

import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import interpreting
from falconet.numerics.kernels.tensor_table import Group, Tables, _division, is_dense, same_layout
from falconet.numerics.rounding import Part, Rounding
from falconet.optim.half_optimizers import HalfLars, HalfOptimizer
from half_rules import MAKERS, optimizer_of


@pytest.fixture
def interpreter(monkeypatch):
    """Triton's interpreter instead of its compiler, for kernels that are imported from now on."""
    interpreting.require()
    from falconet.numerics import kernels

    def forget():
        sys.modules.pop("falconet.numerics.kernels.fused_updates", None)
        vars(kernels).pop("fused_updates", None)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreting.replace_the_language_once(monkeypatch.setattr)
    forget()
    yield
    forget()


def network(dtype):
    """Row-major and channels-last, smaller and larger than a chunk, subnormal and scalar."""
    torch.manual_seed(0)
    model = nn.ParameterList(
        [
            torch.randn(16, 8, 3, 3).contiguous(memory_format=torch.channels_last),
            torch.randn(3, 7, 5, 1).contiguous(memory_format=torch.channels_last),
            torch.randn(600),
            torch.randn(5, 9) * 1e-6,
            torch.randn(()),
        ]
    ).to(dtype)
    model.append(nn.Parameter(torch.randn(20)))  # fp32 among half tensors, like a norm's weights
    return model


def make(name, model, rounding):
    optimizer = optimizer_of(name, model, rounding)
    optimizer._tables = Tables(chunk=512)  # small, so that there are full and partial chunks
    return optimizer


def train(model, optimizer, updates, scale=3.0):
    optimizer.scale, optimizer.found = torch.tensor(scale), torch.tensor(False)
    for update in updates:
        noise = torch.Generator().manual_seed(update)
        for p in model:
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=noise) * scale)
        optimizer.at(update)
        optimizer.step()


def check_equal(first, second, one, other):
    for p, q in zip(first, second, strict=True):
        assert torch.equal(p, q), p.shape
        for slot, value in one.state[p].items():
            assert torch.equal(value, other.state[q][slot]), (slot, p.shape)


# The interpreter truncates to bf16 instead of rounding; the GPU tests cover that case.
TYPES = {
    "fp16 stochastic": (torch.float16, Rounding(5)),
    "fp16 nearest": (torch.float16, None),
    "bf16 stochastic": (torch.bfloat16, Rounding(5)),
    "fp32": (torch.float32, None),
}


@pytest.mark.run
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "lars"])
def test_kernel_equals_the_plain_rule_bit_for_bit(name, type_, interpreter):
    dtype, rounding = TYPES[type_]
    plain, fused = network(dtype), network(dtype)
    first, second = make(name, plain, rounding), make(name, fused, rounding)
    second._fuses = True
    train(plain, first, range(2))
    train(fused, second, range(2))
    check_equal(plain, fused, first, second)


@pytest.mark.parametrize("type_", TYPES)
def test_lars_kernel_equals_the_plain_rule_with_the_same_norms(type_, interpreter, monkeypatch):
    dtype, rounding = TYPES[type_]
    plain, fused = network(dtype), network(dtype)
    first, second = make("lars", plain, rounding), make("lars", fused, rounding)
    second._fuses = True
    monkeypatch.setattr(HalfLars, "fused_own", HalfOptimizer.fused_own)
    train(plain, first, range(2))
    train(fused, second, range(2))
    check_equal(plain, fused, first, second)


@pytest.mark.run
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_trust_ratio_kernels_equal_float64(dtype, interpreter):
    from falconet.numerics.kernels import fused_updates

    weights = [torch.randn(16, 64), torch.zeros(3, 3), torch.randn(7, 5) * 1e-3, torch.randn(20, 130)]
    grads = [torch.randn_like(w) * 10 for w in weights]
    grads[2].zero_()
    group = Group([w.to(dtype) for w in weights], [g.to(dtype) for g in grads], [[]] * 4, [Part(0)] * 4)
    trust = fused_updates.Trust(coefficient=0.01, decay=0.1, eps=1e-6)
    found = fused_updates.trust_ratios(group, trust, scale=torch.tensor(4.0), tables=Tables(chunk=512))
    for w, g, (ratio, again) in zip(group.weights, group.grads, found.tolist(), strict=True):
        size, slope = w.double().norm().item(), g.double().norm().item() / 4
        expected = 0.01 * size / (slope + 0.1 * size + 1e-6) if size and slope else 1.0
        assert ratio == again == pytest.approx(expected, rel=1e-6)


@given(by=st.integers(2, 2**24), number=st.integers(0, 2**31 - 1))
def test_division_equals_a_product_and_a_shift(by, number):
    for n in (number, by * (number // by), max(by * (number // by) - 1, 0)):
        multiplier, shift = _division(by)
        assert multiplier < 2**32
        assert (n * multiplier >> 32) >> shift == n // by


def test_kernel_skips_an_update_with_non_finite_gradients(interpreter):
    model = network(torch.float16)
    optimizer = make("adamw", model, Rounding(0))
    optimizer._fuses = True
    train(model, optimizer, [0])
    before = [p.detach().clone() for p in model]
    state = [{slot: t.clone() for slot, t in optimizer.state[p].items()} for p in model]
    optimizer.found = torch.tensor(True)
    optimizer.at(1)
    optimizer.step()
    for p, old, slots in zip(model, before, state, strict=True):
        assert torch.equal(p, old)
        assert all(torch.equal(t, slots[slot]) for slot, t in optimizer.state[p].items())


def test_gradient_is_copied_to_the_weights_layout(interpreter):
    plain, fused = network(torch.float16), network(torch.float16)
    first, second = make("momentum descent", plain, None), make("momentum descent", fused, None)
    second._fuses = True
    for model, optimizer in ((plain, first), (fused, second)):
        for p in model:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p.dtype)  # row-major
        optimizer.step()
    check_equal(plain, fused, first, second)


def group(*weights):
    return Group(weights, weights, [[] for _ in weights], [Part(0)] * len(weights))


def test_chunks_cover_every_element_once():
    sizes = [1, 511, 512, 513, 2000]
    pairs = Tables(chunk=512).chunks(group(*(torch.zeros(size) for size in sizes))).tolist()
    covered = [
        (row, element) for row, part in pairs for element in range(part * 512, min((part + 1) * 512, sizes[row]))
    ]
    assert sorted(covered) == [(row, element) for row, size in enumerate(sizes) for element in range(size)]


def test_table_is_reused_for_the_same_addresses():
    tables, weights = Tables(), [torch.zeros(5), torch.zeros(6)]
    first = tables.rows(group(*weights))
    assert tables.rows(group(*weights)) is first
    assert tables.rows(group(weights[0], torch.zeros(6))) is not first
    assert first[:, :2].tolist() == [[w.data_ptr()] * 2 for w in weights]


def test_memory_layouts_are_recognised():
    last = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert is_dense(last)
    assert is_dense(last.contiguous())
    assert not is_dense(last[:, :2])
    assert same_layout(last, like=last) is last
    assert same_layout(last.contiguous(), like=last).stride() == last.stride()
    bias = torch.arange(36.0).view(2, 18)[1]  # the second row of a fused norm's gradients
    aligned = same_layout(bias, like=torch.empty(18))
    assert (bias.data_ptr() % 16, aligned.data_ptr() % 16) == (8, 0)
    assert torch.equal(aligned, bias)


@pytest.mark.parametrize("name", ["momentum descent", "momentum rmsprop", "adamw"])
def test_flat_pieces_are_updated_like_the_whole(name, interpreter):
    """Cut where a process's share of the memory may end, inside a row or a pixel."""
    whole, other = network(torch.float16), network(torch.float16)
    first = make(name, whole, Rounding(5))
    flat = [p.detach().as_strided((p.numel(),), (1,)) for p in other]
    edges = [sorted({0, p.numel() // 3 // 8 * 8, p.numel()}) for p in other]
    pieces = nn.ParameterList(
        nn.Parameter(values[b:e, None] if p.ndim > 1 else values[b:e])
        for p, values, cuts in zip(other, flat, edges, strict=True)
        for b, e in pairwise(cuts)
    )
    second = make(name, pieces, Rounding(5))
    owners = [(p, b) for p, cuts in zip(whole, edges, strict=True) for b in cuts[:-1]]
    for piece, (p, begin) in zip(pieces, owners, strict=True):
        shape = (p.shape[1], p.shape[2] * p.shape[3]) if p.ndim == 4 and not p.is_contiguous() else (1, 1)
        second.parts[piece] = Part(first.parts[p].tensor, begin, *shape)
    for fuses in (False, True):
        second._fuses = fuses
        for update in (1, 2):
            noise = torch.Generator().manual_seed(update)
            for p in whole:
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=noise))
            for piece, (p, begin) in zip(pieces, owners, strict=True):
                values = p.grad.as_strided((p.numel(),), (1,))[begin : begin + piece.numel()]
                piece.grad = values.view_as(piece).clone()
            for optimizer in (first, second):
                optimizer.at(update)
                optimizer.step()
    for p, q in zip(whole, other, strict=True):
        assert torch.equal(p, q), p.shape
