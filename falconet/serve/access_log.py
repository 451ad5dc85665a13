"""The access log: a line of JSON per request, written by a thread, so that no disk or reader holds up an answer."""

import contextlib
import json
import os
import queue
import threading
from datetime import UTC, datetime
from pathlib import Path

from falconet.errors import ConfigError
from falconet.serve.records import LONGEST, Record

STDOUT = Path("-")
MOST_WAITING = 10_000  # lines; further ones are lost
MOST_AT_ONCE = 256  # lines in one write
FLUSH_SECONDS = 2.0  # at the end, to write what is waiting
# Non-blocking, because opening a pipe would wait for its reader.
_APPENDED = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC


class AccessLog:
    """Writes records to stdout, or to a file, which it opens again after that was renamed or removed.

    What a full disk or a closed pipe does not take is lost and counted; a line is written whole or not at all.
    """

    def __init__(self, target: Path) -> None:
        self._path = None if target == STDOUT else target
        try:
            self._handle = 1 if self._path is None else _opened(self._path)
        except OSError as error:
            raise ConfigError(f"--access-log: {target}: {error.strerror or error}") from error
        self._records: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._half = b""  # the rest of a line that a full disk took only the beginning of
        self.lost = 0
        self._thread = threading.Thread(target=self._write_all, name="access-log", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        """Write a record soon."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Write what is waiting, unless that takes long."""
        try:
            self._records.put(None, timeout=FLUSH_SECONDS)
        except queue.Full:
            return
        self._thread.join(FLUSH_SECONDS)
        if self._path is not None and not self._thread.is_alive():
            os.close(self._handle)

    def _write_all(self) -> None:
        ends = False
        while not ends:
            batch = [self._records.get()]
            while len(batch) < MOST_AT_ONCE and not self._records.empty():  # only this thread takes from it
                batch.append(self._records.get())
            ends = None in batch
            self._write([line(record) for record in batch if record is not None])

    def _write(self, lines: list[bytes]) -> None:
        """Write whole lines; those that do not fit are lost, except the rest of one that was begun."""
        with contextlib.suppress(OSError):  # the folder is gone: the old file stays
            self._follow_rotation()
        data = self._half + b"".join(lines)
        left = _put(self._handle, data)
        written = data[: len(data) - len(left)]
        is_torn = bool(left) and not (written.endswith(b"\n") if written else not self._half)
        self._half = left[: left.index(b"\n") + 1] if is_torn else b""
        self.lost += left.count(b"\n") - is_torn

    def _follow_rotation(self) -> None:
        if self._path is None:
            return
        mine = os.fstat(self._handle)
        try:
            found = self._path.stat()
            is_same = (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
        except FileNotFoundError:
            is_same = False
        if not is_same:
            fresh = _opened(self._path)
            os.close(self._handle)
            self._handle, self._half = fresh, b""


def _opened(path: Path) -> int:
    handle = os.open(path, _APPENDED, 0o640)
    os.set_blocking(handle, True)
    return handle


def _put(handle: int, data: bytes) -> bytes:
    """Write data and return what was not taken."""
    with contextlib.suppress(OSError):  # a full disk, a closed pipe: the next batch tries again
        while data:
            data = data[os.write(handle, data) :]
    return data


def line(record: Record) -> bytes:
    """A record as a line of JSON, without what is unknown."""
    content: dict[str, object] = {
        "time": datetime.fromtimestamp(record.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "id": record.id,
        "client": record.client,
        "method": record.method,
        "path": record.route or record.path,
        "status": int(record.status) if record.status.isdigit() else record.status,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "milliseconds": {
            "total": _milliseconds(record.seconds),
            **{name: _milliseconds(stage.seconds) for name, stage in record.stages.items()},
        },
    }
    if record.model:
        content |= {"model": record.model, "version": record.version}
    if record.photos:
        content |= {"photos": record.photos, "unreadable": record.unreadable}
    if record.images:
        content["images"] = record.images
    if record.reason or record.error:
        content |= {"reason": record.reason, "error": record.error[:LONGEST]}
    if record.trace:
        content["trace"] = record.trace
    return json.dumps(content).encode() + b"\n"


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
