"""What bounds the workspace of cuDNN and cuBLAS."""

import os
import subprocess
import sys

import pytest
import torch

from falconet.numerics.precision import limit_workspace, variables

LIMITS = {
    22 * 2**30: {"CUDNN_CONV_WSCAP_DBG": "22528"},  # cuBLASLt would allocate as much as it is told
    2**20: {"CUDNN_CONV_WSCAP_DBG": "1", "CUBLASLT_WORKSPACE_SIZE": "1024"},
    0: {"CUDNN_CONV_WSCAP_DBG": "0", "CUBLASLT_WORKSPACE_SIZE": "0"},
}


@pytest.mark.parametrize(("limit", "wanted"), LIMITS.items())
def test_a_limit_in_bytes_is_told_in_the_units_of_each_library(limit, wanted):
    assert variables(limit) == wanted


def test_a_processor_says_that_there_is_nothing_to_bound(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert limit_workspace(0.1, torch.device("cpu")) == "workspace limit: no effect on cpu"
    assert "CUDNN_CONV_WSCAP_DBG" not in os.environ


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
def test_a_small_share_keeps_the_peak_from_growing():
    def peak(share):
        run = subprocess.run([sys.executable, "-c", PEAK, share], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert peak("1e-6") <= peak("none")
