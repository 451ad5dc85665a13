"""Updates of replicas as CUDA graphs: all capture or none, and a replay that never ends ends the process."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

import gloo
from falconet import exits
from falconet.errors import WorldError
from falconet.parallel import collectives
from falconet.parallel.collectives import _ReplayWatch
from pretended_graphs import captured
from replica_scenarios import Case
from runs import wait_for

CASES = [
    Case(accumulation=2),
    Case(rule="sgd_combined", accumulation=2),
    Case(sharded=True),
    Case(regime="16.16", scale=None),
]


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_replicas_capture_their_updates_with_the_same_numbers(case):
    for plain, graphs, events, notes in gloo.in_world(2, captured, case):
        assert events == ["make", "capture"] + ["replay"] * 5
        assert plain == graphs
        assert notes == []


@pytest.mark.dist
@pytest.mark.parametrize("case", [case for case in CASES if case.rule != "sgd_combined"])  # looks for tensors on CUDA
def test_if_one_replica_cannot_capture_none_does_and_one_line_gives_the_reason(case):
    results = gloo.in_world(2, captured, case, 1)
    for plain, graphs, events, _ in results:
        assert events == ["make", "capture"] + ["make"] * 5
        assert plain == graphs
    assert results[0][3] == []
    assert results[1][3] == [
        "note: updates are not captured as CUDA graphs, which takes longer: NCCL cannot be captured here"
    ]


# A replay that waits for a process that is gone.


class Event:
    ended = False

    def __init__(self):
        self.ends = Event.ended

    def record(self): ...

    def query(self):
        return self.ends


@pytest.fixture
def watch(monkeypatch):
    """How to make a watch with a time-out of 0.2 s, and the codes with which it ended the process."""
    codes = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(exits, "now", codes.append)
    monkeypatch.setattr(collectives, "MARGIN", 0.0)
    monkeypatch.setattr(collectives, "EVERY", 0.02)
    alive = SimpleNamespace(timed_out=lambda seconds: WorldError(f"rank 0: timed out after {seconds:g} s"))
    return lambda: _ReplayWatch(SimpleNamespace(timeout=0.2, alive=alive)), codes


def watching():
    return {thread for thread in threading.enumerate() if thread.name == "replays"}


def test_a_replay_that_never_ends_ends_the_process_with_a_line(watch, monkeypatch, capfd):
    make, codes = watch
    monkeypatch.setattr(Event, "ended", False)
    replayed = make()
    replayed()
    wait_for(lambda: codes, "the end of the process")
    assert codes == [1]
    assert capfd.readouterr().err == "rank 0: timed out after 0.2 s\n"


def test_replays_that_end_are_no_time_out_and_the_watch_ends_with_its_step(watch, monkeypatch):
    make, codes = watch
    before = watching()  # of other tests
    monkeypatch.setattr(Event, "ended", True)
    replayed = make()
    deadline = time.monotonic() + 0.6
    while time.monotonic() < deadline:
        replayed()
        time.sleep(0.02)
    assert (codes, len(watching() - before)) == ([], 1)
    del replayed
    wait_for(lambda: not watching() - before, "the end of the watch")
