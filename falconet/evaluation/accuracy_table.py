"""The accuracies of several models as one table: on the screen and as CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from falconet import writing
from falconet.evaluation.evaluate import TOP, Evaluation
from falconet.report.console import Say
from falconet.report.epochs import ACCURACY

FILE = "validation.csv"
Cells = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One row of a table: a measured model."""

    name: str  # of its checkpoint
    epoch: str  # epochs trained, and images of the next one; empty: unknown
    found: Evaluation
    classes: int

    def cells(self) -> Cells:
        """What is measured, in percent."""
        found = self.found
        if found.metric is not ACCURACY:
            return {found.metric.name: f"{found.score:.2f}", found.metric.training: f"{found.accuracy:.2f}"}
        # Of five classes or fewer, the top 5 are always right.
        return {"top1": f"{found.accuracy:.2f}", "top5": f"{found.top5_accuracy:.2f}" if self.classes > TOP else ""}


def tabulate(accuracies: Sequence[Accuracy]) -> list[Cells]:
    """One row per model; the best is marked by its exact score, not by the two decimals shown, then by its loss."""
    best = max(accuracies, key=lambda each: each.found.rank)
    return [
        {
            "checkpoint": each.name,
            "epoch": each.epoch,
            **each.cells(),
            "loss": f"{each.found.loss:.4f}",
            "images": str(each.found.images),
            "best": "best" if each is best else "",
        }
        for each in accuracies
    ]


def show(rows: Sequence[Cells], say: Say) -> None:
    """Print a table in plain text, without empty columns; one row alone is not called the best."""
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    shown = [name for name in shown if name != "best" or len(rows) > 1]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in shown}
    for cells in ({name: name for name in shown}, *rows):
        say("  ".join(cells[name].ljust(widths[name]) for name in shown).rstrip())


def write(rows: Sequence[Cells], path: Path, *, option: str, named: bool = False) -> None:
    """Write the table as CSV; see `write_result`."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_result(file.getvalue(), path, option=option, named=named)


def write_result(text: str, path: Path, *, option: str, named: bool) -> None:
    """`option`: the one to change if writing fails; `named`: the user named the file, which may be a link."""
    with writing.explained(path, option=option):
        if named:
            path.write_bytes(writing.coded(text))
        else:
            writing.replace(path.parent, path.name, text)
