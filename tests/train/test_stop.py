"""Stopping: the first signal requests it, the second forces it, and earlier handlers are restored."""

import signal
import sys
import time
from itertools import product

import pytest

from falconet.train.stop import AGAIN, SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def handlers_from_before():
    """Handlers that let an unexpected signal fail the test, not the test run."""

    def unexpected(number, frame):
        raise AssertionError(f"signal {number} was not handled")

    before = {number: signal.signal(number, unexpected) for number in SIGNALS}
    yield unexpected
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    signal.raise_signal(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_sets_a_flag_and_prints_a_line(number):
    notes = []
    with StopRequest(notes.append) as stop:
        assert not stop.requested
        send(number)
        assert stop.requested
    again = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert notes == [f"stopping after this update, then saving ({again} again: at once)"]


def test_a_request_names_what_is_finished_first():
    notes = []
    with StopRequest(notes.append, after="at most 8 updates"):
        send(signal.SIGINT)
    assert notes == ["stopping after at most 8 updates, then saving (Ctrl-C again: at once)"]


@pytest.mark.parametrize(("first", "second"), list(product(SIGNALS, SIGNALS)))
def test_the_second_signal_stops_at_once(first, second):
    notes = []
    with StopRequest(notes.append):
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(second)
    assert len(notes) == 1


@pytest.fixture
def hang_up():
    """SIGHUP has its default handler before and after."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGHUP) in (signal.SIG_DFL, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, before)


def test_a_lost_terminal_requests_a_stop_but_never_forces_one(hang_up):
    notes = []
    with StopRequest(notes.append) as stop:
        send(signal.SIGHUP)
        send(signal.SIGHUP)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert notes == ["the terminal is gone: stopping after this update, then saving"]


def test_under_nohup_a_hangup_is_ignored(hang_up):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest(print) as stop:
        send(signal.SIGHUP)
        assert not stop.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_the_previous_handlers_are_restored_however_it_ends(handlers_from_before):
    with StopRequest(print):
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == [handlers_from_before] * 2
    with pytest.raises(ValueError, match="broken"), StopRequest(print):
        raise ValueError("broken")
    assert [signal.getsignal(number) for number in SIGNALS] == [handlers_from_before] * 2


def test_a_new_request_starts_without_the_flag():
    with StopRequest(lambda note: None) as stop:
        send(signal.SIGTERM)
        assert stop.requested
    with StopRequest(lambda note: None) as again:
        assert not again.requested


class Slow:
    """An object whose destructor takes time, in which a signal arrives."""

    def __del__(self):
        send(signal.SIGINT)
        time.sleep(0.01)


def swallowing():
    Slow()  # Python prints and drops what is raised here
    time.sleep(20)


def test_an_interrupt_that_a_destructor_swallows_is_raised_again(capsys):
    with StopRequest(lambda note: None) as stop:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), stop.heard():
            swallowing()
        time.sleep(2 * AGAIN)  # once caught, it is not raised again
    assert capsys.readouterr().err == ""


def test_other_errors_in_a_destructor_are_reported_as_usual(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: reported.append(lost.exc_type))

    class Broken:
        def __del__(self):
            raise ValueError("broken")

    with StopRequest(lambda note: None):
        Broken()
    assert reported == [ValueError]
