"""The current state of runs on a terminal: one run with its curves and epochs, or a table of several."""

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from falconet.errors import printable
from falconet.report import epochs, terminal_plot
from falconet.report.console import counted
from falconet.report.curves import epoch_rows
from falconet.report.epochs import in_short, span
from falconet.report.foreign_folder import number
from falconet.report.gpu_driver import Gauge
from falconet.report.progress import Progress, Tone, left_in_words, progress_of, state_in_words
from falconet.report.results import MIXED, about_of, best_of, is_mixed, last_of
from falconet.report.run_files import RunFiles

STYLES: Mapping[Tone, str] = {"good": "green", "busy": "cyan", "bad": "yellow"}
NARROW, WIDEST = 64, 60  # columns below which plots are stacked, and of one plot at most
MOST_WORDS = 4  # lines of why a run failed
FEW_ROWS = 4  # of the table that stay when there is little room
GAP = "  "
SPOKEN: Mapping[str, Callable[[float], str]] = {  # metrics of the last log point
    "train/lr": "learning rate {:.3g}".format,
    "train/loss_scale": "loss scale {:g}".format,
    "train/images_per_second": lambda value: f"{epochs.rate(value)} images/s",
    "train/waiting_percent": "{:.0f} % of the time waiting for data".format,
}
NAME = 20  # columns that the name of a run has before others are left out
ASCII = str.maketrans({"·": "-", "…": "~"})


@dataclass(frozen=True, kw_only=True)
class Place:
    """The terminal: its size, and the characters that it can show."""

    width: int
    height: int
    has_unicode: bool = True
    clock: Callable[[], float] = time.time


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, and the text of each row."""

    head: str
    cells: Sequence[str]
    is_left: bool = False
    styles: Sequence[str] = ()  # of each row; empty: none

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.head, *self.cells)))


def run_lines(run: RunFiles, place: Place, *, where: Path, gauges: Sequence[Gauge] = ()) -> list[Text]:
    """A view of one run in as many lines as there is room for."""
    words, tone = state_in_words(run)
    progress = progress_of(run, clock=place.clock)
    named, state = Text(printable(str(where)), style="bold"), Text(printable(words), style=STYLES[tone])
    fits = named.cell_len + state.cell_len + len(GAP) <= place.width
    wrapped = textwrap.wrap(state.plain, place.width, break_on_hyphens=False)[:MOST_WORDS]
    below = [Text(line, style=STYLES[tone]) for line in wrapped]
    head = [_between(named, state, place.width)] if fits else [named, *below]
    head += [Text(printable(each), style="dim") for each in filter(None, [about_of(run)])]
    head += [_bar(progress, place)]
    now = [Text(line) for line in _wrapped(_facts(run, place), place.width)]
    now += [Text(_fitted(line, place.width)) for line in _gauge_lines(run, gauges)]
    notes = [Text(f"note: {problem}", style="yellow") for problem in run.problems[:2]]
    body = [*head, Text(), *now, *([Text(), *notes] if notes else [])]
    room = place.height - len(body)
    drawn = _plots(run, place, room - FEW_ROWS - 2)
    table = _epoch_table(run, progress, place.width, room - len(drawn) - 1)
    return _finished([*body, *drawn, *([Text(), *table] if table else [])], place)


def _between(left: Text, right: Text, width: int) -> Text:
    """A line with one text on the left and one on the right."""
    space = max(2, width - left.cell_len - right.cell_len)
    return Text.assemble(left, " " * space, right)


def _bar(progress: Progress, place: Place) -> Text:
    """`epoch 4 of 30  ━━━━━────────  13 %  about 7m05s left`."""
    of = f" of {in_short(progress.epochs)}" if progress.epochs else ""
    left = f"epoch {in_short(progress.epoch)}{of}"
    if progress.share is None:
        return Text(f"{left}, update {progress.update:,}")
    right = f"{100 * progress.share:3.0f} %"
    if progress.seconds_left is not None:
        right += f", {left_in_words(progress.seconds_left)}"
    room = place.width - cell_len(left) - cell_len(right) - 2 * len(GAP)
    if room < 5:
        return Text(f"{left}, {right}")
    full, empty = "━─" if place.has_unicode else "#-"
    done = round(room * progress.share)
    return Text.assemble(left, GAP, (full * done, "cyan"), (empty * (room - done), "dim"), GAP, right)


def _facts(run: RunFiles, place: Place) -> list[str]:
    """The numbers of the last log point, and the best so far."""
    found, best = list[str]() if run.moments else ["no log points yet"], best_of(run)
    if best:
        name = "accuracy" if run.metric == "accuracy" else run.metric
        found.append(f"best {name} {best[0]:.2f} % after epoch {in_short(best[1])}")
    saved = next((each.name for each in run.checkpoints if each.is_best), None)
    if saved:
        found.append(f"best checkpoint {printable(saved)}")
    for metric, words in SPOKEN.items():
        value = last_of(run, metric)
        found += [] if value is None else [words(value)]
    memory = run.memory[-1] if run.memory else None
    if memory and memory.device:
        found.append(f"device memory {memory.device / 2**30:.2f} GiB")
    if memory and memory.host:
        found.append(f"host memory {memory.host / 2**30:.2f} GiB")
    seconds = number(run.summary.get("training_seconds"))
    if run.state == "done" and seconds:
        found.append(f"trained {span(seconds)}")
    elif run.written is not None:
        since = max(0.0, place.clock() - run.written)
        found.append(f"last log point {span(since)} ago")
    return found


def _gauge_lines(run: RunFiles, gauges: Sequence[Gauge]) -> list[str]:
    """Lines about this machine's GPUs of the run's kind, labelled as such because the run may be on another machine."""
    if run.state != "going":
        return []
    device = run.environment.get("device", "")
    return [
        f"GPU {each.number} of this machine: {each.busy:.0f} % busy, {each.used / 2**30:.1f} of"
        f" {each.total / 2**30:.1f} GiB used"
        for each in gauges
        if each.name in device
    ]


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """The parts joined by dots and wrapped between parts where possible."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return [line for line in lines if line]


