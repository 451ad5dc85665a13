"""Benchmark processes: their output, their end, and that nothing is left behind."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from falconet.bench import execution
from falconet.bench.execution import Command
from falconet.parallel.host import peak_of
from watched import wait_until_gone


@pytest.fixture
def ended(tmp_path):
    def run(script, *, timeout=None, argv=None, echo=lambda line: None):
        command = Command(argv=argv or (sys.executable, "-c", script), environment={}, folder=tmp_path)
        log = tmp_path / "logs/output.log"
        return execution.run(command, runs=tmp_path / "runs", log=log, timeout=timeout, echo=echo)

    return run


def test_output_exit_code_and_log_are_kept(ended, tmp_path):
    found = ended("import sys; print('one', flush=True); print('two', file=sys.stderr); print(); sys.exit(7)")
    assert (found.code, found.last_line, found.stopped) == (7, "two", None)
    assert sorted(found.lines) == ["", "one", "two"]
    assert "two" in (tmp_path / "logs/output.log").read_text()


@pytest.mark.skipif(not peak_of(os.getpid()), reason="this system does not tell a peak")
def test_peak_memory_is_that_of_the_child(ended, tmp_path, monkeypatch):
    ballast, printed, naps = b"x" * (300 << 20), [], []

    def sleep(seconds):
        naps.extend(printed)
        if len(naps) > 1:  # it was looked at between two of them
            (tmp_path / "go").touch()
        time.sleep(seconds)

    monkeypatch.setattr(execution, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    script = (
        "import os, time; x = b'x' * (80 << 20); print('there', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    found = ended(script, echo=printed.append)
    assert 80 << 20 < found.peak_memory < len(ballast)


def test_a_missing_program_fails_the_benchmark(ended):
    found = ended("", argv=("no-such-program-here",))
    assert (found.code, found.last_line) == (127, "no-such-program-here: No such file or directory")


def test_a_timeout_stops_the_process_and_its_children(ended, monkeypatch):
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    printed, now = [], execution.time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now + 4.0 * bool(printed), sleep=time.sleep)  # over once it has started
    monkeypatch.setattr(execution, "time", clock)
    found = ended(script, timeout=3.0, echo=printed.append)
    assert found.stopped == "timeout"
    wait_until_gone(int(found.lines[0]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_reaches_the_process_and_keeps_its_output(ended, number):
    script = (
        "import time\n"
        "try:\n"
        "    print('measured', flush=True)\n"
        "    while True: time.sleep(0.1)\n"  # a signal just before a long sleep would be seen only after it
        "except KeyboardInterrupt:\n    print('saved')\n"
    )
    found = ended(script, echo=lambda line: line == "measured" and os.kill(os.getpid(), number))
    assert found.stopped == "interrupted"
    assert list(found.lines) == ["measured", "saved"]


def test_a_terminal_that_is_lost_interrupts_once_and_under_nohup_not_at_all():
    before = signal.getsignal(signal.SIGHUP)

    def lose_terminal() -> None:
        try:
            signal.raise_signal(signal.SIGHUP)  # the system's
        finally:
            signal.raise_signal(signal.SIGHUP)  # the shell's

    with pytest.raises(KeyboardInterrupt), execution.terminated_as_interrupted():
        lose_terminal()
    assert signal.getsignal(signal.SIGHUP) == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with execution.terminated_as_interrupted():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_full_disk_truncates_the_log_without_hanging(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    many = "for number in range(20000): print('line', number)"
    (tmp_path / "log").symlink_to(full)
    command = Command(argv=(sys.executable, "-c", many), environment={}, folder=tmp_path)
    ended = execution.run(command, runs=tmp_path / "runs", log=tmp_path / "log", timeout=300, echo=lambda _: None)
    assert (ended.code, len(ended.lines), ended.stopped) == (0, 20000, None)
    assert ended.unlogged == "No space left on device"
