"""Replicas over devices: the global batch is the recipe's, or the run is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falconet.errors import ConfigError, DeviceError
from falconet.parallel.division import Asked, over_devices, over_processes, processes_that_fit

small = st.integers(1, 64)


@given(small, small, small)
def test_devices_never_change_the_global_batch(replicas, accumulation, devices):
    asked = Asked(replicas=replicas, accumulation=accumulation)
    found = over_devices(asked, devices=devices, what="")
    assert found.processes * found.accumulation == replicas * accumulation
    assert found.processes <= devices
    assert (found.note is None) == (found.processes == replicas)


@given(small, small, small, st.booleans())
def test_processes_never_change_the_global_batch(replicas, accumulation, size, free):
    asked = Asked(replicas=replicas, accumulation=accumulation, free=free)
    try:
        found = over_processes(asked, size=size, launcher="torchrun")
    except ConfigError:
        assert replicas % size
        assert not free or replicas * accumulation % size
    else:
        assert found.processes == size
        assert size * found.accumulation == replicas * accumulation


def test_strict_devices_refuse():
    asked = Asked(replicas=4, accumulation=1, strict=True)
    assert over_devices(asked, devices=4, what="").processes == 4
    with pytest.raises(DeviceError, match="--strict-devices: --replicas 4 needs as many devices; 2 are here"):
        over_devices(asked, devices=2, what="2 are here")
    with pytest.raises(DeviceError, match="needs as many processes, torchrun started 2"):
        over_processes(asked, size=2, launcher="torchrun")


def test_a_world_that_contradicts_the_recipe_is_refused():
    with pytest.raises(ConfigError, match=r"--replicas: got 4 .* torchrun started 3 processes; wanted 4 processes"):
        over_processes(Asked(replicas=4, accumulation=1), size=3, launcher="torchrun")


@pytest.mark.parametrize(
    ("replicas", "stages", "devices", "processes"),
    [(16, 1, 16, 16), (16, 1, 3, 2), (4, 4, 16, 16), (4, 4, 8, 8), (4, 4, 7, 4), (4, 4, 3, 1), (1, 1, 1, 1)],
)
def test_poprun_starts_whole_replicas_on_the_devices_there_are(replicas, stages, devices, processes):
    assert processes_that_fit(replicas, stages=stages, devices=devices) == processes