def _plots(run: RunFiles, place: Place, room: int) -> list[Text]:
    """Plots of loss and accuracy, side by side or stacked; empty if they do not fit."""
    if not place.has_unicode or place.width < 24:
        return []
    is_narrow = place.width < NARROW
    columns = place.width if is_narrow else (place.width - terminal_plot.GAP) // 2
    width = min(WIDEST, columns - terminal_plot.MARGIN)
    height = min(10, (room - 2 if not is_narrow else room // 2 - 2) - 2)
    if height < 3:
        return []
    drawn = terminal_plot.plots(run, width=width, height=height)
    if not drawn:
        return []
    stacked = [line for each in drawn for line in each]
    rows = terminal_plot.beside(*drawn, width=width) if len(drawn) > 1 and not is_narrow else stacked
    legend = [f"{'':{terminal_plot.MARGIN}}{terminal_plot.LEGEND}"] if terminal_plot.is_validated(run) else []
    return [Text(), *map(Text, rows), *(Text(line, style="dim") for line in legend)]


def _epoch_table(run: RunFiles, progress: Progress, width: int, room: int) -> list[Text]:
    """The newest epochs, as many as fit."""
    rows = epoch_rows(run)[-max(0, room - 1) :] if room > 1 else []
    if not rows:
        return []
    of = f"/{in_short(progress.epochs)}" if progress.epochs else ""
    best = best_of(run)

    def column(head: str, name: str, shown: Callable[[float], str]) -> list[Column]:
        cells = [shown(row[name]) if name in row else "-" for row in rows]
        return [Column(head, cells)] if any(name in row for row in rows) else []

    marks = ["*" if best and row["epoch"] == best[1] else "" for row in rows]
    columns = [
        *column("epoch", "epoch", lambda value: f"{in_short(value)}{of}"),
        *column("train loss", "train_loss", epochs.loss),
        *column("val acc", "validation_accuracy", _percent),
        *column("val mAP", "validation_mAP", _percent),
        *([Column("", marks)] if any(marks) else []),
        *column("val loss", "validation_loss", epochs.loss),
        *column("train acc", "train_accuracy", _percent),
        *column("exact", "train_exact", _percent),
        *column("ema acc", "ema_accuracy", _percent),
        *column("ema mAP", "ema_mAP", _percent),
        *column("lr", "lr", "{:.3g}".format),
        *column("images/s", "images_per_second", epochs.rate),
        *column("waiting", "waiting_percent", lambda value: f"{value:.0f}%"),
    ]
    return table_lines(columns, width)


def _percent(value: float) -> str:
    return f"{value:.2f}%"


def table_lines(columns: Sequence[Column], width: int) -> list[Text]:
    """A table's head and rows, with as many columns as fit, at least the first two."""
    shown = list(columns)
    while len(shown) > 2 and sum(each.width + len(GAP) for each in shown) - len(GAP) > width:
        shown.pop()
    lines = [Text(GAP.join(_aligned(each.head, each) for each in shown), style="bold")]
    for row in range(len(columns[0].cells)):
        cells = [(_aligned(each.cells[row], each), each.styles[row] if each.styles else "") for each in shown]
        lines.append(Text(GAP).join(Text(*cell) for cell in cells))
    for line in lines:
        line.rstrip()
    return lines


def _aligned(text: str, column: Column) -> str:
    space = " " * (column.width - cell_len(text))
    return text + space if column.is_left else space + text


def runs_lines(runs: Mapping[str, RunFiles], place: Place, *, where: Path, left_out: int = 0) -> list[Text]:
    """A table of runs, the newest first."""
    going, count = sum(run.state == "going" for run in runs.values()), len(runs) + left_out
    words = Text(f"{counted(count, 'run')}, {going} under way", style=STYLES["busy" if going else "good"])
    shown = dict(list(runs.items())[: max(1, place.height - 5)])
    rows = [_row(run, place) for run in shown.values()]
    tones = [STYLES[state_in_words(run)[1]] for run in shown.values()]
    columns = [
        Column(
            name, [row[name] or "-" for row in rows], is_left=name == "state", styles=tones if name == "state" else ()
        )
        for name in (rows[0] if rows else ())
        if any(row[name] for row in rows)
    ]
    while len(columns) > 1 and sum(each.width + len(GAP) for each in columns) + NAME > place.width:
        columns.pop()
    space = max(NAME // 2, place.width - sum(each.width + len(GAP) for each in columns))
    names = [_fitted(printable(name), space) for name in shown]
    table = table_lines([Column("run", names, is_left=True), *columns], place.width) if names else []
    left, mixed = count - len(shown), [Text(MIXED, style="dim")] if is_mixed([*runs.values()]) else []
    lines = [_between(Text(printable(str(where)), style="bold"), words, place.width), Text(), *table]
    return _finished([*lines, *([Text(f"and {left:,} older", style="dim")] if left else []), *mixed], place)


def short_state(run: RunFiles) -> str:
    """The run's state in a word or two."""
    return state_in_words(run)[0].partition(":")[0].partition(",")[0]


def _row(run: RunFiles, place: Place) -> dict[str, str]:
    progress, best = progress_of(run, clock=place.clock), best_of(run)
    of = f"/{in_short(progress.epochs)}" if progress.epochs else ""
    rate, loss = last_of(run, "train/images_per_second"), last_of(run, "train/loss")
    return {
        "state": short_state(run),
        "epoch": f"{in_short(progress.epoch)}{of}",
        "best": f"{best[0]:.2f}%" if best else "",
        "images/s": epochs.rate(rate) if rate is not None else "",
        "left": span(progress.seconds_left) if progress.seconds_left is not None else "",
        "train loss": epochs.loss(loss) if loss is not None else "",
    }


def _fitted(text: str, width: int) -> str:
    """The text, shortened in the middle if it is too long: both ends distinguish a run's name from others."""
    if cell_len(text) <= width:
        return text
    half = max(1, (width - 1) // 2)
    return f"{text[: width - 1 - half]}…{text[-half:]}"


def _finished(lines: Sequence[Text], place: Place) -> list[Text]:
    """The lines cut to the width of the terminal, in characters that it can show."""
    if not place.has_unicode:
        lines = [Text.assemble(*((each.plain.translate(ASCII), each.style),)) for each in lines]
    for line in lines:
        line.truncate(place.width)
    return list(lines)
