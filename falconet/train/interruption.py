"""A run that ends before its last update: one line on why, the command that continues it, and what the folder keeps."""

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from falconet import writing
from falconet.checkpoint.format import checkpoints_in
from falconet.errors import (
    NO_ROOM,
    SHORTAGES,
    CheckpointError,
    DeviceError,
    DiskError,
    Interrupted,
    ShortageError,
    UnsavedError,
    UserError,
    WorldError,
    memory_shortage,
)
from falconet.report.console import Say
from falconet.report.run_files import ENDED
from falconet.train.plan import Phase


def how_to_continue(folder: Path, checkpoints: Path) -> str:
    """The command that continues a run, if it left a checkpoint."""
    if checkpoints.is_dir() and checkpoints_in(checkpoints):
        return f"to continue: {restore_line(folder, checkpoints)}"
    return "there is no checkpoint to continue from; the same command starts over"


def restore_line(folder: Path, checkpoints: Path) -> str:
    """The command names the run folder, and its checkpoints too where they lie elsewhere."""
    command = ["falconet", "restore"]
    if checkpoints in (folder, folder / "checkpoints"):
        return shlex.join([*command, str(folder)])
    return shlex.join([*command, str(checkpoints), "--run-dir", str(folder)])


@contextlib.contextmanager
def interruption_explained(say: Say, words: Callable[[], str]) -> Iterator[None]:
    """Turn a KeyboardInterrupt into Interrupted, and print what it cost once everything has ended."""
    try:
        yield
    except KeyboardInterrupt:
        say(words())
        raise Interrupted from None


@contextlib.contextmanager
def full_disk_explained(folder: Path, checkpoints: Path) -> Iterator[None]:
    """Turn a full disk into one line with the command that continues."""
    try:
        yield
    except OSError as error:
        found = NO_ROOM.get(error.errno or 0)
        if found is None:
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise DiskError(f"{found.why}{where}; {found.helps}; {how_to_continue(folder, checkpoints)}") from error
    except CheckpointError as error:
        cause = error.__cause__
        found = NO_ROOM.get(cause.errno or 0) if isinstance(cause, OSError) else None
        if found is None:
            raise
        raise CheckpointError(f"{error}; {found.helps}; {how_to_continue(folder, checkpoints)}") from error
    except UnsavedError as error:
        raise UnsavedError(f"{error}; {how_to_continue(folder, checkpoints)}") from error


@contextlib.contextmanager
def memory_explained(checkpoints: Path | None = None, phase: Phase | None = None) -> Iterator[None]:
    """Turn memory that ran out into one line with what needs less of it, and the newest checkpoint.

    `phase`: the one under way; None: there was no update yet.
    """
    try:
        yield
    except SHORTAGES as error:
        short = memory_shortage(error)
        if short is None:
            raise
        saved = checkpoints_in(checkpoints) if checkpoints and checkpoints.is_dir() else []
        newest = f"the newest checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        which = phase.prefix if phase else ""
        helps = (
            f"expected a smaller --{which}micro-batch-size with more --{which}gradient-accumulation, a smaller"
            " --validation-batch-size, or --enable-recompute"
        )
        if phase is None:
            raise DeviceError(f"{short}; {helps}; {newest}") from error
        raise ShortageError(short, helps=helps, after=newest, phase=phase.number) from error


class EndRecorded:
    """Leaves in the run folder how a run ended before its last update, for `falconet watch` and the report."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None in processes other than the first."""
        self._folder = folder

    def __enter__(self) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / ENDED).unlink()  # that of an earlier start

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._folder is None or error is None:
            return
        is_stopped = isinstance(error, KeyboardInterrupt | Interrupted)
        reason = str(error) if isinstance(error, UserError | WorldError) else type(error).__name__
        ending = {"kind": "interrupted"} if is_stopped else {"kind": "failed", "reason": reason}
        with contextlib.suppress(OSError, UserError):  # the disk may be full; the run's own error matters more
            writing.replace(self._folder, ENDED, json.dumps(ending) + "\n")
