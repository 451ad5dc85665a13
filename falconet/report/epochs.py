"""The table of a run: a header and one row per epoch, in 80 columns of plain ASCII."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

BEST = "*"  # the mark behind a row that is better than all before it
UNKNOWN = "-"
NARROW = 80  # columns, the width of many terminals


@dataclass(frozen=True)
class Metric:
    """A percentage that a validation measures; higher is better."""

    name: str
    short: str  # in the heads of columns
    of_training: str = ""  # what is counted in training, if that is something else

    @property
    def training(self) -> str:
        """The name of the percentage that training counts."""
        return self.of_training or self.name

    @property
    def training_head(self) -> str:
        return self.of_training or f"train {self.short}"

    @property
    def key(self) -> str:
        """The name among the metrics of a run."""
        return f"validation/{self.name}"

    @property
    def average_key(self) -> str:
        """The name of the moving average's value among the metrics of a run."""
        return f"validation_ema/{self.name}"


ACCURACY = Metric("accuracy", "acc")
MEAN_AVERAGE_PRECISION = Metric("mAP", "mAP", of_training="exact")  # of photos with several labels


def span(seconds: float) -> str:
    """A time in at most six letters: 1.7s, 12m05s, 3h07m."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02d}m" if hours < 100 else f"{hours / 24:.1f}d"


def in_short(epoch: float) -> str:
    """`3`, or `2.27` where training ends within an epoch."""
    return f"{epoch:.2f}".rstrip("0").rstrip(".")


def rate(images_per_second: float) -> str:
    return f"{images_per_second:,.0f}" if images_per_second >= 10 else f"{images_per_second:.1f}"


def loss(value: float) -> str:
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 1000 else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The numbers of an epoch, or of a log point within one; None: not measured."""

    epoch: float
    is_within: bool = False  # a log point within an epoch
    train_loss: float | None = None
    train_score: float | None = None  # percent
    lr: float | None = None
    images_per_second: float | None = None
    seconds: float
    loss: float | None = None  # of the validation
    score: float | None = None
    average_score: float | None = None  # of the moving average
    is_best: bool = False


class EpochTable:
    """Columns wide enough for every row of a run."""

    def __init__(self, *, epochs: float, metric: Metric, validates: bool, averages: bool) -> None:
        """`epochs`: of the run, which may end within one. `validates`: there are validations; `averages`: of a moving
        average too.
        """
        self._epochs = in_short(epochs)
        self._widths = {
            "epoch": max(7, 2 * len(self._epochs) + 1),
            "train loss": 10,
            metric.training_head: 9,
            **({"val loss": 8, f"val {metric.short}": 7} if validates else {}),
            **({f"ema {metric.short}": 7} if validates and averages else {}),
            "lr": 8,
            "images/s": 8,
            "time": 6,
        }
        self._metric = metric
        self._gap = "  " if sum(self._widths.values()) + 2 * len(self._widths) <= NARROW else " "

    def header(self) -> str:
        return self._line({name: name for name in self._widths})

    def row(self, row: Row) -> str:
        cells = {
            "epoch": f"{100 * (row.epoch % 1):.0f}%" if row.is_within else f"{in_short(row.epoch)}/{self._epochs}",
            "train loss": _cell(row.train_loss, loss),
            self._metric.training_head: _cell(row.train_score, _percent),
            "val loss": _cell(row.loss, loss),
            f"val {self._metric.short}": _cell(row.score, _percent),
            f"ema {self._metric.short}": _cell(row.average_score, _percent),
            "lr": _cell(row.lr, "{:.3g}".format),
            "images/s": _cell(row.images_per_second, rate),
            "time": span(row.seconds),
        }
        return self._line(cells) + (f" {BEST}" if row.is_best else "")

    def _line(self, cells: Mapping[str, str]) -> str:
        return self._gap.join(cells[name].rjust(width) for name, width in self._widths.items())


def _cell(value: float | None, shown: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else shown(value)


def _percent(value: float) -> str:
    return f"{value:.2f}%"
