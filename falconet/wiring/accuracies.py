"""The accuracies of several models as a table on the screen and as a CSV file."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from falconet import writing
from falconet.errors import ConfigError, LinkError
from falconet.report.screen import Say
from falconet.train.evaluate import Evaluation

FILE = "validation.csv"
COLUMNS = ("checkpoint", "epoch", "top1", "top5", "loss", "images", "best")
Row = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What was measured of one model."""

    name: str  # of its checkpoint
    epoch: str  # whole epochs behind it, and images of the next one; empty: not known
    found: Evaluation


def tabulate(accuracies: Sequence[Accuracy]) -> list[Row]:
    """One row a model, the best one marked; by its exact accuracy, not by the two places shown."""
    best = max(accuracies, key=lambda each: (each.found.accuracy, each.found.top5_accuracy))
    return [
        {
            "checkpoint": each.name,
            "epoch": each.epoch,
            "top1": f"{each.found.accuracy:.2f}",
            "top5": f"{each.found.top5_accuracy:.2f}",
            "loss": f"{each.found.loss:.4f}",
            "images": str(each.found.images),
            "best": "best" if each is best else "",
        }
        for each in accuracies
    ]


def show(rows: Sequence[Row], say: Say) -> None:
    """A table in plain text, and the line that tools of the originals read."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS}
    for cells in ({name: name for name in COLUMNS}, *rows):
        say("  ".join(cells[name].ljust(widths[name]) for name in COLUMNS).rstrip())
    for row in rows:
        say(f"Accuracy on test set: {row['top1']}%")


def write_csv(rows: Sequence[Row], path: Path, *, option: str, named: bool = False) -> None:
    """`option`: the one to change where it cannot be written; `named`: the user named the file itself, link or not."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    try:
        if named:
            path.write_text(file.getvalue(), encoding="utf-8", newline="")
        else:
            writing.replace(path.parent, path.name, file.getvalue())
    except LinkError as error:
        raise LinkError(error.path, option) from None
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror or error}") from error
