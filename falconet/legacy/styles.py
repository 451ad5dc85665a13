"""The lines, CSV files and checkpoint names of the three originals."""

import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from falconet.report.styles import Facts, Falconet, Origin, Point, RunLog, Style, Validated


class Recent:
    """Means over the last epoch's worth of updates."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float, float]] = deque()  # updates, loss, accuracy
        self._last = 0

    def add(self, point: Point) -> tuple[float, float]:
        """Mean loss and accuracy with this point."""
        before = self._last if self._last < point.update else 0
        self._points.append((max(1, point.update - before), point.loss, point.accuracy))
        self._last = point.update
        while sum(updates for updates, *_ in self._points) - self._points[0][0] >= point.updates_per_epoch:
            self._points.popleft()
        total = sum(updates for updates, *_ in self._points)
        loss = sum(updates * loss for updates, loss, _ in self._points) / total
        return loss, sum(updates * accuracy for updates, _, accuracy in self._points) / total


class PyTorch:
    """`[INFO]` lines, training.csv, validation.csv, app.json and log.txt."""

    def __init__(self, log: RunLog) -> None:
        self.to, self._recent = log, Recent()
        self._options: Mapping[str, object] = {}
        self._lr: float | None = None
        self._images, self._seconds = 0, 0.0  # of the epoch so far
        self._row: tuple[int, dict[str, object]] = (-1, {})  # the last one of training.csv, and its update

    def begin(self, facts: Facts) -> None:
        self._options = facts.options
        self.to.json("app.json", {name.replace("-", "_"): value for name, value in facts.options.items()})
        self._say(f"Total replicas: {facts.replicas}")
        self._say(f"Global batch size: {facts.global_batch}")
        self._say(f"Number of IPUs required: {facts.replicas * facts.stages}")  # devices, in its words
        self._say(facts.model)
        self._say(f"Total parameters: {facts.parameters}")
        self._say(f"Training the model. Start: {datetime.now()}")

    def begin_epoch(self, epoch: int, of: int) -> None:
        self._say(f"Epoch {epoch}/{of}")

    def log(self, point: Point) -> None:
        if self._options.get("lr-schedule") == "step" and self._lr not in (None, point.lr):
            self._say(f"Learning rate is changed to {point.lr:g}")
        self._lr = point.lr
        loss, accuracy = self._recent.add(point)
        self._images, self._seconds = self._images + point.rate.images, self._seconds + point.rate.seconds
        # A smoothed loss is computed in one piece here; its two parts are not known.
        is_smoothed = float(str(self._options.get("label-smoothing", 0))) > 0
        row: dict[str, object] = {
            "loss_avg": loss,
            "loss_batch": point.loss,
            "epoch": point.epoch,
            "iteration": point.update,
            "train_accuracy_avg": accuracy,
            "train_accuracy_batch": point.accuracy,
            "learning_rate": point.lr,
            "train_img_per_sec": self._images / max(self._seconds, 1e-9),
            "validation_accuracy": 0.0,  # until it is measured here
            "classification_loss_batch": "" if is_smoothed else point.loss,
            "classification_loss_avg": "" if is_smoothed else loss,
            "smoothing_loss_batch:": "" if is_smoothed else 0.0,
            "smoothing_loss_avg:": "" if is_smoothed else 0.0,
        }
        if not self._options.get("auto-loss-scaling"):
            row["loss_scaling"] = 1.0 if point.scale is None else point.scale
        self._row = (point.update, row)
        self.to.row("training.csv", row, update=point.update)

    def end_epoch(self, point: Point) -> None:
        self._images, self._seconds = 0, 0.0
        self._say(f"Epoch {point.epoch:.0f}")
        self._say(f"loss: {point.loss:.4f},")
        self._say(f"accuracy: {point.accuracy:.2f} %")
        self._say(f"throughput: {point.rate.images_per_second:.1f} samples/sec")

    def validated(self, found: Validated) -> None:
        self.averaged(found, which="")
        if self._options.get("validation-mode") == "during":
            self._say(f"Validation Accuracy: {found.accuracy:.2f}%")
        update, row = self._row
        if update == found.update:
            row["validation_accuracy"] = found.accuracy
            self.to.row_again("training.csv", row, update=update)

    def averaged(self, found: Validated, *, which: str) -> None:  # noqa: ARG002
        if found.origin:
            self._say(f"{_restored(found.origin, found.epoch)}: {found.name}")
        self._say("Testing the model")
        self._say(f"Accuracy on test set: {found.accuracy:.2f}%")
        values = {"epoch": found.epoch, "iteration": found.update, "accuracy": found.accuracy}
        named = {f"validation_{name}": value for name, value in values.items()}
        self.to.row("validation.csv", named, update=found.update)

    def saved(self, folder: Path) -> None:
        self.to.line(f"Checkpoint saved to: {folder}")

    def end(self, *, trained: float, whole: float) -> None:  # noqa: ARG002
        self._say(f"Finished training. Time: {datetime.now()}. It took: {timedelta(seconds=whole)}")

    def checkpoint_name(self, update: int) -> str | None:  # noqa: ARG002
        return None

    def average_name(self, how: str) -> str | None:  # noqa: ARG002
        return None

    def _say(self, text: str) -> None:
        """In log.txt with time and place, as the original had them there."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self.to.kept_line(f"[INFO] {text}", kept=f"{now},000 - [INFO] - train - falconet: {text}")


