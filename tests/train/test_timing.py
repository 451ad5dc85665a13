"""Timed steps: the same updates, with the time of each."""

import pytest
import torch

from falconet.report.throughput import AHEAD, HostMoments, Stopwatch
from falconet.train.step import DeviceMoments, TimedStep, moments_of


def test_a_timed_step_calls_the_step_and_the_stopwatch():
    calls = []

    def step(micro_batches, *, update, lr):
        calls.append((micro_batches, update, lr))
        return "made"

    watch = Stopwatch()
    timed = TimedStep(step, watch)
    assert timed([1, 2], update=7, lr=0.5) == "made"
    assert timed([3], update=8, lr=0.25) == "made"
    assert calls == [([1, 2], 7, 0.5), ([3], 8, 0.25)]
    assert len(watch.update_seconds()) == 2


def test_the_host_is_timed_by_its_clock():
    assert isinstance(moments_of(torch.device("cpu")), HostMoments)


@pytest.mark.gpu
def test_the_device_is_timed_without_waiting_for_it():
    torch.cuda._sleep(1)  # the first launch loads the module, which takes milliseconds
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        watch = Stopwatch(moments=moments_of(torch.device("cuda")))
        for cycles in (1_000_000, 40_000_000):
            torch.cuda._sleep(cycles)
            watch.updated()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    short, long = watch.update_seconds()
    assert isinstance(moments_of(torch.device("cuda")), DeviceMoments)
    assert long > short > 0


@pytest.mark.gpu
def test_the_host_stays_near_the_device():
    """An update that takes the host no time would otherwise keep its images on the device long before they are used."""
    watch = Stopwatch(moments=moments_of(torch.device("cuda")))
    ends = []
    for _ in range(10):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        ends.append(torch.cuda.Event())
        ends[-1].record()
        watch.updated()
        assert all(end.query() for end in ends[:-AHEAD])
    assert not ends[-1].query()
