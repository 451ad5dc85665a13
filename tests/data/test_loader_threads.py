"""Jobs on threads: in order, bounded, and ended when they are no longer needed."""

import threading
import time
from concurrent.futures import Future

import pytest

from falconet.data.loader import in_order


class Square:
    """A job with two parts, which notes when it is started."""

    def __init__(self, number, started=None, fails=False):
        if started is not None:
            started.append(number)
        self.number, self.done, self.fails = number, [], fails

    def parts(self):
        return [(0, 1), (1, 2)]

    def do(self, part):
        if self.fails:
            raise FileNotFoundError("the job's error")
        time.sleep(0.002 * (self.number % 3))  # later jobs finish first
        self.done.append(part)

    def result(self):
        assert len(self.done) == 2
        return self.number**2


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("falconet-data")]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_order(workers):
    assert list(in_order(map(Square, range(20)), workers=workers, ahead=8)) == [number**2 for number in range(20)]
    assert data_threads() == []


@pytest.mark.parametrize(("workers", "most"), [(0, 1), (1, 4), (3, 4)])
def test_no_more_jobs_are_started_than_allowed(workers, most):
    started = []
    results = in_order((Square(number, started) for number in range(100)), workers=workers, ahead=6)
    next(results)
    assert len(started) == most
    next(results)
    assert len(started) == most + 1
    results.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_unchanged_and_ends_the_threads(workers):
    results = in_order((Square(number, fails=number == 3) for number in range(20)), workers=workers, ahead=8)
    given = [next(results) for _ in range(3)]
    with pytest.raises(FileNotFoundError, match="the job's error"):
        next(results)
    assert given == [0, 1, 4]
    assert data_threads() == []


def test_leaving_early_ends_the_threads():
    results = in_order(map(Square, range(1000)), workers=3, ahead=12)
    assert next(results) == 0
    threads = data_threads()
    assert threads
    del results  # what a loop does that is left by a break
    for thread in threads:
        thread.join(timeout=60)
    assert data_threads() == []


class Rows:
    """A job with several parts of two rows, which notes those that are done."""

    def __init__(self, number, done, parts=4):
        self.number, self.own, self.all = number, [(2 * part, 2 * part + 2) for part in range(parts)], done

    def parts(self):
        return self.own

    def do(self, part):
        self.all.append((self.number, part))

    def result(self):
        return [part for number, part in list(self.all) if number == self.number]


@pytest.mark.parametrize(("ahead", "parts"), [(0, 0), (1, 0), (2, 1), (5, 2), (8, 4), (13, 6)])
def test_rows_beyond_the_job_handed_over_are_bounded_within_a_job_too(ahead, parts, monkeypatch):
    """An executor that does work at once shows everything that threads were given, without waiting."""

    class AtOnce:
        def __init__(self, workers, **names):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def submit(self, do, part):
            do(part)
            done_at_once = Future()
            done_at_once.set_result(None)
            return done_at_once

        def shutdown(self, **how):
            pass

    monkeypatch.setattr("falconet.data.loader.ThreadPoolExecutor", AtOnce)
    done = []
    results = in_order((Rows(number, done) for number in range(50)), workers=2, ahead=ahead)
    for number in range(3):
        assert sorted(next(results)) == [(0, 2), (2, 4), (4, 6), (6, 8)]
        assert len(done) == 4 * (number + 1) + parts
    results.close()


def test_jobs_without_rows_are_handed_over_too():
    done = []
    jobs = [Rows(0, done), Rows(1, done, parts=0), Rows(2, done)]
    assert [len(result) for result in in_order(jobs, workers=2, ahead=4)] == [4, 0, 4]
