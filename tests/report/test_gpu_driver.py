"""What the driver of a GPU tells."""

import types

import pytest

from falconet.report import gpu_driver
from falconet.report.gpu_driver import Gauge


class PretendedNvml:
    """A driver of one GPU that counts 5 joules from one question to the next."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.tells, self.count, self.asked = True, 0, []

    def nvmlInit(self):
        self.count += 5000

    def nvmlShutdown(self): ...

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if not self.tells:
            raise self.NVMLError
        return self.count

    def nvmlDeviceGetCount(self):
        if not self.tells:
            raise self.NVMLError
        return 1

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=3 << 30, total=139 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=97)


@pytest.fixture
def nvml(monkeypatch):
    found = PretendedNvml()
    monkeypatch.setattr(gpu_driver.importlib, "import_module", lambda name: found)
    return found


def test_energy_is_what_the_driver_counts(nvml):
    assert gpu_driver.joules("12-ab") == 5.0
    assert gpu_driver.joules("GPU-12-ab") == 10.0
    assert nvml.asked == ["GPU-12-ab"] * 2
    nvml.tells = False
    assert gpu_driver.joules("12-ab") is None


def test_energy_in_words():
    assert (gpu_driver.joules_in_words(12_345.0), gpu_driver.joules_in_words(4.5e6)) == ("12.3 kJ", "1.25 kWh")


def test_every_gpu_has_a_gauge(nvml):
    assert gpu_driver.gauges() == [Gauge(number=0, name="NVIDIA H200", busy=97.0, used=3 << 30, total=139 << 30)]
    nvml.tells = False
    assert gpu_driver.gauges() == []


def test_without_the_package_nothing_is_told(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(gpu_driver.importlib, "import_module", missing)
    assert gpu_driver.joules("12-ab") is None
    assert gpu_driver.gauges() == []
