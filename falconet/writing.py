"""Write files below a folder without following symbolic links inside it.

The user names the folder itself, which may be a link. Everything below it is opened from its descriptor, part by part,
without following links: a run folder or a data folder may come from another person.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path

from falconet.errors import NO_ROOM, ConfigError, LinkError

SCRATCH, MARK = "falconet-scratch-", ".scratch"  # a folder's name starts with the first, and it holds the second
ABANDONED = 60.0  # seconds without a new file; the workers of a killed launcher end within half of that
_OURS = re.compile(rf"{SCRATCH}[a-z0-9_]{{8}}")
MODE, FOLDER_MODE = 0o666, 0o777  # before the umask
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, because opening a pipe would wait for its reader.
_GROWING = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def could_name_a_file(text: str) -> bool:
    """Whether the system takes it in a name: no NUL, and half characters only as Python reads stray bytes."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def coded(text: str) -> bytes:
    """The text as a file holds it: bytes of names that are not UTF-8 are escaped, as on the screen."""
    return text.encode("utf-8", "backslashreplace")


def replace(folder: Path, name: str, content: str | bytes) -> None:
    """Write a whole file under an unpredictable name, then rename it. `name` may be `subfolder/file`."""
    data = coded(content) if isinstance(content, str) else content
    with _below(folder, name) as (parent, last):
        _refuse_link(folder / name, last, parent)
        aside = f".{last}.{secrets.token_hex(8)}"
        handle = os.open(aside, _NEW, MODE, dir_fd=parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(aside, last, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside, dir_fd=parent)
            raise


def growing(folder: Path, name: str) -> int:
    """The descriptor of a file to read and append to, created if missing; the caller closes it."""
    with _below(folder, name) as (parent, last):
        _refuse_link(folder / name, last, parent)
        handle = os.open(last, _GROWING, MODE, dir_fd=parent)  # fails with ELOOP if it has become a link since
        state = os.fstat(handle)
        if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
            return handle
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(state.st_mode):
                raise OSError(f"{folder / name}: is not a regular file")
            content = file.read()
    replace(folder, name, content)  # other hard links keep the old content
    return growing(folder, name)


def keep_lines(folder: Path, name: str, keep: Callable[[bytes], bool]) -> None:
    """Remove the other lines of a file, and half a line at its end; nothing is written if there are none."""
    if not (folder / name).exists():
        return
    with os.fdopen(growing(folder, name), "rb") as file:
        lines = file.read().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and keep(line)]
    if len(kept) < len(lines):
        replace(folder, name, b"".join(kept))


def put(file: FileIO, data: bytes) -> bytes:
    """Write to a file; returns what a full disk did not take."""
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
    return data


class GrowingFile:
    """A file that grows by whole lines. What a full disk does not take is kept, and written before the next line."""

    def __init__(self, path: Path) -> None:
        handle = growing(path.parent, path.name)
        self._file, self._left = FileIO(handle, "ab"), b""
        self._drop_half_a_line()  # which a killed process may have left

    def add(self, line: str) -> None:
        self._left = put(self._file, self._left + coded(line) + b"\n")

    def close(self) -> None:
        """Raise the error of a disk that is still full, unless another error ends the run, which matters more."""
        ends_badly = sys.exception() is not None
        with self._file:
            try:
                while self._left:
                    self._left = self._left[self._file.write(self._left) :]
            except OSError:
                self._drop_half_a_line()
                if not ends_badly:
                    raise

    def _drop_half_a_line(self) -> None:
        with os.fdopen(self._file.fileno(), "rb", closefd=False) as file:
            file.seek(0)
            os.ftruncate(self._file.fileno(), file.read().rfind(b"\n") + 1)


def subfolder(folder: Path, name: str) -> Path:
    """A folder in a folder, created if missing."""
    with _below(folder, f"{name}/any"):
        return folder / name


def probe(folder: Path) -> None:
    """Raise the error that writing to a folder would raise."""
    with _below(folder, f".writable-{secrets.token_hex(8)}") as (parent, name):
        os.close(os.open(name, _NEW, MODE, dir_fd=parent))
        os.unlink(name, dir_fd=parent)


@contextlib.contextmanager
def explained(what: Path | str, *, option: str | None = None) -> Iterator[None]:
    """Report a failure to write in one line, which names what was to be written and the option that chose the place."""
    try:
        yield
    except LinkError as error:
        if option is None:
            raise
        raise LinkError(error.path, option) from None
    except OSError as error:
        place = "" if option is None else f"{option}: "
        raise ConfigError(f"{place}cannot write {what}: {error.strerror or error}") from error


def require_writable(path: Path, option: str) -> None:
    """Create the folder of a file, and refuse now what could not be written after hours of work."""
    with explained(f"to {path}", option=option):
        path.parent.mkdir(parents=True, exist_ok=True)
        probe(path.parent)
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder, expected a file")


def require_replaceable(path: Path, option: str) -> None:
    """The same for a file that `replace` is to write, which goes through no link."""
    require_writable(path, option)
    with explained(f"to {path}", option=option):
        refuse_links(path.parent, [path.name])


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """A private folder in the temporary directory, removed at the end; what killed processes left goes first."""
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as name:
        handle = os.open(name, _FOLDER)
        try:
            with contextlib.suppress(OSError):  # a file system without locks; nothing is swept there either
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(MARK, _NEW, 0o600, dir_fd=handle))
            yield name
        finally:
            os.close(handle)


def _sweep(folder: Path) -> None:
    """Remove the scratch folders of this user that no process holds; the system frees the lock of a killed one."""
    try:
        found = [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]
    except OSError:  # a directory that may not be listed
        return
    for path in found:
        with contextlib.suppress(OSError):  # in use, another user's, or swept by another process as well
            handle = os.open(path, _FOLDER | os.O_NOFOLLOW)
            try:
                state = os.fstat(handle)
                private = state.st_uid == os.geteuid() and stat.S_IMODE(state.st_mode) == 0o700
                if private and time.time() - state.st_mtime >= ABANDONED:
                    os.stat(MARK, dir_fd=handle, follow_symlinks=False)  # else it is a folder of the user's
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse now what would be refused after hours of work."""
    with _below(folder, "any") as (parent, _):
        for name in names:
            _refuse_link(folder / name, name, parent)


@contextlib.contextmanager
def _below(folder: Path, name: str) -> Iterator[tuple[int, str]]:
    """The descriptor of the folder that holds `name`, and the last part of the name; subfolders are created."""
    *subfolders, last = name.split("/")
    assert last not in ("", ".", ".."), name
    parent, path = os.open(folder, _FOLDER), folder
    try:
        for part in subfolders:
            path /= part
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, FOLDER_MODE, dir_fd=parent)
            _refuse_link(path, part, parent)
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = inner
        yield parent, last
    except OSError as error:
        if error.filename is not None and not isinstance(error.filename, int):
            error.filename = str(folder / name)  # the whole path, not only the part below the descriptor
        raise
    finally:
        os.close(parent)


def _refuse_link(path: Path, name: str, parent: int) -> None:
    """Refuse a link with a clear message; the open flags refuse it anyway."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise LinkError(path)
