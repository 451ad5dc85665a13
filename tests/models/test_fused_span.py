"""Fused norms over several replicas: as exact as those of the whole batch, and as the span's plain layers."""

from pathlib import Path

import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import interpreting
from falconet.models import zoo
from falconet.models.fused import fusion
from falconet.models.fused.layers import fits
from falconet.parallel.batchnorm import over

CASES = [
    *("one norm", "added", "two norms", "gated", "pooled", "convolved"),
    *("means far apart", "huge mean", "tiny variance", "constant", "uneven batches", "several programs"),
]
# The input's own rounding, or that of two means that cancel, is that large a part of what is compared.
ROUNDED = {"huge mean": 1e-4, "tiny variance": 1e-4, "means far apart": 1e-4}


@pytest.fixture(scope="module")
def interpreted():
    """Errors by case, from two replicas in Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_span.py"))


@pytest.mark.run
def test_all_cases_are_known(interpreted):
    assert sorted(interpreted) == sorted(CASES)


@pytest.mark.run
@pytest.mark.parametrize("layers", ["fused", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_norms_over_two_replicas_are_as_exact_as_fp32_on_the_whole_batch(case, layers, interpreted):
    """Both replicas' statistics have the same bits, as the script asserts."""
    for what, error in interpreted[case][layers].items():
        assert error < ROUNDED.get(case, 2e-5), what


class OfTwo:
    """A span that is only looked at."""

    group = nn.Module()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), BatchNormAct2d(8)])
def test_a_norm_that_comes_to_span_replicas_after_it_was_fused_stays_fused(norm):
    over(nn.Sequential(norm), OfTwo())
    assert type(norm).__name__.startswith("Span")
    with FakeTensorMode():
        assert fits(torch.empty(2, 8, 4, 4, device="cuda", memory_format=torch.channels_last), norm)


@pytest.mark.parametrize("name", ["resnet18", "efficientnet-b0"])
def test_every_norm_of_a_network_that_spans_replicas_is_fused(name):
    model = zoo.build(name, classes=10, seed=0)
    found = fusion.fuse(over(model, OfTwo()))
    assert found.fused == found.norms > 0
