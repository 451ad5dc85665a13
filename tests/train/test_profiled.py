"""A profiled step makes the same updates and leaves a trace."""

import json

import pytest
import torch

from falconet.report.tracing import TABLE, TRACE
from falconet.train.profiled import ProfiledStep


class Counted:
    def __init__(self):
        self.calls = []

    def __call__(self, micro_batches, *, update, lr):
        self.calls.append((update, lr))
        torch.ones(8, 8) @ torch.ones(8, 8)
        return update


@pytest.mark.parametrize("updates", [1, 2, 10])
def test_every_update_is_made_once_and_some_are_traced(tmp_path, updates):
    step = Counted()
    profiled = ProfiledStep(step, tmp_path, device=torch.device("cpu"), updates=updates)
    assert [profiled([], update=number, lr=0.5) for number in range(updates)] == list(range(updates))
    assert step.calls == [(number, 0.5) for number in range(updates)]
    events = json.loads((tmp_path / TRACE).read_text())["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == min(updates, 3)
    assert "aten::mm" in (tmp_path / TABLE).read_text()
