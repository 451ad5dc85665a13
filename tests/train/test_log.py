"""What happens around the updates: log points, validations, checkpoints, and the last good one."""

import io
import os
import threading

import pytest
import torch
from rich.console import Console
from torch import nn

from falconet.checkpoint import format
from falconet.checkpoint.state import Progress, TrainState
from falconet.checkpoint.writer import Writer
from falconet.config.options import Optimizer
from falconet.errors import CheckpointError
from falconet.optim.ema import Ema
from falconet.optim.optimizers import build_optimizer
from falconet.optim.schedules import Schedule
from falconet.report.console import Screen
from falconet.report.styles import Falconet, RunLog
from falconet.report.throughput import Stopwatch
from falconet.train.evaluate import Evaluation, Validation
from falconet.train.log import Log, Output
from falconet.train.metrics import Measurements, Meter, NotFiniteError
from falconet.train.plan import Plan
from falconet.train.save import Identity, Saving
from falconet.train.step import Update

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
            style=Falconet(RunLog(screen.line, None)),
            measurements=Measurements(self.notes, update=update),
            stopwatch=Stopwatch(self.clock),
        )
        self.output = output
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

    def train(self, *losses, seconds=1.0):
        for loss in losses:
            self.clock.now += seconds
            self.meter.add(Update(torch.tensor(loss), torch.tensor(2), torch.tensor(8), torch.tensor(0)))
            self.progress.update += 1
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


def test_an_epoch_ends_with_the_lines_that_the_originals_tools_read(desk):
    at = desk()
    at.train(1.0, 2.0, 3.0, 4.0, seconds=0.5)
    at.log.end_epoch(at.meter)
    assert at.text.getvalue().splitlines() == [
        "Epoch 1/5",
        "loss: 2.5000,",
        "accuracy: 25.00 %",
        "throughput: 16.0 samples/sec",
    ]
    assert at.log.whole_run().images_per_second == 16.0


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
    assert "throughput: 8.0 samples/sec" in at.text.getvalue()


def test_throughput_of_a_restored_run_excludes_images_trained_before(desk):
    first = desk()
    first.train(1.0, 1.0, 1.0)
    at = desk(progress=Progress.from_json(first.progress.to_json()))
    at.train(1.0)
    at.log.log(at.meter)
    at.log.end_epoch(at.meter)
    assert at.notes[-1][1]["train/images_per_second"] == 8.0
    assert "throughput: 8.0 samples/sec" in at.text.getvalue()
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
    assert at.output.measurements.best == (90.0, 2)  # of two equal ones the earlier
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
    assert at.text.getvalue().splitlines()[:2] == ["Accuracy on test set: 75.00%", "Accuracy on test set: 90.00%"]


def test_the_moving_average_is_validated_too_and_may_be_the_best(desk):
    at = desk(ema=True)
    at.accuracies = [found(100), found(120)]
    at.train(1.0)
    at.validation.run()
    assert at.output.measurements.best == (60.0, 1)
    assert at.notes[0][1]["validation_ema/accuracy"] == 60.0
    assert at.notes[0][1]["validation/accuracy"] == 50.0
    assert "Accuracy on test set of the moving average: 60.00%" in at.text.getvalue()


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
    assert second.content["best"] == [75.0, 2]
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


def test_a_failed_save_is_reported_at_the_next_one_and_the_run_continues(desk, monkeypatch):
    at, tried = desk(), threading.Event()

    def no_space(descriptor):
        tried.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        at.saving.save()
        with pytest.raises(CheckpointError, match="No space left on device"):
            at.saving.finish()
        tried.clear()
        at.saving.save()
        assert tried.wait(LIMIT)
    at.train(1.0)
    at.saving.save()
    at.saving.finish()
    assert at.text.getvalue().count("No space left on device; the run continues and will save again") == 1
    assert [format.verify(folder).progress.update for folder in format.checkpoints_in(at.saving.folder)] == [1]


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
    at.validation.average("averaged", suffix="")
    assert at.notes[0][1]["validation_averaged/accuracy"] == 80.0
    assert at.text.getvalue() == "Accuracy on test set of the averaged checkpoints: 80.00%\n"
    assert at.output.measurements.best is None
