"""How a run goes on that ended before its end."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

from falconet.checkpoint.files import checkpoints_in
from falconet.errors import CheckpointError, DiskError, Interrupted

FULL = (errno.ENOSPC, errno.EDQUOT)


def how_to_go_on(folder: Path, checkpoints: Path) -> str:
    """The command that continues a run, if it has left anything to continue from."""
    if checkpoints.is_dir() and checkpoints_in(checkpoints):
        return f"to continue: {restore_line(folder, checkpoints)}"
    return "there is no checkpoint to continue from: the same command begins again"


def restore_line(folder: Path, checkpoints: Path) -> str:
    """The command itself: the run folder is enough where its checkpoints lie in it; from elsewhere they lead to it."""
    found = folder if checkpoints in (folder, folder / "checkpoints") else checkpoints
    return f"falconet restore --checkpoint-input-path {found}"


@contextlib.contextmanager
def interruption_explained(say: Callable[[str], None], words: Callable[[], str]) -> Iterator[None]:
    """What a Ctrl-C cost that nobody waited for, or a second one: said when what it interrupted has ended."""
    try:
        yield
    except KeyboardInterrupt:
        say(words())
        raise Interrupted from None


@contextlib.contextmanager
def full_disk_explained(folder: Path, checkpoints: Path) -> Iterator[None]:
    """A disk that was full for a run's files, or for its last checkpoint, as one line that says how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise DiskError(f"the disk is full{where}; make room; {how_to_go_on(folder, checkpoints)}") from error
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in FULL:
            raise
        raise CheckpointError(f"{error}; make room; {how_to_go_on(folder, checkpoints)}") from error
