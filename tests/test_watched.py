"""The watch over the tests: who hangs is told, and nobody else."""

import time

import pytest

import watched


def test_one_that_hangs_is_told(capfd):
    watched.WATCH.limit(0.05)
    with pytest.raises(pytest.fail.Exception, match="the test hangs"):
        time.sleep(60)
    watched.WATCH.limit(watched.ALONE)
    assert "most recent call first" in capfd.readouterr().err


def test_one_that_sets_the_clock_does_not_hang(monkeypatch):
    with monkeypatch.context() as moved:
        moved.setattr(time, "monotonic", lambda: 0.0)
        watched.WATCH.limit(watched.ALONE)
    time.sleep(0.05)  # the other thread looks only now
