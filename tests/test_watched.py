"""The time limit of tests interrupts a hanging test, and no other."""

import time

import pytest

import watched


def hang():
    watched.WATCH.limit(0.05)  # set here: on a busy machine the interruption may come before the next line
    time.sleep(60)


def test_a_hanging_test_fails_with_its_stack(capfd):
    with pytest.raises(pytest.fail.Exception, match="the test hangs"):
        hang()
    watched.WATCH.limit(watched.ALONE)
    assert "most recent call first" in capfd.readouterr().err


def test_a_test_that_replaces_the_clock_is_interrupted_in_time(monkeypatch):
    with monkeypatch.context() as moved:
        moved.setattr(time, "monotonic", lambda: 0.0)
        with pytest.raises(pytest.fail.Exception, match="the test hangs"):
            hang()
        watched.WATCH.limit(watched.ALONE)
