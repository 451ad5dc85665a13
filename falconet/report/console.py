"""The terminal output of a run: lines, progress bars, and numbers with their nouns."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment

from falconet import exits
from falconet.errors import printable
from falconet.parallel import environment
from falconet.report import epochs
from falconet.report.throughput import Pace

if TYPE_CHECKING:
    from falconet.parallel.world import World  # imports torch, which a line printed by `bench` does not need

T = TypeVar("T")
Say = Callable[[str], None]  # takes a line
PSEUDO = "OMPI_COMM_WORLD_RANK"  # Open MPI gives processes a terminal even when their output goes to a file
GLANCE = 0.1  # seconds between updates of the bar
ECHO = 4  # columns right of a bar, for the ^C that a terminal shows there: a bar that wraps cannot be erased
SILENCE = 10.0  # seconds between lines of a counter without a terminal


def counted(number: int, word: str) -> str:
    """`1 epoch`, `2,000 epochs`, `3 classes`."""
    many = "es" if word.endswith(("s", "tch")) else "s"
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}{many}"


def are(number: int, word: str) -> str:
    """`1 core is`, `2 cores are`."""
    return f"{counted(number, word)} {'is' if number == 1 else 'are'}"


def padded(text: str, width: int) -> str:
    """The text with spaces up to a width in a terminal's columns, of which a character may take none, one or two."""
    return text + " " * (width - cell_len(text))


class Notice:
    """One line on a terminal, shown until anything else is printed; a counter may replace it. A pipe gets none."""

    def __init__(self) -> None:
        self._text = ""
        self._stream: TextIO | None = None  # rich replaces sys.stderr while it shows a bar

    def begin(self, text: str) -> None:
        is_plain = os.environ.get("TERM") == "dumb" or PSEUDO in os.environ
        if not is_plain and all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)):
            self._text, self._stream = text, sys.stderr
            self.show()

    def show(self) -> None:
        """Show it again, unless it has ended."""
        self._write(f"{self._text}\r")  # lines of a library overwrite it, too

    def erase(self) -> None:
        self._write("\x1b[K")

    def end(self) -> None:
        self.erase()
        self._stream = None

    def _write(self, text: str) -> None:
        if self._stream:
            with contextlib.suppress(OSError):  # the terminal is gone
                self._stream.write(text)
                self._stream.flush()


NOTICE = Notice()  # there is one terminal


class Noticed:
    """Shows the notice just before a module is imported within this context."""

    def __init__(self, module: str, text: str) -> None:
        self._module, self._text = module, text

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        """Show the notice; Python calls this before the first import of a module, which other finders then load."""
        if name == self._module:
            NOTICE.begin(self._text)


class Lines(Console):
    """A console that stops printing when its reader closes it: `| head`, a `tee` ended by Ctrl-C, a closed terminal."""

    is_closed = False

    def print(self, *objects: Any, **named: Any) -> None:
        """Print text; names of files in it cannot control the terminal."""
        super().print(*(_inert(each) if isinstance(each, str) else each for each in objects), **named)

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        """Catch the error of a closed terminal here, where all output is written, including the bar thread's."""
        try:
            super().__exit__(kind, error, at)
        except OSError as lost:
            if lost.errno != errno.EIO:
                raise
            exits.forget_lost_terminal([self.file.fileno()])

    def on_broken_pipe(self) -> None:
        """Stop printing; rich would end the process, even in the middle of an update."""
        self.quiet = self.is_closed = True


class Bar(Progress):
    """A progress bar that leaves some columns of the terminal free."""

    def get_renderables(self) -> Iterable[RenderableType]:
        return map(Narrower, super().get_renderables())


class Narrower:
    """A renderable that leaves the last columns of the terminal free."""

    def __init__(self, drawn: RenderableType) -> None:
        self._drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        return console.render(self._drawn, options.update_width(max(1, options.max_width - ECHO)))


