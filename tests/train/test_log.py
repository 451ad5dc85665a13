"""What happens around the updates: log points, validations, checkpoints, and the last good one."""

import io
import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from falconet.checkpoint import disk, format
from falconet.checkpoint.state import Progress, TrainState
from falconet.checkpoint.writer import Writer
from falconet.config.options import Optimizer
from falconet.errors import CheckpointError, DiskError, UnsavedError
from falconet.evaluation.evaluate import Evaluation
from falconet.optim.ema import Ema
from falconet.optim.optimizers import build_optimizer
from falconet.optim.schedules import Schedule
from falconet.parallel.world import ALONE, World
from falconet.report.console import Screen
from falconet.report.styles import Facts, Falconet, Origin, RunLog
from falconet.report.throughput import Stopwatch
from falconet.train import save
from falconet.train.log import Log, Output
from falconet.train.metrics import Measurements, Meter, NotFiniteError
from falconet.train.plan import Plan
from falconet.train.save import Identity, Saving
from falconet.train.step import Update
from falconet.train.validation import Validation
from runs import assert_bitwise
from tiny import TINY

LIMIT = 300  # seconds; a save takes milliseconds
UPDATES = 4  # in an epoch, of 8 images
PLAN = Plan(
    epochs=5,
    images=32,
    micro_batch=8,
    accumulation=1,
    replicas=1,
    schedule=Schedule(kind="polynomial", peak=0.8, epochs=5, updates_per_epoch=UPDATES, power=1.0, end_ratio=0.0),
    logs_per_epoch=2,
    validation_mode="during",
    validation_frequency=1,
    epochs_per_save=1.0,
)
FACTS = Facts(
    options={},
    folder=Path("r"),
    model="",
    parameters=9,
    global_batch=8,
    replicas=1,
    stages=1,
    image_size=8,
    epochs=PLAN.epochs,
)


