"""Partial sums of products in half precision, where the device has them."""

import torch


def half_partials(enabled: bool, device: torch.device) -> str:
    """Allow (or forbid) sums in half precision within matrix products; one line for the plan."""
    if device.type != "cuda":
        return f"half partials: no effect on {device.type}, which sums in fp32" if enabled else "partials: fp32"
    matmul = torch.backends.cuda.matmul
    # Torch allows the first two unless told otherwise; the third sums a whole product in fp16.
    matmul.allow_fp16_reduced_precision_reduction = enabled
    matmul.allow_bf16_reduced_precision_reduction = enabled
    matmul.allow_fp16_accumulation = enabled
    if not enabled:
        return "partials: fp32"
    return "half partials: matrix products in fp16 (bf16: between blocks); cuDNN's convolutions still sum in fp32"
