"""How far a run is, how long it will take, and how it ended."""

import pytest

from falconet.report.progress import left_in_words, progress_of, state_in_words
from falconet.report.run_files import EarlyEnd, Moment, RunFiles


def run_at(update, **more):
    moments = [Moment(each, each / 10, {"validation/seconds": 0.5}) for each in range(10, update + 1, 10)]
    content = {
        "name": "run",
        "state": "going",
        "plan": ["200 updates = 20 epochs x 10 updates; 640 images"],
        "moments": moments,
        "update_times": [100.0] * update,
        "written": 1000.0,
    }
    return RunFiles(**(content | more))


def test_the_time_left_has_updates_and_validations():
    found = progress_of(run_at(50), clock=lambda: 1000.0)
    assert (found.update, found.updates, found.epoch, found.epochs, found.share) == (50, 200, 5.0, 20.0, 0.25)
    assert found.seconds_left == pytest.approx(150 * 0.1 + 15 * 0.5)
    assert progress_of(run_at(50), clock=lambda: 1004.0).seconds_left == pytest.approx(150 * 0.1 + 15 * 0.5 - 4)
    assert progress_of(run_at(50), clock=lambda: 9000.0).seconds_left == 0.0


@pytest.mark.parametrize(
    ("plan", "updates", "epochs"),
    [
        (["1,200,000 updates = 1 epoch x 1,200,000 updates; 9 images"], 1_200_000, 1.0),
        (["25 updates = 2.5 epochs x 10 updates; 99 images; each epoch skips a different 9"], 25, 2.5),
        (
            ["10 updates = 1 epoch x 10 updates; 9 images", "phase 2", "8 updates = 2 epochs x 4 updates; 9 images"],
            18,
            3,
        ),
        (["an older plan"], None, None),
    ],
)
def test_the_plan_tells_how_long_a_run_is(plan, updates, epochs):
    found = progress_of(run_at(0, plan=plan))
    assert (found.updates, found.epochs) == (updates, epochs)


def test_updates_of_another_global_batch_count_as_they_were_made():
    """Three epochs of 22 updates, then of 11."""
    continued = run_at(0, plan=["55 updates = 5 epochs x 11 updates; 704 images"], moments=[Moment(66, 3.0, {})])
    found = progress_of(continued)
    assert (found.update, found.updates, found.epoch, found.epochs) == (66, 88, 3.0, 5.0)


def test_before_the_first_log_point_nothing_is_guessed():
    found = progress_of(run_at(0))
    assert (found.share, found.seconds_left) == (0.0, None)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_at(10), "under way"),
        (run_at(10, state="done"), "finished"),
        (run_at(10, state="done", summary={"ended_early": True}), "ended early"),
        (run_at(10, state="stopped", ending=EarlyEnd("interrupted")), "interrupted"),
        (run_at(10, state="stopped", ending=EarlyEnd("failed", "disk full")), "failed: disk full"),
        (run_at(10, state="stopped", ending=EarlyEnd("<evil>")), "no longer writing, stopped before its end"),
        (run_at(10, state="stopped"), "no longer writing, stopped before its end"),
        (run_at(10, state="going", ending=EarlyEnd("failed", "before it was restored")), "under way"),
    ],
)
def test_states_in_words(run, words):
    assert state_in_words(run)[0] == words


def test_a_guess_is_rounded():
    assert [left_in_words(each) for each in (0.0, 38.4, 434.0, 7500.0)] == [
        "about 0s left",
        "about 38s left",
        "about 7m10s left",
        "about 2h05m left",
    ]
