"""What a person sees of a run: lines, progress bars, and numbers with their nouns."""

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from falconet import exits
from falconet.errors import printable
from falconet.parallel import environment

if TYPE_CHECKING:
    from falconet.parallel.world import World  # imports torch, which a line printed by `bench` does not need

T = TypeVar("T")
Say = Callable[[str], None]  # takes a line
PSEUDO = "OMPI_COMM_WORLD_RANK"  # Open MPI gives processes a terminal even when their output goes to a file
GLANCE = 0.1  # seconds between updates of the bar
SILENCE = 10.0  # seconds between lines without a terminal


def counted(number: int, word: str) -> str:
    """`1 epoch`, `2,000 epochs`, `3 classes`."""
    many = "es" if word.endswith(("s", "tch")) else "s"
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}{many}"


def are(number: int, word: str) -> str:
    """`1 core is`, `2 cores are`."""
    return f"{counted(number, word)} {'is' if number == 1 else 'are'}"


class Lines(Console):
    """A console that stops printing when its reader closes it: `| head`, a `tee` ended by Ctrl-C, a closed terminal."""

    is_closed = False

    def print(self, *objects: Any, **named: Any) -> None:
        """Print; the lines of a text, which may hold names of any file, act on no terminal."""
        super().print(*(_inert(each) if isinstance(each, str) else each for each in objects), **named)

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        """Catch the error of a closed terminal here, where all output is written, also that of the bar's thread."""
        try:
            super().__exit__(kind, error, at)
        except OSError as lost:
            if lost.errno != errno.EIO:
                raise
            exits.forget_lost_terminal([self.file.fileno()])

    def on_broken_pipe(self) -> None:
        """Stop printing; rich would end the process, even in the middle of an update."""
        self.quiet = self.is_closed = True


def _inert(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


class Screen:
    """Lines, with a progress bar of the whole run below them on a terminal.

    If stdout is closed during training, the lines continue on stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Lines(highlight=False, soft_wrap=True)
        self._aside: Lines | None = None
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal or PSEUDO in os.environ,
        )
        self._task = self._bar.add_task("", total=None, note="", visible=False)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False)  # so that paths appear unchanged
        if self._aside and isinstance(self.console, Lines) and self.console.is_closed:
            self.console, self._aside = self._aside, None
            self.line("stdout was closed; continuing on stderr")
            self.line(text)

    def begin(self, *, total: int, done: int) -> None:
        """Show the bar of a run of `total` updates, or without a terminal a line, because an epoch may take hours."""
        self._aside = Lines(stderr=True, highlight=False, soft_wrap=True)
        if self._bar.disable and done < total:
            self.line(f"training starts: update {done + 1:,} of {total:,}")
        self._bar.update(self._task, total=total, completed=done, visible=True)
        self._bar.start()

    def counts(self, updates: Iterable[T], *, epoch: str) -> Iterator[T]:
        """Pass the updates through; the bar advances as each is done."""
        self._bar.update(self._task, description=epoch)
        for update in updates:
            yield update
            self._bar.advance(self._task)

    def note(self, text: str) -> None:
        """Show a short text beside the bar."""
        self._bar.update(self._task, note=text)

    def end(self) -> None:
        self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


class Counting:
    """A counter, up to `total` if that is known; on stderr, so that it does not mix with output."""

    def __init__(self, what: str, *, total: int | None = None, quiet: bool = False) -> None:
        self._console = Lines(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(printable(what), total=total)
        self._what, self._total = what, total
        self._count, self._shown = 0, time.monotonic()
        self._every = GLANCE if self._console.is_terminal else SILENCE

    def add(self, count: int = 1) -> None:
        self._count += count
        now = time.monotonic()
        if now - self._shown < self._every:
            return
        self._shown = now
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


def screen_of(world: "World") -> Screen:
    """A screen that only the first process prints to."""
    return Screen() if world.is_first else Screen(Console(quiet=True))


def spoken(world: "World | None" = None) -> Say:
    """A function that prints lines about this process; those of other ranks start with the rank.

    Before there is a world, only the first process prints.
    """
    if world is None:
        place = environment.find_place(os.environ)
        return Screen(Console(quiet=True) if place and place.rank else None).line
    plain = Screen()
    return plain.line if world.is_first else lambda text: plain.line(f"rank {world.rank}: {text}")