class Clock:
    """Moves only when it is set."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Notes(list):
    """A sink."""

    def write(self, update, metrics):
        self.append((update, dict(metrics)))

    def close(self):
        pass


class Desk:
    """Log, validation and saving of one run, driven as the loop drives them."""

    def __init__(self, folder, writer, *, update=0, ema=False, **changes):
        model = nn.Linear(2, 3)
        state = TrainState(model, build_optimizer(model, Optimizer(optimizer="sgd")), Progress(update=update))
        state.ema = Ema(model, 0.5) if ema else None
        self.clock, self.notes, self.text, self.accuracies = Clock(), Notes(), io.StringIO(), []
        self.progress = changes.pop("progress", state.progress)
        state.progress = self.progress
        screen = Screen(Console(file=self.text, soft_wrap=True))
        output = Output(
            screen=screen,
            style=Falconet(RunLog(screen.line, None), clock=self.clock),
            measurements=Measurements(self.notes, update=update),
            stopwatch=Stopwatch(self.clock),
        )
        self.output = output
        output.style.begin(replace(FACTS, averages=ema))
        self.text.seek(0)
        self.text.truncate()
        self.log = Log(plan=PLAN, state=state, output=output)
        self.saving = Saving(
            plan=PLAN,
            state=state,
            output=output,
            identity=Identity(model="timm:a/b c", data="digits", classes=3, content={"class_names": ["x", "y", "z"]}),
            folder=folder,
            kept=changes.pop("kept", None),
            writer=writer,
            last=changes.pop("last_saved", None),
        )
        self.validation = Validation(
            plan=PLAN,
            state=state,
            output=output,
            measure=lambda model, stopping: self.accuracies.pop(0),
            batch=8,
            checkpoint_name=self.saving.name,
        )
        self.meter = Meter(self.progress)

    @property
    def rows(self):
        """The cells of each epoch."""
        return [line.split() for line in self.text.getvalue().splitlines() if "/" in line and "images" not in line]

    def train(self, *losses, seconds=1.0, read=True):
        for loss in losses:
            self.clock.now += seconds
            self.meter.add(
                Update(torch.tensor(loss), torch.tensor(0.0), torch.tensor(2), torch.tensor(8), torch.tensor(0))
            )
            self.progress.update += 1
        if read:
            self.meter.read()

    def save(self, *, until):
        """Train up to an update and save there."""
        self.train(*[0.5] * (until - self.progress.update))
        self.saving.save()
        self.saving.writer.wait()
        return self.saving.last


@pytest.fixture
def desk(tmp_path):
    writers = []

    def make(**changes):
        writers.append(Writer())
        return Desk(tmp_path / "checkpoints", writers[-1], **changes)

    yield make
    for writer in writers:
        writer.close()


def found(top1, *, images=200, loss=1.5):
    return Evaluation(images, top1, min(images, top1 + 20), loss)


def test_a_log_point_has_the_numbers_of_the_updates_since_the_last(desk):
    at = desk()
    at.train(9.0, 9.0)
    at.log.log(at.meter)
    at.train(1.0, 2.0, 6.0, seconds=2.0)
    at.log.log(at.meter)
    update, metrics = at.notes[-1]
    assert update == 5
    assert metrics == {
        "epoch": 1.25,
        "train/loss": 3.0,
        "train/accuracy": 25.0,
        "train/lr": pytest.approx(0.8 * (1 - 4 / 20)),  # of the fifth update, which starts after four
        "train/images_per_second": 4.0,
        "train/waiting_percent": 0.0,
    }


def test_an_epoch_is_a_row_with_its_numbers_and_those_of_its_validation(desk):
    at = desk()
    at.accuracies = [found(150)]
    at.train(1.0, 2.0, 3.0, 4.0, seconds=0.5)
    at.log.end_epoch(at.meter)
    assert at.rows == []
    at.validation.run()
    assert at.rows == [["1/5", "2.5000", "25.00%", "1.5000", "75.00%", "0.68", "16", "2.0s", "*"]]
    assert at.log.whole_run().images_per_second == 16.0


def test_an_epoch_whose_numbers_are_on_their_way_is_reported_later_and_the_same(desk):
    rows = []
    for world in (ALONE, World(device=torch.device("meta"))):
        at = desk()
        at.meter = Meter(at.progress, world)
        at.train(1.0, 2.0, 3.0, 4.0, seconds=0.5, read=False)
        at.log.end_epoch(at.meter)
        assert bool(at.output.measurements.for_checkpoint(UPDATES)["metrics"]) == (world is ALONE)
        at.clock.now += 0.125  # the next update is on its way
        at.log.catch_up()
        assert at.log.whole_run().images == 32
        at.validation.measure = lambda *_: found(100)
        at.validation.run()
        rows.append((at.rows[0][:8], at.output.measurements.for_checkpoint(UPDATES)["metrics"]["train_loss"]))
    assert rows[0] == rows[1]
    assert rows[0][0][6] == "16"  # images per second, of two seconds


def test_an_epoch_whose_numbers_cannot_be_sent_is_not_reported(desk):
    class Full(World):
        def sum(self, values):
            raise torch.OutOfMemoryError("CUDA out of memory")

    at = desk()
    at.meter = Meter(at.progress, Full(device=torch.device("meta")))
    at.train(1.0, 2.0, 3.0, 4.0, read=False)
    with pytest.raises(torch.OutOfMemoryError):
        at.log.end_epoch(at.meter)
    at.log.catch_up()
    assert at.rows == []


def test_the_time_of_an_epoch_ends_where_the_device_ended_it(desk):
    class Device:
        """Takes a second for each update, all of which the host launches at once."""

        busy_until = 0.0

        def mark(self):
            return max(self.busy_until, at.clock())

        def reach(self, mark):
            at.clock.now = max(at.clock(), mark)

        def between(self, first, second):
            return second - first

    at, device = desk(), Device()
    output = replace(at.output, stopwatch=Stopwatch(at.clock, device))
    at.log = Log(plan=replace(PLAN, validation_frequency=9), state=at.log.state, output=output)
    at.meter = Meter(at.progress, World(device=torch.device("meta")))
    for _ in range(3):
        device.busy_until += UPDATES
        at.train(1.0, 1.0, 1.0, 1.0, seconds=0.0, read=False)
        at.log.end_epoch(at.meter)
        at.log.catch_up()
    assert [row[-2:] for row in at.rows] == [["8.0", "4.0s"]] * 3  # images per second, time


def test_the_line_of_an_epoch_comes_before_that_of_the_next_one(desk):
    at, told = desk(), []
    at.log.output = replace(
        at.output,
        style=SimpleNamespace(
            begin_epoch=lambda epoch, of: told.append(f"begins {epoch}"),
            end_epoch=lambda point: told.append(f"ends {point.epoch:g}"),
        ),
    )
    at.meter = Meter(at.progress, World(device=torch.device("meta")))
    at.log.begin_epoch(0)
    at.train(1.0, 1.0, 1.0, 1.0, read=False)
    at.log.end_epoch(at.meter)
    at.log.begin_epoch(1)
    assert told == ["begins 1"]
    at.log.catch_up()
    at.log.begin_epoch(2)
    assert told == ["begins 1", "ends 1", "begins 2", "begins 3"]


def test_a_run_whose_numbers_come_later_writes_the_same(falconet, monkeypatch):
    line = f"train {TINY} --log-interval 1000 --checkpoint-save-freq 2 --validation-mode after --ema-half-life 1"
    answers, plain, late = [falconet(f"{line} --run-dir at-once")], Meter.send, []

    def send(meter):
        plain(meter)
        late.append(bool(meter._sent))
        return late[-1]

    monkeypatch.setattr(Meter, "send", send)
    answers.append(falconet(f"{line} --run-dir late"))
    assert late.count(True) >= 2
    assert_bitwise(Path("at-once"), Path("late"))
    rows = [re.findall(r"^ +(\d/\d +\S+ +\S+)", answer.out, re.MULTILINE) for answer in answers]
    assert len(rows[0]) >= 2
    assert rows[0] == rows[1]


def test_validating_and_saving_do_not_count_as_training_time(desk):
    at = desk()
    at.accuracies = [found(100)]

    def slowly(model, stopping):
        at.clock.now += 50.0
        return found(100)

    at.validation.measure = slowly
    at.train(1.0, 1.0)
    at.validation.run()
    at.saving.save()
    at.train(1.0, 1.0)
    at.log.end_epoch(at.meter)
    at.output.style.stopped()
    assert at.rows[-1][6] == "8.0"


def test_throughput_of_a_restored_run_excludes_images_trained_before(desk):
    first = desk()
    first.train(1.0, 1.0, 1.0)
    at = desk(progress=Progress.from_json(first.progress.to_json()))
    at.train(1.0)
    at.log.log(at.meter)
    at.log.end_epoch(at.meter)
    assert at.notes[-1][1]["train/images_per_second"] == 8.0
    at.output.style.stopped()
    assert at.rows[-1][6] == "8.0"
    assert at.log.whole_run().images == 8
    at.train(1.0, 1.0, 1.0, 1.0)
    at.log.end_epoch(at.meter)
    assert at.log.whole_run().images == 40


def test_a_validation_is_written_printed_and_compared_with_the_best(desk):
    at = desk()
    at.accuracies = [found(150), found(180), found(180), found(170)]
    for _ in range(4):
        at.train(1.0)
        at.validation.run()
    assert at.output.measurements.best == (90.0, 2, 1.5, 2 / UPDATES)  # of two equal ones the earlier
    assert at.notes[0] == (
        1,
        {
            "validation/accuracy": 75.0,
            "validation/top5_accuracy": 85.0,
            "validation/loss": 1.5,
            "validation/images": 200,
            "validation/seconds": 0.0,  # the clock did not move
        },
    )
    assert [(row[4], row[-1] == "*") for row in at.rows] == [
        ("75.00%", True),
        ("90.00%", True),
        ("90.00%", False),
        ("85.00%", False),
    ]


def test_of_equally_accurate_validations_the_lowest_loss_is_the_best(desk):
    at = desk()
    at.accuracies = [found(200, loss=loss) for loss in (0.5, 0.1, 0.2, float("nan"))] + [found(199, loss=0.01)]
    marked = []
    for _ in range(5):
        at.train(1.0)
        at.validation.run()
        marked.append(at.rows[-1][-1] == "*")
    assert marked == [True, True, False, False, False]
    assert at.output.measurements.best == (100.0, 2, 0.1, 2 / UPDATES)


def test_a_moving_average_that_is_as_accurate_counts_with_its_lower_loss(desk):
    at = desk(ema=True)
    at.accuracies = [found(200, loss=0.5), found(200, loss=0.3)]
    at.train(1.0)
    at.validation.run()
    assert at.output.measurements.best == (100.0, 1, 0.3, 1 / UPDATES)
    at.saving.save()
    assert format.verify(at.saving.finish()).better_stem == "ema"


def test_the_moving_average_is_validated_too_and_may_be_the_best(desk):
    at = desk(ema=True)
    at.accuracies = [found(100), found(120)]
    at.train(1.0)
    at.validation.run()
    assert at.output.measurements.best == (60.0, 1, 1.5, 1 / UPDATES)
    assert at.notes[0][1]["validation_ema/accuracy"] == 60.0
    assert at.notes[0][1]["validation/accuracy"] == 50.0
    assert at.rows[0][4:6] == ["50.00%", "60.00%"]
    assert at.rows[0][-1] == "*"


WARNING = (
    "loss is nan because the model's outputs are not finite;"
    " the usual causes are batch norm's running statistics and a 16-bit --precision"
)


def test_a_validation_loss_that_is_not_finite_gives_a_warning(desk):
    at = desk(ema=True)
    at.accuracies += [Evaluation(10, 1, 5, float("nan")), Evaluation(10, 2, 5, 1.5)]
    at.validation.run()
    assert at.text.getvalue().count("warning: ") == 1
    assert f"warning: validation {WARNING}\n" in at.text.getvalue()
    at.accuracies += [Evaluation(10, 1, 5, 1.0), Evaluation(10, 2, 5, float("nan"))]
    at.validation.run()
    assert f"warning: the moving average's validation {WARNING}\n" in at.text.getvalue()
    at.saving.save()
    assert format.verify(at.saving.finish()).progress.update == 0


def test_a_finite_validation_loss_gives_no_warning(desk):
    at = desk()
    at.accuracies += [Evaluation(10, 1, 5, 1e30)]
    at.validation.run()
    assert "warning" not in at.text.getvalue()


def test_a_checkpoint_stores_progress_totals_and_metrics_of_its_update_only(desk):
    at = desk()
    at.accuracies = [found(150)]
    at.train(1.0, 2.0)
    at.log.log(at.meter)
    at.validation.run()
    at.saving.save()
    at.train(4.0)
    at.saving.save()
    at.saving.finish()
    first, second = (format.verify(folder) for folder in format.checkpoints_in(at.saving.folder))
    assert (first.progress.epoch, first.progress.images, first.progress.update) == (0, 16, 2)
    assert first.metrics["validation_accuracy"] == first.metrics["score"] == 75.0
    assert first.metrics["train_loss"] == 1.5
    assert second.metrics == {}
    assert second.content["best"] == [75.0, 2, 1.5, 2 / UPDATES]
    assert Progress.from_json(second.meter) == at.progress
    assert second.class_names == ("x", "y", "z")


NAMES = {(0, 3): "timm-a-b-c_digits_0+00003", (7, 0): "timm-a-b-c_digits_7", (12, 12345): "timm-a-b-c_digits_12+12345"}


@pytest.mark.parametrize(("place", "name"), NAMES.items())
def test_a_checkpoint_is_named_after_model_data_and_progress(desk, place, name):
    assert desk().saving.identity.checkpoint_name(*place) == name


def test_the_newest_and_the_best_checkpoints_are_kept(desk):
    at = desk(kept=1)
    at.accuracies = [found(100), found(150), found(120), found(130)]
    for _ in range(4):
        at.train(*[1.0] * UPDATES)
        at.validation.run()
        at.saving.save()
    at.saving.finish()
    assert [folder.name[-1] for folder in format.checkpoints_in(at.saving.folder)] == ["2", "4"]


@pytest.fixture
def hurried(monkeypatch):
    """Pauses of hundredths of a second, and no more than two in all."""
    for name, seconds in {"SHORTEST": 0.01, "LONGEST": 0.01, "GLANCE": 0.005, "PATIENCE": 60.0}.items():
        monkeypatch.setattr(save, name, seconds)


class Disk:
    """A disk that is full until the run has tried to find room `tries` times."""

    def __init__(self, monkeypatch, *, tries):
        self.tries, self.plain, self.failed = tries, os.fsync, threading.Event()
        monkeypatch.setattr(os, "fsync", self.sync)
        monkeypatch.setattr(disk, "reserve", self.reserve)

    def sync(self, descriptor):
        if self.tries:
            self.failed.set()
            raise OSError(28, "No space left on device")
        self.plain(descriptor)

    def reserve(self, folder, count):
        if self.tries:
            self.tries -= 1
        if self.tries:
            raise OSError(28, "No space left on device")


def updates_saved(at):
    folders = format.checkpoints_in(at.saving.folder) if at.saving.folder.exists() else []
    return [format.verify(folder).progress.update for folder in folders]


def test_after_the_second_failed_save_the_run_pauses_until_there_is_room(desk, monkeypatch, hurried):
    at = desk()
    first = at.save(until=1)
    Disk(monkeypatch, tries=4)
    at.train(1.0)
    at.saving.save()  # fails in the background
    at.train(1.0)
    assert at.text.getvalue() == ""
    at.saving.save()  # returns only when it is saved
    assert updates_saved(at) == [1, 3]
    warning, pause, end = at.text.getvalue().splitlines()
    assert (
        warning
        == f"warning: cannot save {first.parent}/timm-a-b-c_digits_0+00002: No space left on device; saving again"
    )
    assert pause.endswith("_0+00003: No space left on device; paused, and trying again for up to 1 minutes")
    assert end == f"saved {at.saving.last}; the run continues"


def test_one_failed_save_is_reported_and_the_run_continues(desk, monkeypatch, hurried):
    at = desk()
    disk_ = Disk(monkeypatch, tries=1)
    at.saving.save()
    assert disk_.failed.wait(60)
    disk_.tries = 0
    at.train(1.0)
    at.saving.save()
    assert at.text.getvalue().count("\n") == 1
    assert updates_saved(at) == [1]


def test_a_failed_last_save_is_tried_again(desk, monkeypatch, hurried):
    at = desk()
    Disk(monkeypatch, tries=2)
    at.train(1.0)
    at.saving.save()
    assert at.saving.finish() == at.saving.last
    assert updates_saved(at) == [1]


def test_a_paused_run_gives_up_and_names_the_newest_whole_checkpoint(desk, monkeypatch, hurried):
    at = desk()
    first = at.save(until=1)
    Disk(monkeypatch, tries=10**9)
    monkeypatch.setattr(save, "PATIENCE", 0.05)
    at.train(1.0)
    at.saving.save()
    with pytest.raises(
        UnsavedError,
        match=f"No space left.*; gave up after .*; the newest whole checkpoint is {re.escape(str(first))}$",
    ) as found:
        at.saving.finish()
    assert found.value.code == 1
    assert updates_saved(at) == [1]


def test_a_paused_run_can_be_stopped(desk, monkeypatch, hurried):
    at = desk()
    Disk(monkeypatch, tries=10**9)
    at.saving.stopping = lambda: "paused" in at.text.getvalue()
    at.train(1.0)
    at.saving.save()
    with pytest.raises(KeyboardInterrupt):
        at.saving.finish()


def test_what_a_validation_finds_is_added_to_a_checkpoint_already_written(desk):
    at = desk(kept=1)
    at.accuracies = [found(150), found(100)]
    for update in (UPDATES, 2 * UPDATES):
        at.train(*[1.0] * (update - at.progress.update))
        at.progress.unvalidated = True
        at.saving.save()
        at.saving.writer.wait()
        early = format.verify(at.saving.last)
        assert (early.metrics, early.meter["unvalidated"]) == ({}, True)
        at.progress.unvalidated = not at.validation.run()
        at.saving.amend()
        late = format.verify(at.saving.finish())
        assert late.files == early.files
        assert late.meter["unvalidated"] is False
    assert late.metrics["validation_accuracy"] == late.metrics["score"] == 50.0
    assert late.content["best"] == [75.0, UPDATES, 1.5, 1.0]
    assert updates_saved(at) == [UPDATES, 2 * UPDATES]  # the best and the newest


def test_a_killed_amendment_leaves_the_checkpoint_whole(desk, monkeypatch):
    at = desk()
    at.save(until=1)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    at.saving.amend()
    with pytest.raises(CheckpointError, match="No space left on device"):
        at.saving.writer.wait()
    assert updates_saved(at) == [1]
    assert len(list(at.saving.folder.iterdir())) == 1


def test_training_does_not_start_without_room_for_a_checkpoint(desk, file_limit, monkeypatch):
    at = desk()
    at.saving.folder.mkdir()
    at.saving.check_room()
    assert list(at.saving.folder.iterdir()) == []
    file_limit(4096)
    with pytest.raises(
        DiskError, match=r"checkpoints: no room for a checkpoint of 0\.1 MB \(File too large\); raise the limit"
    ):
        at.saving.check_room()
    file_limit(None)
    monkeypatch.setattr(save, "MANIFEST_BYTES", 1 << 60)
    with pytest.raises(DiskError, match="No space left on device"):
        at.saving.check_room()
    assert list(at.saving.folder.iterdir()) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop", "lars"])
def test_the_size_of_a_checkpoint_is_known_before_the_first_update(optimizer):
    model = nn.Linear(200, 300)
    state = TrainState(model, build_optimizer(model, Optimizer(optimizer=optimizer, momentum=0.9)))
    expected = sum(state.saved_bytes().values())
    model(torch.ones(1, 200)).sum().backward()
    state.optimizer.step()
    after = sum(t.numel() * t.element_size() for group in state.tensors().values() for t in group.values())
    assert sum(state.saved_bytes().values()) == after
    assert expected == pytest.approx(after, abs=100)  # counts of updates


def test_the_last_good_checkpoint_is_the_newest_whose_weights_gave_a_finite_loss(desk):
    # The loss of update 5 is measured with the weights that update 4 left, so a checkpoint of those is not good.
    at = desk()
    second, fourth = at.save(until=2), at.save(until=4)
    assert f"; the last good checkpoint is {second}; a smaller --lr" in str(at.saving.diverged(NotFiniteError(5, 1.0)))
    message = str(at.saving.diverged(NotFiniteError(6, float("nan"))))
    assert message.startswith(f"update 6: the loss is nan; the last good checkpoint is {fourth}; ")
    assert "there is no earlier good checkpoint" in str(at.saving.diverged(NotFiniteError(3, 1.0)))


def test_a_removed_checkpoint_is_not_called_the_last_good_one(desk):
    at = desk(kept=1)
    at.save(until=2)
    at.save(until=4)
    assert "there is no earlier good checkpoint" in str(at.saving.diverged(NotFiniteError(5, 1.0)))


def test_the_restored_checkpoint_is_good_after_one_good_update(desk, tmp_path):
    restored = tmp_path / "elsewhere"
    restored.mkdir()
    at = desk(update=8, last_saved=restored)
    assert f"the last good checkpoint is {restored};" in str(at.saving.diverged(NotFiniteError(10, 1.0)))
    assert "there is no earlier good checkpoint" in str(at.saving.diverged(NotFiniteError(9, 1.0)))


def test_the_average_of_checkpoints_has_separate_metrics(desk):
    at = desk()
    at.accuracies = [found(160)]
    at.validation.average("averaged", suffix="", origin=Origin(model="net", data="noise", loss=None, accuracy=None))
    assert at.notes[0][1]["validation_averaged/accuracy"] == 80.0
    assert at.text.getvalue().splitlines()[-1] == "accuracy of the averaged checkpoints: 80.00%"
    assert at.output.measurements.best is None


@pytest.mark.parametrize("mode", ["after", "during", "none"])
def test_a_summary_says_what_the_seconds_went_into(falconet, mode):
    assert falconet(f"train {TINY} --validation-mode {mode} --run-dir run").code == 0
    summary = json.loads(Path("run/summary.json").read_text())
    seconds = summary["seconds"]
    assert seconds["counted"] == pytest.approx(
        seconds["training"] - seconds["preparation"] + seconds["validation"], abs=2e-4
    )
    assert seconds["preparation"] == 0  # nothing is captured on a CPU
    assert seconds["training"] == pytest.approx(summary["training_seconds"], abs=0.06)
    last = summary["metrics"].get("validation/seconds", 0.0)
    assert seconds["validation"] >= last * 0.999 - 1e-4
    assert (seconds["validation"] > 0) == (mode != "none")
