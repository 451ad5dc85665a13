"""Counters print a line now and then without a terminal, and nothing when quiet."""

import re
from types import SimpleNamespace

import pytest

from falconet.report import console
from falconet.report.console import Counting


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_line_is_printed_at_intervals(clock, capsys):
    with Counting("listing photos", total=5000) as count:
        count.add(10)
        clock[0] = console.SILENCE
        count.add(1234)
        count.add(1)
        clock[0] = 2.5 * console.SILENCE
        count.add(1)
    assert capsys.readouterr().err == "listing photos: 1,244 of 5,000\nlisting photos: 1,246 of 5,000\n"


def test_without_a_total_only_the_count_is_printed(clock, capsys):
    with Counting("listing") as count:
        clock[0] = 60
        count.add(7)
    assert capsys.readouterr().err == "listing: 7\n"


def test_a_quiet_counter_prints_nothing(clock, capsys):
    with Counting("listing", quiet=True) as count:
        clock[0] = 60
        count.add(7)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar(clock, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")  # not a dumb terminal
    with Counting("listing photos", total=5000) as count:
        clock[0] = 1
        count.add(1244)
    shown = capsys.readouterr().err
    assert "listing photos" in shown
    assert "1,244 of 5,000" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    with Counting("listing") as count:
        clock[0] = 2
        count.add(1244)
    shown = capsys.readouterr().err
    assert "1,244" in shown
    assert "eta" not in shown, "without a total there is no end"
