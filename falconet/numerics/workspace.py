"""How much memory cuDNN and cuBLAS may take for one operation, besides its tensors."""

import os

import torch

CUDNN, CUBLASLT = "CUDNN_CONV_WSCAP_DBG", "CUBLASLT_WORKSPACE_SIZE"  # MiB that it keeps to; KiB that it allocates
_CUBLASLT_OWN = 32 * 2**20  # bytes on Hopper; less elsewhere, so that a larger limit must not be given to it


def limit_workspace(share: float, device: torch.device) -> str:
    """Bound it to a share of the device's memory, before the first convolution; one line for the plan."""
    if device.type != "cuda":
        return f"workspace limit: no effect on {device.type}"
    limit = int(share * torch.cuda.get_device_properties(device).total_memory)
    for name, value in variables(limit).items():
        os.environ[name] = os.environ.get(name) or value  # what somebody has set himself counts more
    return f"workspace of a convolution: at most {limit / 2**20:,.0f} MiB, {share:g} of the device's memory"


def variables(limit: int) -> dict[str, str]:
    """What a limit in bytes is to the libraries, which read the environment."""
    cudnn = {CUDNN: str(limit // 2**20)}
    return cudnn | ({CUBLASLT: str(limit // 2**10)} if limit < _CUBLASLT_OWN else {})