def _inert(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


class Screen:
    """Lines, and below them the progress of training: a bar on a terminal, one changing line in a notebook.

    Anywhere else, such as in a pipe, it is a line from time to time. If stdout is closed during training, the lines
    continue on stderr.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        words: Callable[[str], str] = str,
    ) -> None:
        """`words`: rewrites each line for the program that was started, whose options may have other names."""
        self.console = console or Lines(highlight=False, soft_wrap=True, force_jupyter=False)
        self._clock, self._words = clock, words
        self._aside: Lines | None = None
        is_live = self.console.is_terminal and not self.console.is_dumb_terminal and PSEUDO not in os.environ
        self._cell = CellLine(self.console) if is_notebook(self.console.file) else None
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[note]}", markup=False),
            console=self.console,
            transient=True,
            disable=not is_live,
        )
        self._task = self._bar.add_task("", total=None, note="", visible=False)
        self._pace: Pace | None = None
        self._epoch = ""
        self._heartbeat: float | None = None  # seconds
        self._glanced = self._printed = clock()

    def line(self, text: str) -> None:
        NOTICE.end()
        if self._cell:
            self._cell.erase()
        self.console.print(self._words(text), markup=False, emoji=False)  # so that paths appear unchanged
        self._printed = self._clock()
        if self._aside and isinstance(self.console, Lines) and self.console.is_closed:
            self.console, self._aside = self._aside, None
            self.line("stdout was closed; continuing on stderr")
            self.line(text)

    @property
    def is_drawable(self) -> bool:
        """Whether plots of characters are shown: only on a wide terminal that has the characters, never in a log."""
        is_live = self.console.is_terminal and not self.console.is_dumb_terminal and PSEUDO not in os.environ
        return is_live and self.console.encoding == "utf-8" and self.console.width >= epochs.NARROW

    def begin(self, *, total: int, done: int, images: int, heartbeat: float | None) -> None:
        """Show a run of `total` updates with `images` each.

        Where nothing can be redrawn, a line is printed after `heartbeat` seconds without one, because an epoch may take
        hours; None: one line, now.
        """
        self._aside = Lines(stderr=True, highlight=False, soft_wrap=True, force_jupyter=False)
        self._pace = Pace(total=total, done=done, images=images, clock=self._clock)
        self._heartbeat = heartbeat
        if self._bar.disable and heartbeat is None and done < total:
            self.line(f"training starts: update {done + 1:,} of {total:,}")
        self._bar.start()

    def counts(self, updates: Iterable[T], *, epoch: str, total: int, done: int) -> Iterator[T]:
        """Pass the updates of an epoch through and count each when it is done; `done` of `total` were made before."""
        assert self._pace is not None
        pace, self._epoch = self._pace, epoch
        pace.begin_epoch(total=total, done=done)
        note = _in_words(pace)  # the speed and the time left are not known yet; those shown are of the last epoch
        self._bar.update(self._task, description=epoch, total=total, completed=done, note=note, visible=True)
        for update in updates:
            yield update
            pace.add()
            self.glance(last=pace.epoch_done == total)

    def show(self, loss: float) -> None:
        """Take the loss of an update into the smoothed loss that is shown."""
        if self._pace:
            self._pace.show(loss)

    def glance(self, doing: str = "", *, last: bool = False) -> None:
        """Show the current state, or what happens after the last update of an epoch, unless it was just shown."""
        now = self._clock()
        if self._pace is None or (now - self._glanced < GLANCE and not last):
            return
        self._glanced = now
        self._pace.mark()
        note = doing or _in_words(self._pace)
        done = self._pace.epoch_total if doing else self._pace.epoch_done
        text = f"{self._epoch}  {100 if doing else self._pace.percent:3.0f}%  {note}".lstrip()
        self._bar.update(self._task, completed=done, note=note, visible=True)
        if self._cell:
            self._cell.show(text)
        elif self._bar.disable and self._heartbeat is not None and now - self._printed >= self._heartbeat:
            self.line(text)

    def hide(self) -> None:
        """Hide the bar until there is something to count again."""
        self._bar.update(self._task, visible=False, refresh=True)

    def end(self) -> None:
        if self._cell:
            self._cell.erase()
        self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


def _in_words(pace: Pace) -> str:
    """`loss 0.2153  2,786 images/s  eta 12.0s, run 4m10s`, without parts that are not known yet."""
    words = [] if pace.loss is None else [f"loss {epochs.loss(pace.loss)}"]
    if pace.images_per_second is not None:
        words.append(f"{epochs.rate(pace.images_per_second)} images/s")
    if pace.epoch_seconds_left is not None and pace.run_seconds_left is not None:
        words.append(f"eta {epochs.span(pace.epoch_seconds_left)}, run {epochs.span(pace.run_seconds_left)}")
    return "  ".join(words)


def is_notebook(file: object) -> bool:
    """Whether output to this file appears in the cell of a notebook."""
    return type(file).__module__.startswith("ipykernel")


class CellLine:
    """One line at the end of a notebook's cell that is written over."""

    def __init__(self, console: Console) -> None:
        self._console, self._length = console, 0

    def show(self, text: str) -> None:
        self._write(f"\r{printable(text).ljust(self._length)}")
        self._length = len(text)

    def erase(self) -> None:
        if self._length:
            self._write(f"\r{' ' * self._length}\r")
            self._length = 0

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class Counting:
    """A counter, up to `total` if that is known; on stderr, so that it does not mix with output."""

    def __init__(
        self, what: str, *, total: int | None = None, quiet: bool = False, console: Console | None = None
    ) -> None:
        """`console`: prints lines above the counter meanwhile."""
        self._console = console or Lines(stderr=True, highlight=False, soft_wrap=True, force_jupyter=False)
        self._quiet = quiet
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}" + (f" of {total:,}" if total is not None else "")),
            TimeElapsedColumn(),
            *([TextColumn("eta"), TimeRemainingColumn()] if total is not None else []),
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
        if self._quiet or now - self._shown < self._every:
            return
        self._shown = now
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._count)
        else:
            of = f" of {self._total:,}" if self._total is not None else ""
            self._console.print(f"{self._what}: {self._count:,}{of}", markup=False, emoji=False)

    def __enter__(self) -> Self:
        NOTICE.erase()
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
        NOTICE.show()


def screen_of(world: "World", *, words: Callable[[str], str] = str) -> Screen:
    """A screen on which only the first process prints, or the first of each host."""
    is_heard = world.is_first or environment.prints(os.environ)
    return Screen(words=words) if is_heard else Screen(Console(quiet=True))


def spoken(world: "World | None" = None, *, words: Callable[[str], str] = str) -> Say:
    """A function that prints lines about this process; those of other ranks start with the rank.

    Before there is a world, only the first process prints.
    """
    if world is None:
        place = environment.find_place(os.environ)
        return Screen(Console(quiet=True) if place and place.rank else None, words=words).line
    plain = Screen(words=words)
    return plain.line if world.is_first else lambda text: plain.line(f"rank {world.rank}: {text}")
