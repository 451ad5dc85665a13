"""Slices cover every value once, and join into the whole tensor."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from falconet.parallel.slices import fair_share, joined

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
KINDS = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.float64])


@st.composite
def states(draw):
    found = {}
    for number in range(draw(st.integers(1, 6))):
        shape, kind, last = draw(SHAPES), draw(KINDS), draw(st.booleans())
        values = torch.randn(shape).mul(100).to(kind)
        found[f"{number}.weight"] = values.to(memory_format=torch.channels_last) if last and len(shape) == 4 else values
    return found


@settings(deadline=None)
@given(state=states(), size=st.integers(1, 7))
def test_the_shares_of_all_processes_cover_every_tensor_once(state, size):
    shares = [fair_share(state, rank=rank, size=size) for rank in range(size)]
    for name, whole in state.items():
        slices = sorted((s for share in shares for s in share if s.name == name), key=lambda s: s.begin)
        edges = [edge for s in slices for edge in (s.begin, s.end)]
        assert edges == sorted(edges)
        assert edges[0] == 0
        assert edges[-1] == whole.numel()
        assert edges[1:-1:2] == edges[2:-1:2], "a gap or an overlap"
        assert torch.equal(joined(slices), whole)
        assert joined(slices).is_contiguous()
        assert joined(slices).dtype == whole.dtype


def test_the_shares_are_even_to_within_one_value():
    state = {"a": torch.zeros(1000), "b": torch.zeros(17, dtype=torch.float16), "c": torch.zeros(3, 3)}
    sizes = [
        sum(s.values.numel() * s.values.element_size() for s in fair_share(state, rank=rank, size=3))
        for rank in range(3)
    ]
    assert sum(sizes) == 4000 + 34 + 36
    assert max(sizes) - min(sizes) <= 8
