"""The watch over the tests: who hangs is told, and nobody else."""

import time

import pytest

import watched


def hang():
    watched.WATCH.limit(0.05)  # here, where a failure is awaited: on a busy machine it comes before the next line
    time.sleep(60)


def test_one_that_hangs_is_told(capfd):
    with pytest.raises(pytest.fail.Exception, match="the test hangs"):
        hang()
    watched.WATCH.limit(watched.ALONE)
    assert "most recent call first" in capfd.readouterr().err


def test_one_that_sets_the_clock_does_not_hang(monkeypatch):
    with monkeypatch.context() as moved:
        moved.setattr(time, "monotonic", lambda: 0.0)
        watched.WATCH.limit(watched.ALONE)
    time.sleep(0.05)  # the other thread looks only now
