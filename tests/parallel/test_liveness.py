"""A process that lost another reports which one, where, and what to do."""

import os
import signal
import socket

import pytest
from torch.distributed import HashStore

from falconet.parallel import collectives, environment
from falconet.parallel.collectives import Liveness
from runs import wait_for

BROKEN = RuntimeError("Connection closed by peer [127.0.0.1]:5\nmore")
HERE = socket.gethostname()
BEGIN = "rank 0: lost another process while summing over the processes (Connection closed by peer [127.0.0.1]:5): "
RESUME = "; resume the run to continue from the newest checkpoint"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    for name, seconds in {"EVERY": 0.01, "BEAT": 0.02, "SILENCE": 0.1, "PATIENCE": 300, "COURTESY": 0.01}.items():
        monkeypatch.setattr(collectives, name, seconds)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(params=["store", "folder"])
def two(request, tmp_path):
    store = HashStore()
    store.set("host/1", HERE)  # the first asks for it before the second is here
    board = collectives.Folder(tmp_path) if request.param == "folder" else None
    processes = [Liveness(store, rank=rank, size=2, board=board) for rank in range(2)]
    processes[1].doing = "update 7"
    wait_for(lambda: says(board or store, 1).endswith(b" update 7"), "its thread to say so")
    wait_for(lambda: says(board or store, 0), "the other one's first words")
    yield processes
    for process in processes:
        process.close()


def says(board, rank):
    try:
        return board.get(f"doing/{rank}")
    except FileNotFoundError:
        return b""


@pytest.mark.parametrize("own", [True, False], ids=["our launcher", "another launcher"])
def test_a_lost_process_is_named_with_its_host_and_what_it_was_doing(two, monkeypatch, own):
    if own:
        monkeypatch.setenv(environment.OWN, "1")
    two[1].close()
    said = str(two[0].lost("summing over the processes", BROKEN))
    assert said.startswith(f"{BEGIN}rank 1 on {HERE} gives no sign of life, last seen ")
    assert said.endswith(" s ago in update 7; see its last output" + ("" if own else RESUME))


def test_the_reason_is_reported_when_no_process_is_lost(two, monkeypatch):
    """Such as a device that fails: the launcher sees no more than that this process ended."""
    monkeypatch.setattr(
        collectives, "SILENCE", 5.0
    )  # in which the other's thread gets a core, however busy the machine
    monkeypatch.setenv(environment.OWN, "1")
    said = str(two[0].lost("summing over the processes", BROKEN))
    assert said == f"{BEGIN}all processes are alive, so suspect a device or the network of {HERE}"


def test_the_launcher_can_end_a_process_that_lost_another(two):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    two[0].lost("summing over the processes", BROKEN)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_process_already_asked_to_stop_ends_silently(two, monkeypatch):
    """Our launcher saw it first, and says who went."""
    sent = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    for own, asked in ((True, True), (True, False), (False, True)):
        monkeypatch.setenv(environment.OWN, "1") if own else monkeypatch.delenv(environment.OWN)
        two[0].is_asked = lambda asked=asked: asked
        two[0].lost("summing over the processes", BROKEN)
    assert sent == [(os.getpid(), signal.SIGTERM)]