def _restored(origin: Origin, epoch: float) -> str:
    """As the PyTorch program said it, which did not name the file."""
    known = origin.loss is not None
    trained = f"(train loss: {origin.loss}, train accuracy: {origin.accuracy}%)" if known else ""
    return f"Restore the {origin.model} model to epoch {epoch:g} on {origin.data} dataset{trained}"


class TensorFlow:
    """One line a log point, training.csv, validation.csv, arguments.json, log.txt, checkpoints named ckpt-N."""

    def __init__(self, log: RunLog) -> None:
        self.to, self._recent, self._step = log, Recent(), 0

    def begin(self, facts: Facts) -> None:
        self.to.json("arguments.json", {name.replace("-", "_"): value for name, value in facts.options.items()})
        for text in (
            f" Saving to {facts.folder}",
            f" Batch Size: {facts.global_batch}",
            f" Image size: {facts.image_size}x{facts.image_size}",
            f"Total Parameters:{facts.parameters}",
        ):
            self.to.kept_line(text)
        if facts.restored:
            self.to.kept_line(f"Restoring training from latest checkpoint: {facts.restored}")

    def begin_epoch(self, epoch: int, of: int) -> None:
        """The original said nothing."""

    def log(self, point: Point) -> None:
        loss, accuracy = self._recent.add(point)
        self._step += 1
        self.to.kept_line(
            f"step: {self._step:6d}, iteration: {point.update:6d}, epoch: {point.epoch:6.2f}, lr: {point.lr:6.4g},"
            f" loss: {loss:6.3f}, top-1 accuracy: {accuracy:6.3f}%, img/sec: {point.rate.images_per_second:6.2f},"
            f" time: {point.update_seconds:8.6f}, total_time: {point.seconds:8.1f}"
        )
        row = {
            "step": self._step,
            "iteration": point.update,
            "epoch": point.epoch,
            "lr": point.lr,
            "loss_batch": point.loss,
            "loss_avg": loss,
            "train_acc_batch": point.accuracy,
            "train_acc_avg": accuracy,
            "it_time": point.update_seconds,
            "img_per_sec": point.rate.images_per_second,
            "total_time": point.seconds,
        }
        self.to.row("training.csv", row, update=point.update)

    def end_epoch(self, point: Point) -> None:
        """The original said nothing."""

    def validated(self, found: Validated) -> None:
        latency = 1000 * found.seconds * found.batch / max(found.images, 1)
        self.to.kept_line(
            f"Validation top-1 accuracy [{found.name}] (iteration: {found.update:6d}, epoch: {found.epoch:6.2f},"
            f" img/sec: {found.images_per_second:6.2f}, time: {found.seconds:8.6f}, latency (ms): {latency:8.4f}):"
            f" {found.accuracy:6.3f}%"
        )
        row = {
            "name": found.name,
            "iteration": found.update,
            "epoch": found.epoch,
            "val_acc": found.accuracy,
            "val_time": found.seconds,
            "val_size": found.images,
            "img_per_sec": found.images_per_second,
            "latency": latency,
        }
        if not self.to.has_row("validation.csv", "name", found.name):  # each checkpoint once, as in the original
            self.to.row("validation.csv", row, update=found.update)

    def averaged(self, found: Validated, *, which: str) -> None:  # noqa: ARG002
        self.validated(found)

    def saved(self, folder: Path) -> None:
        initial = "initial " if folder.name == self.checkpoint_name(0) else ""
        self.to.kept_line(f"Saved {initial}checkpoint to {folder}")

    def end(self, *, trained: float, whole: float) -> None:
        self.to.kept_line(f"Training loop completed in {trained:.2f}s.")
        self.to.kept_line(f"Time to train: {whole:.2f}s.")

    def checkpoint_name(self, update: int) -> str | None:
        return f"ckpt-{update}"

    def average_name(self, how: str) -> str | None:
        return f"weight_avg_{how}"


