"""Load, memory and energy of this machine's GPUs from NVIDIA's driver, if the extra `nvml` is installed."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """The use of a GPU by all processes."""

    number: int
    name: str
    busy: float  # percent of the time, lately
    used: int  # bytes
    total: int  # bytes


def joules(uuid: str) -> float | None:
    """The energy that a GPU has used since the driver was loaded; None: not available."""

    def read(nvml: Any) -> float:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000  # from millijoules

    return _told(read)


def joules_in_words(amount: float) -> str:
    """`12.3 kJ`, or `1.25 kWh` from a tenth of one on."""
    return f"{amount / 3.6e6:.2f} kWh" if amount >= 3.6e5 else f"{amount / 1000:.1f} kJ"


def gauges() -> list[Gauge]:
    """A gauge for every GPU; none if the driver cannot be asked."""
    return _told(lambda nvml: [_gauge(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]) or []


def _gauge(nvml: Any, number: int) -> Gauge:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gauge(
        number=number,
        name=name.decode() if isinstance(name, bytes) else str(name),  # bytes in older packages
        busy=float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        used=int(memory.used),
        total=int(memory.total),
    )


def _told(read: Callable[[Any], T]) -> T | None:
    """The driver's answer; None: the package is missing, or the device has no answer."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            return read(nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:  # older GPUs, and containers without the driver's library
        return None
