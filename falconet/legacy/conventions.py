"""The originals' output: their lines, CSV files, and names of folders and checkpoints."""

import random
import re
import string
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from statistics import fmean, pstdev, quantiles

import falconet
from falconet.legacy.table import Old
from falconet.legacy.translate import TRAINERS
from falconet.report import folders
from falconet.report.folders import RunShape
from falconet.report.inference import Predictions, Repetition, TimedBatch
from falconet.report.styles import FALCONET, Conventions, Facts, Origin, Point, RunLog, Table, Validated

_DATA_MODES = {"folder": "real"}  # in the PyTorch program's words
_RESIDUAL = {"resnet": "RN", "resnext": "RNX"}


class Recent:
    """Means of some numbers over the last epoch's worth of updates."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, tuple[float, ...]]] = deque()  # updates, and the means over them

    def restore(self, rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> None:
        """Start with the points of a training.csv, whose `columns` hold the numbers that `add` takes."""
        before = 0
        for row in rows:
            try:
                update, values = int(row["iteration"]), tuple(float(row[name]) for name in columns)
            except (KeyError, TypeError, ValueError):  # edited, or of an older version
                self._points.clear()
                continue
            self._points.append((max(1, update - before), values))
            before = update

    def add(self, point: Point, *values: float) -> list[float]:
        """Add a point, and return the means that include it."""
        self._points.append((point.updates, values))
        total = sum(updates for updates, _ in self._points)
        while len(self._points) > 1 and total - self._points[0][0] >= point.updates_per_epoch:
            total -= self._points.popleft()[0]
        return [sum(updates * each[i] for updates, each in self._points) / total for i in range(len(values))]


def _say_average(found: Validated, to: RunLog) -> None:
    """Print a line of ours, because the originals had no moving average of the weights."""
    if found.average is not None:
        to.line(f"Accuracy on test set of the moving average: {found.average:.2f}%")


def _write_options(to: RunLog, name: str, facts: Facts) -> None:
    """Write the options of the run's first start, by the original's names, or ours if it was not the original."""
    if to.has(name) and facts.restored:
        return
    ours = {option.replace("-", "_"): value for option, value in facts.options.items()}
    theirs = dict(facts.typed or {})
    if theirs and theirs.get("seed") is None:  # the PyTorch original drew one
        theirs["seed"] = ours["seed"]
    to.json(name, theirs or ours)


class PyTorch:
    """`[INFO]` lines, training.csv, validation.csv, app.json and log.txt."""

    tabulates = False

    def __init__(self, log: RunLog) -> None:
        self.to, self._recent = log, Recent()
        self._options: Mapping[str, object] = {}
        self._lr: float | None = None
        self._images, self._seconds = 0, 0.0  # of the epoch so far
        self._row: tuple[int, dict[str, object]] = (-1, {})  # the last one of training.csv, and its update

    def begin(self, facts: Facts) -> None:
        self._options = facts.options
        if facts.restored and (rows := self.to.rows("training.csv")):
            self._recent.restore(rows, ("loss_batch", "train_accuracy_batch", "smoothing_loss_batch:"))
            last = rows[-1].get("iteration", "")
            self._row = (int(last) if last.isdecimal() else -1, dict(rows[-1]))
        _write_options(self.to, "app.json", facts)
        self._info(f"Total replicas: {facts.replicas}")
        self._info(f"Global batch size: {facts.global_batch}")
        self._info(f"Number of IPUs required: {facts.replicas * facts.stages}")  # its word for devices
        self._info(facts.model)
        self._info(f"Total parameters: {facts.parameters}")
        self._info(f"Training the model. Start: {datetime.now()}")

    def begin_epoch(self, epoch: int, of: int) -> None:
        self._info(f"Epoch {epoch}/{of}")

    def log(self, point: Point) -> None:
        if self._options.get("lr-schedule") == "step" and self._lr not in (None, point.lr):
            self._info(f"Learning rate is changed to {point.lr:g}")
        self._lr = point.lr
        loss, accuracy, smoothing = self._recent.add(point, point.loss, point.accuracy, point.smoothing_loss)
        self._images, self._seconds = self._images + point.rate.images, self._seconds + point.rate.seconds
        row: dict[str, object] = {
            "loss_avg": loss,
            "loss_batch": point.loss,
            "epoch": point.epoch,
            "iteration": point.update,
            "train_accuracy_avg": accuracy,
            "train_accuracy_batch": point.accuracy,
            "learning_rate": point.lr,
            "train_img_per_sec": self._images / max(self._seconds, 1e-9),
            "validation_accuracy": 0.0,  # until this update is validated
            "classification_loss_batch": point.loss - point.smoothing_loss,
            "classification_loss_avg": loss - smoothing,
            "smoothing_loss_batch:": point.smoothing_loss,
            "smoothing_loss_avg:": smoothing,
        }
        if not self._options.get("auto-loss-scaling"):
            row["loss_scaling"] = 1.0 if point.scale is None else point.scale
        self._row = (point.update, row)
        self.to.row("training.csv", row, update=point.update)

    def end_epoch(self, point: Point) -> None:
        self._images, self._seconds = 0, 0.0
        self._info(f"Epoch {point.epoch:.0f}")
        self._info(f"loss: {point.loss:.4f},")
        self._info(f"accuracy: {point.accuracy:.2f} %")
        self._info(f"throughput: {point.rate.images_per_second:.1f} samples/sec")

    def validated(self, found: Validated) -> None:
        self.averaged(found, which="")
        if self._options.get("validation-mode") == "during":
            self._info(f"Validation Accuracy: {found.accuracy:.2f}%")
        update, row = self._row
        if update == found.update:
            row["validation_accuracy"] = found.accuracy
            self.to.row_again("training.csv", row, update=update)
        _say_average(found, self.to)

    def stopped(self) -> None:
        """Do nothing: the original printed nothing."""

    def averaged(self, found: Validated, *, which: str) -> None:  # noqa: ARG002
        if found.origin:
            self._info(f"{_restored(found.origin, found.epoch)}: {found.name}")
        self._info("Testing the model")
        self._info(f"Accuracy on test set: {found.accuracy:.2f}%")
        values = {"epoch": found.epoch, "iteration": found.update, "accuracy": found.accuracy}
        named = {f"validation_{name}": value for name, value in values.items()}
        self.to.row("validation.csv", named, update=found.update)

    def saved(self, folder: Path) -> None:
        self.to.line(f"Checkpoint saved to: {folder}")

    def end(self, *, trained: float, whole: float) -> None:  # noqa: ARG002
        self._info(f"Finished training. Time: {datetime.now()}. It took: {timedelta(seconds=whole)}")

    def checkpoint_name(self, update: int) -> str | None:  # noqa: ARG002
        return None

    def average_name(self, how: str) -> str | None:  # noqa: ARG002
        return None

    def _info(self, text: str) -> None:
        """Print a line; in log.txt it has the time and the module before it, as in the original."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self.to.kept_line(f"[INFO] {text}", kept=f"{now},000 - [INFO] - train - falconet: {text}")


