"""The energy that a GPU has used, as its driver counts it."""

import importlib

import torch


def joules(device: torch.device) -> float | None:
    """Since the driver was loaded; None: the device does not tell, or there is no `pynvml` to ask with."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000  # from millijoules
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:  # older GPUs, and containers without the driver's library
        return None


def in_words(amount: float) -> str:
    """`12.3 kJ`, or `1.25 kWh` from a tenth of one on."""
    return f"{amount / 3.6e6:.2f} kWh" if amount >= 3.6e5 else f"{amount / 1000:.1f} kJ"
