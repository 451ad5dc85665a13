"""Lines about runs for a pipe or a file: one for each epoch as it comes, and one for the end."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from falconet.errors import printable
from falconet.report import epochs
from falconet.report.curves import Row, epoch_rows
from falconet.report.epochs import in_short
from falconet.report.progress import progress_of, state_in_words
from falconet.report.results import best_of
from falconet.report.run_files import RunFiles

SPOKEN: Mapping[str, Callable[[float], str]] = {
    "train_loss": lambda value: f"train loss {epochs.loss(value)}",
    "train_accuracy": "train acc {:.2f}%".format,
    "train_exact": "exact {:.2f}%".format,
    "validation_loss": lambda value: f"val loss {epochs.loss(value)}",
    "validation_accuracy": "val acc {:.2f}%".format,
    "validation_mAP": "val mAP {:.2f}%".format,
    "ema_accuracy": "ema acc {:.2f}%".format,
    "ema_mAP": "ema mAP {:.2f}%".format,
    "lr": "lr {:.3g}".format,
    "images_per_second": lambda value: f"{epochs.rate(value)} images/s",
    "waiting_percent": "{:.0f}% waiting".format,
}


class Told:
    """The epochs of runs that have been reported, so that none is reported twice."""

    def __init__(self, *, where: Path) -> None:
        self._where = where
        self._rows = dict[str, Row]()  # the last of each run
        self._states = dict[str, str]()

    def lines(self, runs: Mapping[str, RunFiles]) -> Iterator[str]:
        """New lines of every run; in a folder they start with the run's name and leave out earlier epochs."""
        for name in [name for name in self._states if name not in runs]:
            del self._states[name]
            yield f"{printable(name)}: the run folder is gone"
        for name, run in reversed(list(runs.items())):
            start = f"{printable(name)}: " if name else ""
            rows = epoch_rows(run)
            is_new = name not in self._states
            last = self._rows.get(name)
            if last and (not rows or rows[-1]["update"] < last["update"]):
                yield f"{start}restored, continues after epoch {in_short(rows[-1]['epoch'] if rows else 0.0)}"
            elif not (is_new and name):
                done = last["update"] if last else -1.0
                for row in rows:
                    if row["update"] > done:
                        yield start + _row_line(row, run)
            if rows:
                self._rows[name] = rows[-1]
            else:
                self._rows.pop(name, None)
            yield from self._state_lines(name, run, start or f"{self._where}: ")

    def _state_lines(self, name: str, run: RunFiles, start: str) -> Iterator[str]:
        words = state_in_words(run)[0]
        if words == self._states.get(name):
            return
        self._states[name] = words
        best = best_of(run)
        score = f", best {run.metric} {best[0]:.2f} % after epoch {in_short(best[1])}" if best else ""
        if name or run.state != "going":
            yield f"{start}{words}{score}"
            yield from (f"note: {problem}" for problem in run.problems)


def _row_line(row: Row, run: RunFiles) -> str:
    total = progress_of(run).epochs
    of = f"/{in_short(total)}" if total else ""
    words = [say(row[column]) for column, say in SPOKEN.items() if column in row]
    return "  ".join([f"epoch {in_short(row['epoch'])}{of}", *words])