def _restored(origin: Origin, epoch: float) -> str:
    """The PyTorch program's line about a restored model, without the checkpoint's path."""
    known = origin.loss is not None
    trained = f"(train loss: {origin.loss}, train accuracy: {origin.accuracy}%)" if known else ""
    return f"Restore the {origin.model} model to epoch {epoch:g} on {origin.data} dataset{trained}"


class TensorFlow:
    """One line per log point, training.csv, validation.csv, arguments.json, log.txt, checkpoints named ckpt-N."""

    tabulates = False

    def __init__(self, log: RunLog) -> None:
        self.to, self._recent = log, Recent()

    def begin(self, facts: Facts) -> None:
        if facts.restored:
            self._recent.restore(self.to.rows("training.csv"), ("loss_batch", "train_acc_batch"))
        _write_options(self.to, "arguments.json", facts)
        for text in (
            f" Saving to {facts.folder}",
            f" Batch Size: {facts.global_batch}",
            f" Image size: {facts.image_size}x{facts.image_size}",
            f"Total Parameters:{facts.parameters}",
        ):
            self.to.kept_line(text)
        if facts.restored:
            latest = "latest " if facts.is_newest else ""
            self.to.kept_line(f"Restoring training from {latest}checkpoint: {facts.restored}")

    def begin_epoch(self, epoch: int, of: int) -> None:
        """Do nothing: the original printed nothing."""

    def log(self, point: Point) -> None:
        loss, accuracy = self._recent.add(point, point.loss, point.accuracy)
        self.to.kept_line(
            f"step: {point.number:6d}, iteration: {point.update:6d}, epoch: {point.epoch:6.2f}, lr: {point.lr:6.4g},"
            f" loss: {loss:6.3f}, top-1 accuracy: {accuracy:6.3f}%, img/sec: {point.rate.images_per_second:6.2f},"
            f" time: {point.update_seconds:8.6f}, total_time: {point.seconds:8.1f}"
        )
        row = {
            "step": point.number,
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
        """Do nothing: the original printed nothing."""

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
        # Each checkpoint once, as in the original.
        if all(known.get("name") != found.name for known in self.to.rows("validation.csv")):
            self.to.row("validation.csv", row, update=found.update)
        _say_average(found, self.to)

    def stopped(self) -> None:
        """Do nothing: the original printed nothing."""

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
    """One line per log point and per validation, log_str.txt, and the names of its TensorBoard scalars."""

    tabulates = False

    def __init__(self, log: RunLog) -> None:
        self.to = log

    def begin(self, facts: Facts) -> None:
        texts = [f"{name.replace('-', '_')}={value}" for name, value in facts.options.items()]
        self.to.text("log_str.txt", "\n".join([*texts, f"Effective batch size: {facts.global_batch}"]))

    def begin_epoch(self, epoch: int, of: int) -> None:  # noqa: ARG002
        self.to.kept_line(f"Executing epoch  {epoch - 1}")

    def log(self, point: Point) -> None:
        computing = max(0.0, point.rate.seconds - point.rate.waiting)
        self.to.kept_line(
            f"step: {point.number:6d}, epoch: {point.epoch:6.2f}, lr: {point.lr:6.2g}, loss: {point.loss:6.3f},"
            f" accuracy: {point.accuracy:6.3f}%, img/sec: {point.rate.images_per_second:6.2f}"
            f" step_time: {point.rate.seconds:6.2f} sec ipu_execution_time: {computing:6.2f}"
        )
        values = {"loss": point.loss, "train_acc": point.accuracy, "learning rate": point.lr}
        self.to.scalars(point.update, values)

    def end_epoch(self, point: Point) -> None:
        """Do nothing: the original printed nothing."""

    def validated(self, found: Validated) -> None:
        self.to.kept_line(
            f"Validation accuracy epoch {found.epoch:6.2f}, img/sec:{found.images_per_second:6.2f}"
            f" accuracy: {found.accuracy:6.3f}% loss: {found.loss:6.3f}"
        )
        self.to.scalars(found.update, {"val_acc": found.accuracy})
        _say_average(found, self.to)

    def stopped(self) -> None:
        """Do nothing: the original printed nothing."""

    def averaged(self, found: Validated, *, which: str) -> None:  # noqa: ARG002
        self.validated(found)

    def saved(self, folder: Path) -> None:
        """Do nothing: the original printed nothing."""

    def end(self, *, trained: float, whole: float) -> None:
        """Do nothing: the original printed nothing."""

    def checkpoint_name(self, update: int) -> str | None:  # noqa: ARG002
        return None

    def average_name(self, how: str) -> str | None:  # noqa: ARG002
        return None


def pytorch_folder(shape: RunShape) -> Path:
    return _first_free(shape, lambda: f"{pytorch_name(shape)}{folders.suffix(shape)}_{_three()}")


def pytorch_name(shape: RunShape) -> str:
    sizes = f"bs{shape.micro_batch}_{shape.precision}fp_r{shape.replicas}_di{shape.in_a_row}"
    return f"{folders.plain(shape.model)}_{sizes}"


def tensorflow_folder(shape: RunShape) -> Path:
    version = falconet.__version__
    return _first_free(shape, lambda: f"{tensorflow_name(shape)}{folders.suffix(shape)}_v{version}_{_three()}")


def tensorflow_name(shape: RunShape) -> str:
    """A name such as RN50_bs8x16rx8a_GN32_16.16; each model of the program had another form."""
    efficient, squeezed = shape.model.startswith("efficientnet"), shape.model.startswith("squeezenet")
    name = f"{_tensorflow_model(shape.model)}_bs{shape.micro_batch}"
    replicas = f"x{shape.replicas}r" * (shape.replicas > 1)
    accumulation = f"x{shape.accumulation}{'p' if shape.pipelined else 'a'}"
    accumulation *= shape.pipelined or shape.accumulation > 1
    name += accumulation + replicas if efficient else replicas + accumulation
    if not squeezed:
        name += {"group": f"_GN{shape.groups}", "batch": "_BN", "none": "_noBN"}[shape.norm]
    if not efficient:
        # The other precisions round nothing, and the original's default, on, is not in the options.
        is_plain = shape.precision == "16.16" and not shape.rounds_stochastically
        name += f"_{shape.precision}" + "_noSR" * is_plain
    cifar = shape.data.startswith("cifar") or (shape.model.endswith("-cifar") and shape.image_size == 32)
    if shape.image_size != 224 and not cifar:
        name += f"_{shape.image_size}x{shape.image_size}"
    return name


def _tensorflow_model(model: str) -> str:
    """The family and size in a name; models that the program did not have keep our name."""
    residual = re.match(r"(resnet|resnext)(\d+)", model)
    if residual:
        return f"{_RESIDUAL[residual[1]]}{residual[2]}"
    if model.startswith("efficientnet-"):
        return f"EfficientNet-{model.removeprefix('efficientnet-').upper()}"
    return "SN" if model.startswith("squeezenet") else folders.plain(model)


def popart_folder(shape: RunShape) -> Path:
    size = re.search(r"\d+", shape.model)
    parent = folders.home(shape.parent or "logs") / folders.now() / (size[0] if size else shape.model)
    return folders.numbered(parent, folders.suffix(shape)[1:] or "net")


def _three() -> str:
    """Three random characters, independent of the seed: a second run with the same seed gets another folder."""
    return "".join(random.SystemRandom().choices(string.ascii_uppercase + string.digits, k=3))


def _first_free(shape: RunShape, name: Callable[[], str]) -> Path:
    parent = folders.home(shape.parent or "logs")
    return next(folder for _ in range(1000) if not (folder := parent / name()).exists())


def pytorch_batch(batch: TimedBatch) -> str:
    """The line about one batch; with several instances, it has the instance's number from 1."""
    who = f"[instance{batch.instance + 1}/{batch.instances}]" if batch.instances > 1 else ""
    rate, latency = batch.images_per_second, batch.milliseconds
    return f"[INFO] {who} Throughput: {rate:.2f} imgs/sec; Latency range: {latency:.3f}..{latency:.3f} ms"


def pytorch_predictions(found: Predictions) -> list[str]:
    """The lines with means over the steady batches."""
    rates, latencies = found.rates, found.latencies
    throughput = f"throughput: {fmean(rates):.2f} samples/sec (mean)"
    latency = f"latency avg: {fmean(latencies):.3f} ms (mean)"
    texts = [
        f"micro_batch_size: {found.micro_batch}",
        f"data_mode: {_DATA_MODES.get(found.data, found.data)}",
        f"data_type: {found.dtype}",
        f"num_ipus: {found.devices}",
        f"{throughput} (min: {min(rates):.2f}, max: {max(rates):.2f}, std: {pstdev(rates):.2f})",
        f"{latency} (min: {min(latencies):.3f}, max: {max(latencies):.3f})",
    ]
    if found.data == "synthetic":
        texts.append("NOTE: synthetic data is on the device already: its latency is not that of a request")
    # The original's log lines start with a newline and a tab.
    return [f"[INFO] {'-' * 91}", f"[INFO] {found.model} results:", *(f"[INFO] \n\t{text}" for text in texts)]


def tensorflow_repetition(found: Repetition) -> list[str]:
    """The two lines of its validation; the rate is all images over all seconds of the pass, as in the original."""
    latencies = found.latencies
    points = quantiles(latencies, n=1000, method="inclusive") if len(latencies) > 1 else [latencies[0]] * 999
    mean = fmean(latencies)
    return [
        f"Latencies - avg: {mean:8.4f}, 99th percentile: {points[989]:8.4f},"
        f" 99.9th percentile: {points[998]:8.4f}, max: {max(latencies):8.4f}",
        f"Validation top-1 accuracy [{found.model}] (iteration: {0:6d}, epoch: {0:6.2f},"
        f" img/sec: {found.images_per_second:6.2f}, time: {found.seconds:8.6f}, latency (ms): {mean:8.4f}):"
        f" {found.accuracy:6.3f}%",
    ]


# Options whose values an original computes from its own option, which is still the one to change.
_COMPUTED = frozenset({"lr", "updates", "run-dir", "micro-batch-size", "checkpoint-input-path"})


def _options(dialect: str) -> Iterator[Old]:
    """The options with an effect of an original's trainer."""
    return (option for program in TRAINERS if program.dialect == dialect for option in program.options if option.new)


def _keeps_value(option: Old) -> bool:
    return option.effect.startswith("the same")


@cache
def _names(dialect: str) -> dict[str, Old]:
    """Canonical options, without dashes, that an original's trainer has under another name."""
    found: dict[str, Old] = {}
    for option in _options(dialect):
        if option.name.startswith("--") and (_keeps_value(option) or option.new[0] in _COMPUTED):
            found.setdefault(option.new[0], option)
    return {new: option for new, option in found.items() if option.name != f"--{new}"}


@cache
def _choices(dialect: str) -> dict[str, dict[str, str]]:
    """The values that an original's trainer takes, by canonical option and by our spelling."""
    named = {**{option.name.lstrip("-"): option for option in _options(dialect)}, **_names(dialect)}
    spelled = {new: {choice.lower(): choice for choice in reversed(option.choices)} for new, option in named.items()}
    return {new: choices for new, choices in spelled.items() if choices}


def own_words(text: str, *, dialect: str) -> str:
    """A line with options and values as an original spells them, except in commands: in backticks, after `falconet`.

    What comes before a colon is an error's subject; if its value was computed, our name stays beside its source.
    """
    names, choices = _names(dialect), _choices(dialect)
    known = "|".join(map(re.escape, {**names, **choices}))
    if "--" not in text or not known:
        return text

    def said(found: re.Match[str]) -> str:
        option, value = found["option"], found["value"] or ""
        name = names[option].name if option in names else f"--{option}"
        if found["colon"] and option in names and not _keeps_value(names[option]):
            return f"{name}: here --{option}:"
        value = choices.get(option, {}).get(value, value)
        return name + (found["colon"] or "") + (f" {value}" if value else "")

    pattern = re.compile(rf"(?<![\w-])--(?P<option>{known})(?![\w-])(?:(?P<colon>:)| (?P<value>\w+(?:[.-]\w+)*))?")
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        words, falconet, command = parts[place].partition("falconet ")
        parts[place] = pattern.sub(said, words) + falconet + command
    return "`".join(parts)


def _program(name: str) -> tuple[str, ...]:
    return ("-m", "falconet.legacy.programs", name)


CONVENTIONS = {
    "falconet": FALCONET,
    "pytorch": Conventions(
        style=PyTorch,
        run_folder=pytorch_folder,
        predictions=pytorch_predictions,
        batch=pytorch_batch,
        tables=(
            Table(name="training.csv", update="iteration"),
            Table(name="validation.csv", update="validation_iteration", is_of_validations=True),
        ),
        options_file="app.json",
        logs_where_it_saves=True,
        words=partial(own_words, dialect="pytorch"),
        program=_program("pytorch"),
    ),
    "tensorflow": Conventions(
        style=TensorFlow,
        run_folder=tensorflow_folder,
        predictions=lambda _: [],
        tables=(
            Table(name="training.csv", update="iteration"),
            Table(name="validation.csv", update="iteration", is_of_validations=True),
        ),
        options_file="arguments.json",
        repetition=tensorflow_repetition,
        words=partial(own_words, dialect="tf1"),
        program=_program("tensorflow"),
    ),
    "popart": Conventions(
        style=PopArt,
        run_folder=popart_folder,
        predictions=FALCONET.predictions,
        words=partial(own_words, dialect="popart"),
        program=_program("popart"),
    ),
}