class PopArt:
    """One line a log point and one a validation, log_str.txt, and the names of its TensorBoard scalars."""

    def __init__(self, log: RunLog) -> None:
        self.to, self._step = log, 0

    def begin(self, facts: Facts) -> None:
        texts = [f"{name.replace('-', '_')}={value}" for name, value in facts.options.items()]
        self.to.text("log_str.txt", "\n".join([*texts, f"Effective batch size: {facts.global_batch}"]))

    def begin_epoch(self, epoch: int, of: int) -> None:  # noqa: ARG002
        self.to.kept_line(f"Executing epoch  {epoch - 1}")

    def log(self, point: Point) -> None:
        self._step += 1
        computing = max(0.0, point.rate.seconds - point.rate.waiting)
        self.to.kept_line(
            f"step: {self._step:6d}, epoch: {point.epoch:6.2f}, lr: {point.lr:6.2g}, loss: {point.loss:6.3f},"
            f" accuracy: {point.accuracy:6.3f}%, img/sec: {point.rate.images_per_second:6.2f}"
            f" step_time: {point.rate.seconds:6.2f} sec ipu_execution_time: {computing:6.2f}"
        )
        values = {"loss": point.loss, "train_acc": point.accuracy, "learning rate": point.lr}
        self.to.scalars(point.update, values)

    def end_epoch(self, point: Point) -> None:
        """The original said nothing."""

    def validated(self, found: Validated) -> None:
        self.to.kept_line(
            f"Validation accuracy epoch {found.epoch:6.2f}, img/sec:{found.images_per_second:6.2f}"
            f" accuracy: {found.accuracy:6.3f}% loss: {found.loss:6.3f}"
        )
        self.to.scalars(found.update, {"val_acc": found.accuracy})

    def averaged(self, found: Validated, *, which: str) -> None:  # noqa: ARG002
        self.validated(found)

    def saved(self, folder: Path) -> None:
        """The original said nothing."""

    def end(self, *, trained: float, whole: float) -> None:
        """The original said nothing."""

    def checkpoint_name(self, update: int) -> str | None:  # noqa: ARG002
        return None

    def average_name(self, how: str) -> str | None:  # noqa: ARG002
        return None


def style_of(name: str, log: RunLog) -> Style:
    styles: dict[str, type[Falconet] | type[PyTorch] | type[TensorFlow] | type[PopArt]] = {
        "falconet": Falconet,
        "pytorch": PyTorch,
        "tensorflow": TensorFlow,
        "popart": PopArt,
    }
    return styles[name](log)
