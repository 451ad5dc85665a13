"""Regimes on a CPU, half-precision sums and the workspace limit: what is set, and what the plan says about it."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from falconet.numerics.precision import (
    REGIMES,
    allow_half_partials,
    automatic,
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


@pytest.fixture
def instructions(monkeypatch):
    """Sets whether this CPU has bf16 instructions."""

    def has(bf16: bool) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    return has


@pytest.mark.parametrize(("bf16", "regime"), [(True, "bf16.32"), (False, "32.32")])
def test_automatic_regime_of_a_cpu_is_the_one_it_has_instructions_for(instructions, bf16, regime):
    instructions(bf16)
    assert automatic("cpu") == regime


def test_plan_names_the_faster_regime_of_a_cpu(instructions):
    instructions(True)
    assert "--precision bf16.32 is faster" in REGIMES["16.16"].describe(CPU)
    assert REGIMES["bf16.32"].describe(CPU) == "bf16.32"
    assert REGIMES["32.32"].describe(CPU) == "32.32 (--precision auto, here bf16.32, is usually faster)"
    instructions(False)
    assert "--precision 32.32 is faster" in REGIMES["16.16"].describe(CPU)
    assert "--precision 32.32 is faster" in REGIMES["bf16.32"].describe(CPU)
    assert REGIMES["32.32"].describe(CPU) == "32.32"


@pytest.mark.parametrize("regime", ["bf16.32", "bf16.bf16"])
def test_depthwise_convolution_in_bf16_on_a_cpu_has_the_gradients_of_fp32(regime):
    torch.manual_seed(0)
    layer, wide = (nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False) for _ in range(2))
    images = torch.randn(4, 8, 9, 9).bfloat16()
    layer.weight.data = layer.weight.data.bfloat16().float()  # what every regime can hold
    wide.load_state_dict(layer.state_dict())
    REGIMES[regime].prepare(layer, CPU)
    with REGIMES[regime].computing(CPU):
        out = layer(images)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wide(images.float()).bfloat16())
    slope = torch.randn_like(out)
    out.backward(slope)
    wide(images.float()).backward(slope.float())
    assert layer.weight.grad.dtype == layer.weight.dtype
    assert torch.equal(layer.weight.grad, wide.weight.grad.to(layer.weight.dtype))


@pytest.mark.parametrize("side", [1, 2])
def test_bf16_gradient_of_a_convolution_on_a_cpu_is_written_everywhere(side):
    """Of one whose images may be narrower than its stride: taps that meet only padding have a gradient of 0."""
    layer = REGIMES["bf16.32"].prepare(nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), CPU)
    images = torch.randn(4, 16, side, side).contiguous(memory_format=torch.channels_last)
    for _ in range(20):
        freed = [torch.full((24 * 16 * 9,), float("nan"), dtype=dtype) for dtype in (torch.float32, torch.bfloat16) * 3]
        del freed  # what is allocated next starts with these values
        layer.zero_grad()
        with REGIMES["bf16.32"].computing(CPU):
            layer(images).sum().backward()
        assert layer.weight.grad.isfinite().all()


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
