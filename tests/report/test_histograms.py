"""Histograms match numpy's, for every dtype and with values that are not finite."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from falconet.report.trackers.histograms import BINS, count_histograms, no_histograms, read_histograms

VALUES = {
    "normal": torch.randn(5000, generator=torch.Generator().manual_seed(0)),
    "of a convolution": torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(1)),
    "whole numbers": torch.arange(65.0),
    "all alike": torch.ones(7),
    "one": torch.tensor([-3.0]),
    "a single number": torch.tensor(2.5),
}


def numpys(values):
    exact = values.reshape(-1).double().numpy()
    return np.histogram(exact, bins=BINS)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_histogram_matches_numpy(name, dtype):
    values = VALUES[name].to(dtype)
    (found,) = read_histograms(count_histograms(values)[None])
    counts, edges = numpys(values)
    np.testing.assert_allclose(found.edges, edges, rtol=1e-6, atol=1e-6)
    assert sum(found.counts) == found.count == values.numel()
    # A value on an edge may fall to either side of it, as numpy's is counted in float64.
    assert np.abs(np.cumsum(found.counts) - np.cumsum(counts)).max() <= (BINS if dtype != torch.float32 else 1)
    exact = values.reshape(-1).double()
    assert found.sum == pytest.approx(float(exact.sum()), abs=1e-9)
    assert found.squares == pytest.approx(float(exact.square().sum()))
    assert (found.smallest, found.largest) == (float(values.min()), float(values.max()))


def test_values_that_are_not_finite_are_left_out():
    values = torch.tensor([1.0, float("nan"), 3.0, float("inf"), -float("inf"), 3.0])
    (found,) = read_histograms(count_histograms(values)[None])
    assert (found.smallest, found.largest, found.count, found.sum) == (1.0, 3.0, 3, 7.0)
    assert (found.counts[0], found.counts[-1], sum(found.counts)) == (1, 2, 3)


def test_no_finite_values_give_an_empty_histogram():
    (found,) = read_histograms(count_histograms(torch.full((4,), float("nan")))[None])
    assert (found.smallest, found.largest, found.count, sum(found.counts)) == (0.0, 0.0, 0, 0)
    assert all(np.diff(found.edges) > 0)


def test_a_row_of_zeros_adds_nothing():
    row = count_histograms(VALUES["normal"])
    assert read_histograms((row + no_histograms(row.device))[None]) == read_histograms(row[None])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=50))
def test_every_value_is_in_one_bin(values):
    (found,) = read_histograms(count_histograms(torch.tensor(values))[None])
    assert sum(found.counts) == len(values)
    assert found.edges[0] <= min(values)
    assert max(values) <= found.edges[-1]


@pytest.mark.gpu
def test_counting_never_synchronises_and_is_deterministic():
    weights = VALUES["normal"].cuda()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = torch.stack([count_histograms(weights), count_histograms(weights.half())])
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(before)
    found, _ = read_histograms(rows)
    assert list(found.counts) == list(read_histograms(count_histograms(VALUES["normal"])[None])[0].counts)
