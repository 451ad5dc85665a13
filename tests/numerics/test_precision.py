"""Half-precision sums and the workspace limit: what is set, and what the plan says about it."""

import os
import subprocess
import sys

import pytest
import torch

from falconet.numerics.precision import (
    REGIMES,
    allow_half_partials,
    describe_half_partials,
    describe_workspace,
    limit_workspace,
    workspace_variables,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SWITCHES = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@pytest.fixture
def switches():
    """Torch's switches, which can be set without a GPU; restored afterwards."""
    matmul = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in SWITCHES}
    yield lambda: [bool(getattr(matmul, name)) for name in SWITCHES]
    for name, value in before.items():
        setattr(matmul, name, value)


def test_half_partials_set_every_switch_of_torch(switches):
    allow_half_partials(CUDA)
    assert switches() == [True] * 3
    allow_half_partials(CUDA, allowed=False)
    assert switches() == [False] * 3


def test_half_partials_change_nothing_on_a_cpu(switches):
    before = switches()
    allow_half_partials(CPU)
    allow_half_partials(CPU, allowed=False)
    assert switches() == before


def test_describing_half_partials_sets_nothing(switches):
    before = switches()
    assert describe_half_partials(REGIMES["16.32"], CPU) == "half partials: no effect on cpu, which sums in fp32"
    assert describe_half_partials(REGIMES["16.16"], CUDA) == (
        "half partials: matrix products, such as the classifier's, sum in fp16; convolutions always sum in fp32"
    )
    assert "sum in bf16 between blocks;" in describe_half_partials(REGIMES["bf16.32"], CUDA)
    assert describe_half_partials(REGIMES["32.32"], CUDA).startswith("half partials: no effect with precision 32.32")
    assert switches() == before


LIMITS = {
    22 * 2**30: {"CUDNN_CONV_WSCAP_DBG": "22528"},  # cuBLASLt would allocate all of it
    2**20: {"CUDNN_CONV_WSCAP_DBG": "1", "CUBLASLT_WORKSPACE_SIZE": "1024"},
    0: {"CUDNN_CONV_WSCAP_DBG": "0", "CUBLASLT_WORKSPACE_SIZE": "0"},
}


@pytest.mark.parametrize(("limit", "expected"), LIMITS.items())
def test_workspace_limit_is_given_in_the_units_of_each_library(limit, expected):
    assert workspace_variables(limit) == expected


def test_workspace_limit_has_no_effect_on_a_cpu(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = dict(os.environ)
    limit_workspace(0.1, CPU)
    assert os.environ == before
    assert describe_workspace(0.1, CPU) == "workspace limit: no effect on cpu"


class _Device:
    total_memory = 10 * 2**30


def test_workspace_limit_keeps_variables_that_the_user_set(monkeypatch):
    monkeypatch.setattr(os, "environ", {"CUDNN_CONV_WSCAP_DBG": "7", "CUBLASLT_WORKSPACE_SIZE": ""})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Device())
    described = describe_workspace(0.001, CUDA)
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == ""
    limit_workspace(0.001, CUDA)
    assert os.environ == {"CUDNN_CONV_WSCAP_DBG": "7", "CUBLASLT_WORKSPACE_SIZE": "10485"}
    assert described == "workspace of a convolution: at most 10 MiB, 0.001 of the device's memory"


PEAK = """
import sys, torch
from falconet.numerics.precision import limit_workspace
device = torch.device("cuda", 0)
if sys.argv[1] != "none":
    limit_workspace(float(sys.argv[1]), device)
torch.backends.cudnn.benchmark = True
images = torch.randn(64, 256, 56, 56, device=device, dtype=torch.half, requires_grad=True)
layer = torch.nn.Conv2d(256, 256, 3, padding=1).to(device, torch.half)
layer(images).sum().backward()
print(torch.cuda.max_memory_allocated())
"""


@pytest.mark.gpu
def test_small_workspace_does_not_raise_peak_memory():
    def peak(share):
        run = subprocess.run([sys.executable, "-c", PEAK, share], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert peak("1e-6") <= peak("none")
