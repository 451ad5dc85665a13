"""Timed and profiled steps: the same updates, with the time of each and a trace of some."""

import json
from contextlib import nullcontext

import pytest
import torch

from falconet.report import trace
from falconet.report.throughput import AHEAD, HostMoments, Stopwatch
from falconet.report.trace import TABLE, TRACE
from falconet.train.step import DeviceMoments, ProfiledStep, TimedStep, moments_of


class Counted:
    def __init__(self):
        self.calls = []

    def __call__(self, micro_batches, *, update, lr):
        self.calls.append((update, lr))
        torch.ones(8, 8) @ torch.ones(8, 8)
        return update


@pytest.mark.parametrize("updates", [1, 2, 10])
def test_every_update_runs_once_and_some_are_traced(tmp_path, updates):
    step = Counted()
    profiled = ProfiledStep(step, tmp_path, device=torch.device("cpu"), updates=updates, pause=nullcontext)
    assert [profiled([], update=number, lr=0.5) for number in range(updates)] == list(range(updates))
    assert step.calls == [(number, 0.5) for number in range(updates)]
    events = json.loads((tmp_path / TRACE).read_text())["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == min(updates, 3)
    assert "aten::mm" in (tmp_path / TABLE).read_text()


@pytest.mark.parametrize("updates", [1, 10])
def test_starting_and_writing_the_trace_is_not_update_time(tmp_path, monkeypatch, updates):
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])

    def lasting(function, seconds):
        def call(*arguments, **more):
            now[0] += seconds
            return function(*arguments, **more)

        return call

    monkeypatch.setattr(trace, "started", lasting(trace.started, 100.0))
    monkeypatch.setattr(trace, "write", lasting(trace.write, 1000.0))
    step = TimedStep(lasting(Counted(), 3.0), watch)
    profiled = ProfiledStep(step, tmp_path, device=torch.device("cpu"), updates=updates, pause=watch.standing)
    for number in range(updates):
        now[0] += 0.5  # until its images are there
        profiled([], update=number, lr=0.5)
    waited = 0.0 if updates == 1 else 0.5  # the profiler starts in between
    assert watch.update_seconds() == [3.0 + waited] + [3.5] * (updates - 1)
    assert watch.lap()[0] == 3.5 * updates


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
