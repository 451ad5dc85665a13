"""Workers that torch's agent loses when a signal arrives as it starts them are ended."""

import os
import shutil
import signal
import subprocess

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from falconet.errors import Interrupted
from falconet.parallel import host
from falconet.parallel.launch import failures_of

LIMIT = 300  # seconds; 1 on a quiet machine
WITH_A_CHILD = ["sh", "-c", "sleep 600 & echo ready; wait"]
DEAF = ["sh", "-c", "trap '' TERM; echo ready; sleep 600"]
WITH_A_DEAF_CHILD = ["sh", "-c", "(trap '' TERM; echo ready; sleep 600) & wait"]


def started(line):
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdin=pipe, stdout=pipe, start_new_session=True, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def interrupted():
    raise SignalException("", signal.SIGTERM)


KINDS = {
    "with a child": (WITH_A_CHILD, 300),
    "deaf": (DEAF, 0.2),
    "with a deaf child": (WITH_A_DEAF_CHILD, 300),
    "with an odd name": (["a) S 3 (b", "-c", "echo ready; sleep 600 & wait"], 300),
}


@pytest.mark.parametrize(("line", "grace"), KINDS.values(), ids=KINDS)
def test_a_worker_that_the_agent_lost_is_ended_with_its_children(monkeypatch, tmp_path, line, grace):
    monkeypatch.setattr(host, "GRACE", grace)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "a) S 3 (b").symlink_to(shutil.which("sh"))  # the system's name for a process is that of its file
    forgotten = []

    def agent():
        forgotten.append(started(line))
        interrupted()

    with pytest.raises(Interrupted):
        failures_of(agent)
    (process,) = forgotten
    assert process.communicate(timeout=LIMIT)[0] == ""  # ends once no process holds the pipe


def test_earlier_processes_are_left_alone():
    process = started(["sh", "-c", "echo ready; exec cat"])
    with pytest.raises(Interrupted):
        failures_of(interrupted)
    assert process.communicate("alive", timeout=LIMIT)[0] == "alive"
    assert process.returncode == 0
