"""The loop: each update once, in order, with everything that the plan has due after it."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from falconet.checkpoint.state import Progress
from falconet.errors import DataError, DivergedError, Interrupted, WorldError
from falconet.optim.schedules import Schedule
from falconet.parallel.shared_failure import FailedTogetherError
from falconet.parallel.world import ALONE, World
from falconet.train.loop import train
from falconet.train.metrics import NotFiniteError
from falconet.train.plan import Plan
from falconet.train.step import Update

EPOCHS, UPDATES = 3, 4


def plan(**changes):
    values = {
        "images": 8 * UPDATES,
        "micro_batch": 8,
        "accumulation": 1,
        "replicas": 1,
        "logs_per_epoch": 2,
        "validation_mode": "during",
        "validation_frequency": 2,
        "epochs_per_save": 0.75,
    }
    schedule = Schedule(kind="cosine", peak=0.1, epochs=EPOCHS, updates_per_epoch=UPDATES, warmup_epochs=1)
    return Plan(epochs=EPOCHS, schedule=schedule, **(values | changes))


class Story:
    """Step, data and watch in one: records what the loop does with each."""

    def __init__(
        self, *, stop_at=None, stop_in=None, fail_in=None, breaks=(), error=None, losses=(), world=ALONE, lags=False
    ):
        """`breaks`: what fails at which update, reading its images or making it.

        `lags`: the numbers of an epoch are on their way when it ends, as on a GPU.
        """
        self.events, self.progress, self.saved = [], Progress(), None
        self.stop_at, self.stop_in, self.fail_in, self.losses = stop_at, stop_in, fail_in, dict(losses)
        self.error, self.world, self.lags, self.late = error or DataError("bad"), world, lags, None
        self.breaks = breaks

    def updates_of(self, epoch, skip):
        for done in range(skip, UPDATES):
            self.may_break("reading", epoch * UPDATES + done)
            yield [("micro-batch", epoch, done)]

    def may_break(self, what, update):
        if (what, update + 1) == self.breaks:
            raise self.error

    def step(self, micro_batches, *, update, lr):
        self.may_break("making", update)
        self.events.append(("step", micro_batches, update, lr))
        loss = torch.tensor(self.losses.get(update + 1, 0.1 * update))
        return Update(loss, 0 * loss, torch.tensor(1), torch.tensor(8), torch.tensor(0))

    def log_point(self, meter):
        self.events.append(("log", self.progress.update, meter.end_interval()))

    def end_epoch(self, meter):
        meter.send()
        self.late = meter
        if not self.lags:
            self.catch_up()

    def catch_up(self):
        meter, self.late = self.late, None
        if meter:
            self.events.append(("end of epoch", self.progress.update, meter.end_epoch()))

    def validate(self):
        if self.progress.update == self.stop_in:
            return False
        if self.progress.update == self.fail_in:
            raise self.error
        self.events.append(("validate", self.progress.update))
        return True

    def save(self):
        self.events.append(("save", self.progress.update))
        self.saved = self.progress.to_json()

    def amend(self):
        self.events.append(("amend", self.progress.update))
        self.saved = self.progress.to_json()

    def stopping(self):
        return self.progress.update == self.stop_at

    def run(self, progress=None, **changes):
        self.progress = progress or Progress()
        watch = SimpleNamespace(
            log=SimpleNamespace(log=self.log_point, end_epoch=self.end_epoch, catch_up=self.catch_up),
            validation=SimpleNamespace(run=self.validate),
            saving=SimpleNamespace(save=self.save, amend=self.amend),
            stopping=self.stopping,
            ended=lambda: False,
        )
        train(plan(**changes), self.progress, self.step, updates_of=self.updates_of, watch=watch, world=self.world)
        return self

    def after(self, update):
        """What happened after an update, in order."""
        return [name for name, number, *_ in self.events if name != "step" and number == update]


def trained(story):
    """Everything but what was written."""
    return [entry for entry in story.events if entry[0] not in ("save", "amend")]


def test_every_update_runs_once_in_order_with_its_batches_and_rate():
    made = [rest for name, *rest in Story().run().events if name == "step"]
    assert made == [
        [[("micro-batch", update // UPDATES, update % UPDATES)], update, plan().lr(update)]
        for update in range(EPOCHS * UPDATES)
    ]


@pytest.mark.parametrize("in_a_row", [2, 3, 100])
def test_updates_in_a_row_change_nothing(in_a_row):
    assert Story().run(in_a_row=in_a_row).events == Story().run().events


@pytest.mark.parametrize(("asked", "stopped"), [(1, 2), (2, 2), (5, 6), (7, 8)])
def test_a_request_to_stop_is_heard_at_the_end_of_a_row(asked, stopped):
    """Rows of 100 end at log points and saves: after 2, 3, 4, 6, 8, ... updates."""
    story = Story()
    heard = []

    def stopping():
        heard.append(story.progress.update)
        return story.progress.update >= asked

    story.stopping = stopping
    with pytest.raises(Interrupted):
        story.run(in_a_row=100)
    assert (heard[-1], story.saved["update"]) == (stopped, stopped)


def test_everything_happens_after_the_update_that_the_plan_names():
    story = Story().run()
    assert {update: story.after(update) for update in range(13)} == {
        **{update: [] for update in range(13)},
        2: ["log"],
        3: ["save"],
        4: ["log", "end of epoch"],
        6: ["log", "save"],
        8: ["log", "end of epoch", "validate"],
        9: ["save"],
        10: ["log"],
        12: ["log", "end of epoch", "save", "validate", "amend"],
    }


RARE = {"log_interval": 5, "validation_frequency": 3, "epochs_per_save": 3}  # an epoch ends with nothing else due


def test_an_epoch_whose_numbers_are_on_their_way_is_told_after_the_next_update_was_started():
    at_once, late = Story().run(**RARE).events, Story(lags=True).run(**RARE).events
    names = [name for name, *_ in late]
    assert [event for event in late if event[0] != "step"] == [event for event in at_once if event[0] != "step"]
    assert [number for name, number, *_ in late if name == "end of epoch"] == [4, 8, 12]
    assert names[4:7] == ["step", "end of epoch", "log"]  # the fifth update, then the epoch before it
    assert names[-5:] == ["log", "end of epoch", "save", "validate", "amend"]


@pytest.mark.parametrize("due", [{"epochs_per_save": 1}, {"validation_frequency": 1}], ids=["a save", "a validation"])
def test_an_epoch_is_told_before_what_is_due_at_its_end(due):
    changes = RARE | due
    assert Story(lags=True).run(**changes).events == Story().run(**changes).events


@pytest.mark.parametrize("what", ["reading", "making"])
def test_an_epoch_whose_numbers_are_on_their_way_is_told_even_if_the_next_update_fails(what):
    story = Story(lags=True, breaks=(what, 5))
    with pytest.raises(DataError, match="bad"):
        story.run(**RARE)
    assert story.events[-1][:2] == ("end of epoch", 4)


def test_a_loss_that_was_not_finite_is_the_error_even_if_the_next_update_fails():
    with pytest.raises(NotFiniteError, match="update 4"):
        Story(lags=True, breaks=("reading", 5), losses={4: math.nan}).run(**RARE)


def test_a_device_that_fails_twice_is_told_of_once():
    story = Story(lags=True, breaks=("making", 5), error=RuntimeError("an illegal memory access"))

    def catch_up():
        if story.late:
            raise RuntimeError("still out of order")

    story.catch_up = catch_up
    with pytest.raises(RuntimeError, match="illegal"):
        story.run(**RARE)


@given(st.integers(1, EPOCHS * UPDATES))
def test_a_run_stopped_while_numbers_are_on_their_way_saves_all_of_them(stop_at):
    first = Story(lags=True, stop_at=stop_at)
    with pytest.raises(Interrupted):
        first.run(**RARE)
    assert first.late is None
    second = Story().run(Progress.from_json(first.saved), **RARE)
    told = [event for event in trained(first) + trained(second) if event[0] != "step"]
    assert told == [event for event in trained(Story().run(**RARE)) if event[0] != "step"]


def test_a_loss_that_is_not_finite_is_noticed_one_update_later_at_most_and_never_saved():
    story = Story(lags=True, losses={3: float("nan")})
    with pytest.raises(DivergedError, match=r"^update 3: the loss is nan$"):
        story.run(**RARE)
    assert (sum(name == "step" for name, *_ in story.events), story.progress.update, story.saved) == (5, 4, None)


def test_a_checkpoint_holds_the_totals_up_to_its_update():
    story = Story(stop_at=7)
    with pytest.raises(Interrupted):
        story.run()
    assert story.saved["update"] == 7
    assert (story.saved["interval"]["updates"], story.saved["epoch"]["updates"]) == (1, 3)


@given(st.integers(1, EPOCHS * UPDATES))
def test_a_stopped_and_restored_run_does_the_same_things(stop_at):
    straight = trained(Story().run())
    first = Story(stop_at=stop_at)
    with pytest.raises(Interrupted):
        first.run()
    assert first.events[-1] == ("save", stop_at)
    assert first.after(stop_at).count("save") == 1
    second = Story().run(Progress.from_json(first.saved))
    assert trained(first) + trained(second) == straight


@pytest.mark.parametrize("stop_in", [8, 12])
def test_an_unfinished_validation_runs_after_the_restore_and_its_checkpoint_is_saved_again(stop_in):
    straight = Story().run()
    first = Story(stop_in=stop_in)
    with pytest.raises(Interrupted):
        first.run()
    assert first.events[-1] == ("save", stop_in)
    assert first.saved["unvalidated"]
    second = Story().run(Progress.from_json(first.saved))
    left = straight.after(stop_in)
    assert second.after(stop_in) == left[left.index("end of epoch") + 1 :]
    assert trained(first) + trained(second) == trained(straight)
    assert second.saved == straight.saved


@pytest.mark.parametrize("fail_in", [8, 12], ids=["no save is due", "a save is due"])
def test_a_failed_validation_leaves_a_checkpoint_that_owes_it(fail_in):
    first = Story(fail_in=fail_in)
    with pytest.raises(DataError):
        first.run()
    assert first.events[-1] == ("save", fail_in)
    assert first.after(fail_in).count("save") == 1
    assert (first.saved["update"], first.saved["unvalidated"]) == (fail_in, True)
    second = Story().run(Progress.from_json(first.saved))
    assert trained(first) + trained(second) == trained(Story().run())


@pytest.mark.parametrize(
    ("error", "saves"),
    [(FailedTogetherError(DataError("bad")), 1), (RuntimeError("of one stage"), 0), (WorldError("a dead process"), 0)],
)
def test_of_several_processes_only_those_that_failed_together_save(error, saves):
    story = Story(fail_in=8, error=error, world=World(device=torch.device("cpu"), size=2))
    with pytest.raises(type(error)):
        story.run()
    assert story.after(8).count("save") == saves


def test_a_validation_interrupted_twice_is_still_due():
    first, second = Story(stop_in=8), Story(stop_in=8)
    with pytest.raises(Interrupted):
        first.run()
    with pytest.raises(Interrupted):
        second.run(Progress.from_json(first.saved))
    assert second.events == [("save", 8)]
    assert second.saved == first.saved


def test_progress_of_an_older_version_has_no_validation_due():
    stored = Progress(update=3).to_json()
    del stored["unvalidated"]
    assert Progress.from_json(stored) == Progress(update=3)


def test_a_finished_run_has_nothing_left_to_do():
    assert Story().run(Progress(update=EPOCHS * UPDATES)).events == []


@pytest.mark.parametrize(("bad", "seen_at"), [(1, 2), (2, 2), (3, 3), (5, 6), (7, 8)])
def test_a_loss_that_is_not_finite_stops_the_run_when_read_and_is_never_saved(bad, seen_at):
    story = Story(losses={bad: float("nan")})
    with pytest.raises(DivergedError, match=f"^update {bad}: the loss is nan$"):
        story.run()
    assert story.progress.update == seen_at
    assert story.saved is None or story.saved["update"] < bad
