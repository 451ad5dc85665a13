"""A profiled step makes the same updates and writes a trace."""

import json
from contextlib import nullcontext

import pytest
import torch

from falconet.report import trace
from falconet.report.throughput import Stopwatch
from falconet.report.trace import TABLE, TRACE
from falconet.train.step import ProfiledStep, TimedStep


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
