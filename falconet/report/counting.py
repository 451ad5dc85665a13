"""How far a long piece of work on the host has come: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from falconet.report.screen import Lines

GLANCE = 0.1  # seconds between two looks of the bar
SILENCE = 10.0  # seconds between lines where there is no terminal


class Counting:
    """A count that goes up, to `total` where that is known; shown on standard error, which no output is mixed with."""

    def __init__(self, what: str, *, total: int | None = None, quiet: bool = False) -> None:
        self._console = Lines(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total)
        self._what, self._total = what, total
        self._count, self._said = 0, time.monotonic()
        self._every = GLANCE if self._console.is_terminal else SILENCE

    def add(self, count: int = 1) -> None:
        self._count += count
        now = time.monotonic()
        if now - self._said < self._every:
            return
        self._said = now
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._count)
        else:
            of = f" of {self._total:,}" if self._total is not None else ""
            self._console.print(f"{self._what}: {self._count:,}{of}", markup=False, emoji=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
