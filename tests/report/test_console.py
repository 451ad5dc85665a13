"""The screen prints plain lines to a file, and adds a progress bar on a terminal."""

import io
import os

import pytest
from rich.console import Console

from falconet.errors import UserError
from falconet.report.console import Counting, Lines, Screen

HOSTILE = ["[red]x[/red] [/]", "runs/:cat:/a:smiley:b.png", "x" * 500, "100 % of [1, 2, 3]", "a\\[b]"]


def plain():
    """A screen on a file, and the file."""
    text = io.StringIO()
    return Screen(Console(file=text, highlight=False, soft_wrap=True)), text


def terminal():
    """A screen on a terminal 120 wide, and what was sent to it."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, highlight=False, soft_wrap=True, _environ={})
    return Screen(console), text


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
        screen.begin(total=4, done=0)
        for update in screen.counts(range(4), epoch="epoch 1/1"):
            screen.note(f"loss {update}")
            if update == 2:
                screen.line("a line")
    assert text.getvalue() == "training starts: update 1 of 4\na line\n"


def test_a_terminal_shows_the_epoch_the_updates_and_the_note():
    screen, text = terminal()
    with screen:
        screen.begin(total=40, done=12)
        for number, _ in enumerate(screen.counts(range(2), epoch="epoch 4/10")):
            screen.note(f"loss {number}.25")
            screen.line(f"line {number}")
    shown = text.getvalue()
    for words in ("epoch 4/10", "14/40", "loss 1.25", "line 0", "line 1"):
        assert words in shown, words


def test_the_bar_is_erased_when_the_screen_ends():
    screen, text = terminal()
    with screen:
        screen.begin(total=4, done=0)
    assert text.getvalue().rstrip().endswith("\x1b[2K")  # its line is erased
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1  # the cursor is back


def test_the_bar_advances_when_an_update_is_done_not_when_it_starts():
    screen, text = terminal()
    screen.begin(total=8, done=3)
    for update in screen.counts(["a", "b"], epoch="epoch 1/2"):
        if update == "b":
            break
    screen.end()
    assert "4/8" in text.getvalue()
    assert "5/8" not in text.getvalue()


def test_the_cursor_is_restored_when_the_run_fails():
    screen, text = terminal()
    screen.begin(total=4, done=0)
    with pytest.raises(ValueError, match="broken"), screen:
        raise ValueError("broken")
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1


def test_there_is_no_bar_on_the_pseudo_terminal_of_mpirun(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    screen, text = terminal()
    screen.begin(total=3, done=0)
    screen.end()
    assert text.getvalue() == "training starts: update 1 of 3\n"


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
        screen.begin(total=4, done=0)
        screen.line("saved [x]")
    screen.line("the end")
    *closed, starts, saved, end = capsys.readouterr().err.splitlines()
    assert closed == ["stdout was closed; continuing on stderr"]
    assert (starts, saved, end) == ("training starts: update 1 of 4", "saved [x]", "the end")


def test_training_continues_when_stdout_and_stderr_are_closed(monkeypatch):
    monkeypatch.setattr("sys.stderr", Unread())
    screen = Screen(Lines(file=Unread()))
    with screen:
        screen.begin(total=4, done=0)
        for _ in screen.counts(range(4), epoch="epoch 1/1"):
            screen.line("unheard")


def test_a_closed_terminal_does_not_end_a_run():
    there, terminal = os.openpty()
    with os.fdopen(terminal, "w") as file, Screen(Lines(file=file)) as screen:
        screen.begin(total=2, done=0)
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
