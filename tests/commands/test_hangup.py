"""A terminal that goes away, as when an ssh connection breaks: the run saves, or continues under `nohup`."""

import os
import signal
import subprocess
import sys

import pytest

from falconet.checkpoint import format
from runs import LIMIT, begin, finish, updates, wait_for
from tiny import TINY
from watched import children

pytestmark = pytest.mark.dist

# Each runs the program after it: with standard input as its controlling terminal, as a login does, or as `nohup` does.
LOGIN = "os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
THROUGH = "import fcntl, os, signal, sys, termios; {}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_whose_terminal_is_lost_saves(tmp_path, replicas):
    there, terminal = os.openpty()
    words = f"train {TINY} --epoch 5000 --checkpoint-save-freq 5000 --run-dir r --replicas {replicas}".split()
    line = [sys.executable, "-c", THROUGH.format(LOGIN), "-m", "falconet", *words]
    process = subprocess.Popen(line, cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    wait_for(lambda: len(updates(tmp_path / "r")) > 2, "updates")
    os.close(there)
    assert process.wait(timeout=LIMIT) == 130
    (saved,) = format.checkpoints_in(tmp_path / "r")  # at the interruption, and none before
    assert format.verify(saved).progress.update >= updates(tmp_path / "r")[-1]


@pytest.mark.slow
def test_run_of_two_processes_continues_under_nohup(tmp_path):
    """torchrun handles SIGHUP even where it was ignored: pytorch issue 76894."""
    line = f"train {TINY} --epoch 40 --run-dir r --replicas 2"
    process = begin(line, tmp_path, launcher=(sys.executable, "-c", THROUGH.format(NOHUP), "-m", "falconet"))
    wait_for(lambda: len(updates(tmp_path / "r")) > 2, "updates")
    for number in (process.pid, *children(process.pid)):
        os.kill(number, signal.SIGHUP)
    code, _, err = finish(process)
    assert (code, err) == (0, "")
    assert updates(tmp_path / "r")[-1] == 160
