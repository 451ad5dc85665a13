"""How a run goes on that ended before its end."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from falconet.checkpoint.files import checkpoints_in
from falconet.errors import NO_ROOM, CheckpointError, DiskError, Interrupted
from falconet.report.screen import Say


def how_to_go_on(folder: Path, checkpoints: Path) -> str:
    """The command that continues a run, if it has left anything to continue from."""
    if checkpoints.is_dir() and checkpoints_in(checkpoints):
        return f"to continue: {restore_line(folder, checkpoints)}"
    return "there is no checkpoint to continue from: the same command begins again"


def restore_line(folder: Path, checkpoints: Path) -> str:
    """The command itself: the run folder is enough where its checkpoints lie in it; elsewhere, both are named."""
    command = ["falconet", "restore", "--checkpoint-input-path"]
    if checkpoints in (folder, folder / "checkpoints"):
        return shlex.join([*command, str(folder)])
    return shlex.join([*command, str(checkpoints), "--run-dir", str(folder)])


@contextlib.contextmanager
def interruption_explained(say: Say, words: Callable[[], str]) -> Iterator[None]:
    """What a Ctrl-C cost that nobody waited for, or a second one: said when what it interrupted has ended."""
    try:
        yield
    except KeyboardInterrupt:
        say(words())
        raise Interrupted from None


@contextlib.contextmanager
def full_disk_explained(folder: Path, checkpoints: Path) -> Iterator[None]:
    """No room for a run's files, or for its last checkpoint, as one line that says how to go on."""
    try:
        yield
    except OSError as error:
        found = NO_ROOM.get(error.errno or 0)
        if found is None:
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise DiskError(f"{found.why}{where}; {found.helps}; {how_to_go_on(folder, checkpoints)}") from error
    except CheckpointError as error:
        cause = error.__cause__
        found = NO_ROOM.get(cause.errno or 0) if isinstance(cause, OSError) else None
        if found is None:
            raise
        raise CheckpointError(f"{error}; {found.helps}; {how_to_go_on(folder, checkpoints)}") from error
