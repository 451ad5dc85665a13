"""However replicas and stages are divided, the global batch is the recipe's, or the run is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falconet.errors import ConfigError, DeviceError
from falconet.parallel.division import Asked, Division, over_devices, over_hosts, over_processes

small = st.integers(1, 64)
few = st.integers(1, 6)


@given(small, small, few, small)
def test_devices_never_change_the_global_batch(replicas, accumulation, stages, devices):
    asked = Asked(replicas=replicas, accumulation=accumulation, stages=stages)
    found = over_devices(asked, devices=devices, what="")
    assert found.replicas * found.accumulation == replicas * accumulation
    assert found.processes <= devices
    assert found.stages == (stages if stages <= devices else 1)
    assert (found.notes == ()) == (found.processes == replicas * stages)


@given(small, small, few, small, st.booleans())
def test_processes_never_change_the_global_batch(replicas, accumulation, stages, size, free):
    asked = Asked(replicas=replicas, accumulation=accumulation, stages=stages, free=free)
    try:
        found = over_processes(asked, size=size, launcher="torchrun")
    except ConfigError:
        assert size % stages or replicas % (size // stages)
        assert not free or size % stages or replicas * accumulation % (size // stages)
    else:
        assert found.processes == size
        assert found.replicas * found.accumulation == replicas * accumulation


FOLDED = {  # replicas, stages, devices -> replicas and stages that run
    (4, 2, 8): (4, 2),
    (4, 2, 7): (2, 2),
    (3, 2, 5): (1, 2),
    (1, 4, 3): (1, 1),
    (4, 4, 3): (2, 1),
}


@pytest.mark.parametrize(("asked", "run"), FOLDED.items())
def test_replicas_are_folded_before_stages(asked, run):
    replicas, stages, devices = asked
    recipe = Asked(replicas=replicas, accumulation=3, stages=stages)
    found = over_devices(recipe, devices=devices, what="few are available")
    assert (found.replicas, found.stages) == run


def test_folding_is_explained_in_a_line_each():
    found = over_devices(Asked(replicas=4, accumulation=1, stages=4), devices=3, what="3 devices are available")
    assert found == Division(
        2,
        2,
        1,
        (
            "4 stages requested, 3 devices are available: all stages of a replica run in one process, with the same"
            " updates",
            "4 replicas requested, 3 devices are available: 2 run, with 2 times the accumulation; same global batch"
            " and learning rate",
        ),
    )


def test_strict_devices_refuse_too_few_devices():
    asked = Asked(replicas=4, accumulation=1, strict=True)
    assert over_devices(asked, devices=4, what="").processes == 4
    with pytest.raises(DeviceError, match="4 replicas requested, which takes 4 devices; 2 are available"):
        over_devices(asked, devices=2, what="2 are available")
    with pytest.raises(DeviceError, match="which takes 4 processes; torchrun started 2"):
        over_processes(asked, size=2, launcher="torchrun")


def test_strict_devices_refuse_too_few_devices_for_stages():
    asked = Asked(replicas=2, accumulation=1, stages=2, strict=True)
    with pytest.raises(DeviceError, match="2 replicas of 2 stages requested, which takes 4 devices; 2 are available"):
        over_devices(asked, devices=2, what="2 are available")
    with pytest.raises(DeviceError, match="which takes 4 processes; torchrun started 2"):
        over_processes(asked, size=2, launcher="torchrun")


def test_a_world_that_contradicts_the_recipe_is_refused():
    with pytest.raises(ConfigError, match=r"4 replicas .* torchrun started 3 processes; expected 4 processes"):
        over_processes(Asked(replicas=4, accumulation=1), size=3, launcher="torchrun")
    with pytest.raises(ConfigError, match=r"of 2 stages .* torchrun started 5 processes; expected 4 processes$"):
        over_processes(Asked(replicas=2, accumulation=1, stages=2), size=5, launcher="torchrun")


ON_HOSTS = {  # replicas, stages, hosts, devices of each -> replicas and stages that run
    (8, 4, 2, 16): (8, 4),
    (8, 4, 2, 8): (4, 4),
    (8, 4, 2, 7): (2, 4),
    (8, 4, 2, 3): (4, 1),  # not one pipeline over both hosts
    (16, 1, 1, 3): (2, 1),
    (32, 4, 8, 1): (8, 1),
}


@pytest.mark.parametrize(("asked", "run"), ON_HOSTS.items())
def test_every_host_runs_as_many_whole_replicas_as_it_has_devices_for(asked, run):
    replicas, stages, hosts, devices = asked
    recipe = Asked(replicas=replicas, accumulation=2, stages=stages)
    found = over_hosts(recipe, hosts=hosts, devices=devices, what="few are available")
    assert (found.replicas, found.stages) == run
    assert found.replicas * found.accumulation == 2 * replicas
    assert all(note.startswith(f"on each of {hosts} hosts: ") for note in found.notes)
    # What each of the started processes finds out is the same.
    own = over_processes(recipe, size=found.processes, launcher="torchrun", running=found.stages)
    assert (own.replicas, own.stages, own.accumulation) == (found.replicas, found.stages, found.accumulation)


def test_replicas_that_the_hosts_cannot_share_are_refused():
    with pytest.raises(ConfigError, match=r"^3 replicas requested on 2 hosts; expected a multiple of 2, because"):
        over_hosts(Asked(replicas=3, accumulation=2), hosts=2, devices=8, what="")
    found = over_hosts(Asked(replicas=3, accumulation=2, free=True), hosts=2, devices=8, what="")
    assert (found.replicas, found.accumulation) == (2, 3)
