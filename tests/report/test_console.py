"""The screen prints plain lines to a file, and adds a progress bar on a terminal."""

import contextlib
import io
import os
import re
import select
import subprocess
import sys
import time

import pytest
from rich.console import Console

from falconet import __version__
from falconet.errors import UserError
from falconet.report.console import Counting, Lines, Notice, Screen
from falconet.report.throughput import Pace
from report_runs import write_run

HOSTILE = ["[red]x[/red] [/]", "runs/:cat:/a:smiley:b.png", "x" * 500, "100 % of [1, 2, 3]", "a\\[b]"]


class Clock:
    """Moves only when it is set."""

    now = 0.0

    def __call__(self):
        return self.now


def plain(clock=time.monotonic):
    """A screen on a file, and the file."""
    text = io.StringIO()
    return Screen(Console(file=text, highlight=False, soft_wrap=True), clock=clock), text


def terminal(clock=time.monotonic):
    """A screen on a terminal 120 wide, and what was sent to it."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, highlight=False, soft_wrap=True, _environ={})
    return Screen(console, clock=clock), text


def begin(screen, *, total, done=0, heartbeat=30.0):
    """A run with 8 images per update."""
    screen.begin(total=total, done=done, images=8, heartbeat=heartbeat)


@pytest.mark.parametrize("line", HOSTILE)
def test_a_line_is_printed_unchanged_and_unwrapped(line):
    screen, text = plain()
    screen.line(line)
    assert text.getvalue() == line + "\n"


@pytest.mark.parametrize("line", HOSTILE)
def test_a_line_is_printed_unchanged_on_a_terminal(line):
    screen, text = terminal()
    screen.line(line)
    assert text.getvalue() == line + "\n"


def test_a_file_gets_lines_but_no_bar():
    screen, text = plain()
    with screen:
        begin(screen, total=4)
        for update in screen.counts(range(4), epoch="epoch 1/1", total=4, done=0):
            screen.show(0.5)
            if update == 2:
                screen.line("a line")
    assert text.getvalue() == "a line\n"


def test_a_dialect_gets_one_line_at_the_start_instead_of_a_heartbeat():
    screen, text = plain()
    with screen:
        begin(screen, total=4, heartbeat=None)
    assert text.getvalue() == "training starts: update 1 of 4\n"


def test_a_pipe_gets_a_line_after_half_a_minute_without_one():
    clock = Clock()
    screen, text = plain(clock)
    with screen:
        begin(screen, total=200)
        for update in screen.counts(range(100), epoch="epoch 1/2", total=100, done=0):
            clock.now += 1.0
            screen.show(2.0)
            if update == 40:
                screen.line("a row")
            if update == 99:
                for _ in range(50):  # the last update is made, but the loop has not come back for the next one
                    clock.now += 1.0
                    screen.glance("validating")
    eta = "images/s  eta"
    assert text.getvalue().splitlines() == [
        f"epoch 1/2   30%  loss 2.0000  8.0 {eta} 1m10s, run 2m50s",
        "a row",
        f"epoch 1/2   71%  loss 2.0000  8.0 {eta} 29.0s, run 2m09s",
        "epoch 1/2  100%  validating",
        "epoch 1/2  100%  validating",
    ]


def test_a_terminal_shows_the_epoch_its_updates_the_loss_and_the_speed():
    clock = Clock()
    screen, text = terminal(clock)
    with screen:
        begin(screen, total=40, done=12)
        for number, _ in enumerate(screen.counts(range(2), epoch="epoch 4/10", total=4, done=2)):
            clock.now += 1.0
            screen.show(1.25)
            screen.line(f"line {number}")
    shown = text.getvalue()
    for words in ("epoch 4/10", "100%", "loss 1.2500  8.0 images/s  eta", "line 0", "line 1"):
        assert words in shown, words


def test_the_shown_loss_moves_with_every_one_that_is_known():
    pace = Pace(total=9, done=0, images=8)
    shown = []
    for loss in (4.0, 2.0, float("nan"), 1.0):
        pace.show(loss)
        shown.append(pace.loss)
    assert shown == [4.0, pytest.approx(3.8), pytest.approx(float("nan"), nan_ok=True), 1.0]


def test_the_time_left_counts_validations_in_the_run_but_not_in_the_epoch():
    clock = Clock()
    pace = Pace(total=30, done=10, images=8, clock=clock)
    for _ in range(2):  # epochs of 5 updates, of which the run is restored after the second
        pace.begin_epoch(total=5, done=0)
        for _ in range(5 if clock.now == 0 else 3):
            clock.now += 2.0
            pace.add()
            pace.mark()
        clock.now += 6.0  # a validation
    assert pace.images_per_second == 4.0
    assert pace.epoch_seconds_left == 2 * 2.0
    assert pace.run_seconds_left == (8 * 2.0 + 2 * 6.0) / 8 * 12


def test_the_run_takes_no_less_time_than_its_epoch():
    clock = Clock()
    pace = Pace(total=10, done=0, images=8, clock=clock)
    for seconds in (1.0, 4.0):  # the second epoch is slower
        pace.begin_epoch(total=5, done=0)
        for _ in range(3 if seconds == 4.0 else 5):
            clock.now += seconds
            pace.add()
            pace.mark()
    assert pace.run_seconds_left == pace.epoch_seconds_left == 2 * 4.0


def test_an_epoch_does_not_begin_with_the_time_left_for_the_one_before():
    clock = Clock()
    screen, text = terminal(clock)
    begin(screen, total=8)
    for _ in screen.counts(range(4), epoch="epoch 1/2", total=4, done=0):
        screen.show(0.5)
        clock.now += 1.0
    shown = len(text.getvalue())
    next(screen.counts(range(4), epoch="epoch 2/2", total=4, done=0))
    while "epoch 2/2" not in text.getvalue()[shown:]:  # another thread draws it
        time.sleep(0.01)
    screen.end()
    drawn = text.getvalue()[shown:]
    drawn = drawn[drawn.index("epoch 2/2") :]
    assert "loss 0.5000" in drawn
    assert "eta" not in drawn


def test_the_bar_is_erased_when_the_screen_ends():
    screen, text = terminal()
    with screen:
        begin(screen, total=4)
        list(screen.counts(range(4), epoch="epoch 1/1", total=4, done=0))
    assert text.getvalue().rstrip().endswith("\x1b[2K")  # its line is erased
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1  # the cursor is back


def test_the_bar_leaves_room_for_the_echo_of_ctrl_c():
    screen, text = terminal()
    begin(screen, total=4)
    for _ in screen.counts(range(4), epoch="epoch 1/1", total=4, done=0):
        screen.show(0.5)
    screen.end()
    drawn = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", text.getvalue())]
    assert max(map(len, drawn)) == 116, "of 120 columns"


def test_the_bar_is_hidden_after_a_validation_until_the_next_update():
    clock = Clock()
    screen, text = terminal(clock)
    begin(screen, total=4)
    updates = screen.counts(range(4), epoch="epoch 1/1", total=4, done=0)
    next(updates)
    clock.now += 1
    screen.glance("validating")
    while "validating" not in text.getvalue():  # another thread draws it
        time.sleep(0.01)
    screen.hide()
    shown = len(text.getvalue())
    screen.line("a row")
    assert "epoch 1/1" not in text.getvalue()[shown:]
    clock.now += 1
    next(updates)
    while "epoch 1/1" not in text.getvalue()[shown:]:
        time.sleep(0.01)
    screen.end()


def test_the_bar_advances_when_an_update_is_done_not_when_it_starts():
    clock = Clock()
    screen, text = terminal(clock)
    begin(screen, total=8, done=3)
    for update in screen.counts(["a", "b"], epoch="epoch 1/2", total=5, done=3):
        clock.now += 1.0
        if update == "b":
            break
    screen.end()
    assert " 80%" in text.getvalue()
    assert "100%" not in text.getvalue()


def test_the_cursor_is_restored_when_the_run_fails():
    screen, text = terminal()
    begin(screen, total=4)
    with pytest.raises(ValueError, match="broken"), screen:
        raise ValueError("broken")
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1


def test_there_is_no_bar_on_the_pseudo_terminal_of_mpirun(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    screen, text = terminal()
    begin(screen, total=3, heartbeat=None)
    screen.end()
    assert text.getvalue() == "training starts: update 1 of 3\n"


def test_a_dumb_terminal_gets_lines_as_a_pipe_does():
    text, clock = io.StringIO(), Clock()
    console = Console(file=text, force_terminal=True, width=80, soft_wrap=True, _environ={"TERM": "dumb"})
    screen = Screen(console, clock=clock)
    with screen:
        begin(screen, total=4)
        for _ in screen.counts(range(4), epoch="epoch 1/1", total=4, done=0):
            clock.now += 20.0
    assert [line.split("  ")[:2] for line in text.getvalue().splitlines()] == [
        ["epoch 1/1", " 50%"],
        ["epoch 1/1", "100%"],
    ]
    assert "\x1b" not in text.getvalue()


def test_a_notebook_shows_one_line_that_is_written_over():
    class OutStream(io.StringIO):
        """What ipykernel puts in the place of stdout."""

    OutStream.__module__ = "ipykernel.iostream"
    text, clock = OutStream(), Clock()
    screen = Screen(Console(file=text, soft_wrap=True, force_jupyter=False), clock=clock)
    with screen:
        begin(screen, total=2)
        for _ in screen.counts(range(2), epoch="epoch 1/1", total=2, done=0):
            clock.now += 1.0
            screen.show(0.5)
        screen.line("a row")
    first, second, erased, row = text.getvalue().split("\r")[1:]
    assert first.startswith("epoch 1/1   50%  loss 0.5000  8.0 images/s")
    assert second.startswith("epoch 1/1  100%  loss 0.5000")
    assert (erased.strip(" "), row) == ("", "a row\n")
    assert len(erased) >= len(second.rstrip())


def test_the_bar_fits_into_80_columns_of_plain_ascii():
    class Narrow(io.StringIO):
        encoding = "ascii"

    text, clock = Narrow(), Clock()
    console = Console(file=text, force_terminal=True, width=80, highlight=False, no_color=True, _environ={})
    screen = Screen(console, clock=clock)
    with screen:
        begin(screen, total=300 * 5004)
        for _ in screen.counts(range(4), epoch="epoch 100/300", total=5004, done=1000):
            clock.now += 1.0
            screen.show(6.9)
    bars = [line for line in text.getvalue().split("\r") if "epoch" in line]
    plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", bar).strip("\n") for bar in bars]
    assert any("loss 6.9000  8.0 images/s  eta" in bar for bar in plain)
    assert max(map(len, plain)) <= 80
    assert all(bar.isascii() for bar in plain)


class Unread(io.StringIO):
    """A pipe whose reader has closed it."""

    def flush(self):
        raise BrokenPipeError


def test_a_closed_stdout_does_not_end_a_command(capsys):
    """As with `falconet models | head`."""
    screen = Screen(Lines(file=Unread()))
    for text in ("one", "two"):
        screen.line(text)
    assert capsys.readouterr() == ("", "")


def test_training_continues_on_stderr_when_stdout_is_closed(capsys):
    """As after `falconet train | tee log` when Ctrl-C has ended `tee`: the run saves and prints how to continue."""
    screen = Screen(Lines(file=Unread(), highlight=False, soft_wrap=True))
    screen.line("the plan")
    with screen:
        begin(screen, total=4, heartbeat=None)
        screen.line("saved [x]")
    screen.line("the end")
    *closed, starts, saved, end = capsys.readouterr().err.splitlines()
    assert closed == ["stdout was closed; continuing on stderr"]
    assert (starts, saved, end) == ("training starts: update 1 of 4", "saved [x]", "the end")


def test_training_continues_when_stdout_and_stderr_are_closed(monkeypatch):
    monkeypatch.setattr("sys.stderr", Unread())
    screen = Screen(Lines(file=Unread()))
    with screen:
        begin(screen, total=4)
        for _ in screen.counts(range(4), epoch="epoch 1/1", total=4, done=0):
            screen.line("unheard")


def test_a_closed_terminal_does_not_end_a_run():
    there, terminal = os.openpty()
    with os.fdopen(terminal, "w") as file, Screen(Lines(file=file)) as screen:
        begin(screen, total=2)
        os.close(there)
        screen.line("a line")
        screen.line("again")


def test_other_output_errors_are_raised():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Lines(file=Full()).print("a line")


ACTING = {
    "a colour": ("a\x1b[31mb", "a\\x1b[31mb"),
    "over the line": ("a\rb\x08\x7f", "a\\rb\\x08\\x7f"),
    "C1": ("a\x9b31mb\x85", "a\\x9b31mb\\x85"),
    "backwards": ("a\u202egpj.exe\u2066", "a\\u202egpj.exe\\u2066"),
    "separators": ("a\u2028b", "a\\u2028b"),
    "other languages": (
        "\u05e9\u05dc\u05d5\u05dd caf\xe9 \u65e5\u672c",
        "\u05e9\u05dc\u05d5\u05dd caf\xe9 \u65e5\u672c",
    ),
}


@pytest.mark.parametrize(("name", "shown"), ACTING.values(), ids=ACTING)
def test_names_of_files_do_not_act_on_the_terminal(name, shown):
    text = io.StringIO()
    Screen(Lines(file=text, force_terminal=True, width=120, highlight=False, soft_wrap=True)).line(name)
    assert text.getvalue() == f"{shown}\n"
    assert str(UserError(f"{name}\n: bad")) == f"{shown}\\n: bad"


def test_the_counter_shows_names_as_they_are(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(Lines, "is_terminal", True)
    counting = Counting("indexing [red]a\x1b[31mb[/red]", total=3)
    counting._console.file = text
    with counting:
        counting.add(3)
    assert "[31m" in text.getvalue()
    assert "\x1b[31m" not in text.getvalue()
    assert "[red]a\\x1b" in text.getvalue()


@contextlib.contextmanager
def on_a_terminal(monkeypatch):
    """A notice that all output knows, and what a terminal, which is both stdout and stderr, has got since."""
    there, here = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    notice = Notice()
    monkeypatch.setattr("falconet.report.console.NOTICE", notice)

    def got():
        text = b""
        while select.select([there], [], [], 0.1)[0]:  # seconds: the kernel passes output on a moment later
            text += os.read(there, 1 << 16)
        return text.decode()

    with os.fdopen(here, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        yield notice, got
    os.close(there)


def test_a_notice_is_erased_by_the_first_line(monkeypatch):
    with on_a_terminal(monkeypatch) as (shown, got):
        shown.begin("loading ...")
        assert got() == "loading ...\r"
        Screen().line("loaded")
        Screen().line("more")
        assert got() == "\x1b[Kloaded\r\nmore\r\n"
        shown.end()
        assert got() == ""


def test_a_counter_replaces_the_notice_for_a_while(monkeypatch):
    with on_a_terminal(monkeypatch) as (shown, got):
        shown.begin("loading ...")
        got()
        with Counting("checking"):
            begun = got()
        assert begun.startswith("\x1b[K")
        assert "checking" in begun
        assert got().endswith("loading ...\r")
        Screen().line("done")
        with Counting("again"):
            got()
        assert "loading" not in got()


def test_there_is_no_notice_unless_both_streams_are_terminals(monkeypatch):
    with on_a_terminal(monkeypatch) as (shown, got):
        for stream in ("stdout", "stderr"):
            with monkeypatch.context() as patch:
                patch.setattr(sys, stream, io.StringIO())
                shown.begin("loading ...")
        monkeypatch.setenv("TERM", "dumb")
        shown.begin("loading ...")
        shown.end()
        assert got() == ""


def test_a_command_on_a_terminal_says_at_once_that_it_loads():
    there, here = os.openpty()
    line = [sys.executable, "-m", "falconet", "models"]
    with subprocess.Popen(line, stdout=here, stderr=here, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(here)
        first = ""
        while "\r" not in first:
            first += os.read(there, 1 << 16).decode()
        process.kill()
    os.close(there)
    assert first.startswith(f"falconet {__version__}: loading PyTorch ...\r")


@pytest.mark.parametrize("line", ["configs", "report run", "watch run"])
def test_a_command_without_torch_does_not_say_that_it_loads(line, tmp_path):
    write_run(tmp_path / "run")
    there, here = os.openpty()
    command = [sys.executable, "-m", "falconet", *line.split()]
    terminal = {"stdin": subprocess.DEVNULL, "stdout": here, "stderr": here}
    shown, environment = b"", os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **terminal) as process:
        os.close(here)
        with contextlib.suppress(OSError):  # EIO: the command has ended
            while read := os.read(there, 1 << 16):
                shown += read
    os.close(there)
    assert process.returncode == 0
    assert shown
    assert b"loading" not in shown
