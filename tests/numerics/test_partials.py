"""What the plan says about partial sums, and what torch is told."""

import pytest
import torch

from falconet.numerics.precision import half_partials


def test_without_effect_it_says_so_in_one_line():
    line = half_partials(True, torch.device("cpu"))
    assert line == "half partials: no effect on cpu, which sums in fp32"
    assert half_partials(False, torch.device("cpu")) == "partials: fp32"


SWITCHES = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@pytest.fixture
def switches():
    """Torch's switches, put back afterwards; they can be set without a GPU."""
    matmul = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in SWITCHES}
    yield lambda: [bool(getattr(matmul, name)) for name in SWITCHES]
    for name, value in before.items():
        setattr(matmul, name, value)


def test_on_cuda_every_switch_of_torch_follows(switches):
    assert "fp16" in half_partials(True, torch.device("cuda"))
    assert switches() == [True] * 3
    assert half_partials(False, torch.device("cuda")) == "partials: fp32"
    assert switches() == [False] * 3
