"""A checkpoint that several processes write: each its own slices, then the first one the manifest.

They meet in a hidden folder beside the checkpoint's, which all of them see. A record there says that the files of a
process are on the disk; when all records are there, the first process writes the manifest and renames the folder.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import safetensors.torch
from torch import Tensor

from falconet import writing
from falconet.checkpoint import format
from falconet.checkpoint.disk import FileRecord, aside, move_into_place, sync_folder, write_bytes
from falconet.checkpoint.format import refuse_to_replace_other_things, storable
from falconet.checkpoint.manifest import MANIFEST, SUFFIX, Part, part_of, read_manifest, write_manifest
from falconet.errors import CheckpointError
from falconet.parallel.slices import Slice

POLL = 0.02  # seconds between two looks for the others' records

Slices = Mapping[str, Sequence[Slice]]  # by stem: model, optimizer and so on


@dataclass(frozen=True)
class Meeting:
    """Where the processes meet, and what becomes of it."""

    temporary: Path
    folder: Path
    size: int  # processes

    def record(self, rank: int) -> Path:
        return self.temporary / f"rank-{rank:05d}.json"


def write_slices(meeting: Meeting, slices: Slices, *, rank: int) -> None:
    """Write what this process holds, then the record of it, or of why there is none."""
    try:
        meeting.temporary.parent.mkdir(parents=True, exist_ok=True)
        writing.subfolder(meeting.temporary.parent, meeting.temporary.name)
        records, parts = {}, {}
        for stem, held in slices.items():
            file = f"{stem}-{rank:05d}{SUFFIX}"
            parts[stem] = [asdict(_part(each, file)) for each in held]
            if held:
                values = {_part(each, file).key: each.values for each in held}
                data = safetensors.torch.save(storable(values))
                records[file] = asdict(write_bytes(meeting.temporary / file, memoryview(data)))
        sync_folder(meeting.temporary)
        _write_record(meeting.record(rank), {"files": records, "parts": parts})
    except OSError as error:
        text = f"cannot save {meeting.folder}: {error.strerror or error}"
        _give_up(meeting, rank, text)
        raise CheckpointError(text) from error


def complete(meeting: Meeting, content: Mapping[str, object], *, patience: Callable[[], float]) -> None:
    """Once every process has written its slices, make it a checkpoint; the first process does this.

    `patience`: seconds to wait while nothing is written at all.
    """
    try:
        refuse_to_replace_other_things(meeting.folder)
        files: dict[str, FileRecord] = {}
        parts: dict[str, list[Part]] = {}
        for rank, record in enumerate(_records(meeting, patience)):
            files |= {name: FileRecord(**entry) for name, entry in record["files"].items()}
            for stem, entries in record["parts"].items():
                parts.setdefault(stem, []).extend(part_of(entry, where=meeting.record(rank)) for entry in entries)
        for rank in range(meeting.size):
            meeting.record(rank).unlink()
        write_manifest(meeting.temporary / MANIFEST, content, files, parts)
        read_manifest(meeting.temporary)  # refuses slices that do not make up their tensors
        sync_folder(meeting.temporary)
        move_into_place(meeting.temporary, meeting.folder)
    except OSError as error:
        raise CheckpointError(f"cannot save {meeting.folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(meeting.temporary, ignore_errors=True)  # not there any more if all went well


def _part(held: Slice, file: str) -> Part:
    kind = str(held.values.dtype).removeprefix("torch.")
    return Part(
        name=held.name,
        shape=held.shape,
        dtype=kind,
        begin=held.begin,
        end=held.end,
        file=file,
        channels_last=held.channels_last,
    )


def _write_record(path: Path, content: Mapping[str, object]) -> None:
    """There at once and whole, or not there."""
    begun = path.with_suffix(".begun")
    begun.unlink(missing_ok=True)  # left by one that a full disk cut short
    with begun.open("x", encoding="utf-8") as file:
        json.dump(content, file)
    begun.rename(path)


def _give_up(meeting: Meeting, rank: int, text: str) -> None:
    """Say so at once, so that the first process does not wait; a full disk has room again without our files."""
    if rank == 0:  # nobody completes it then
        shutil.rmtree(meeting.temporary, ignore_errors=True)
        return
    try:
        for path in meeting.temporary.glob(f"*-{rank:05d}{SUFFIX}"):
            path.unlink()
        _write_record(meeting.record(rank), {"error": text})
    except OSError:
        shutil.rmtree(meeting.temporary, ignore_errors=True)


def _records(meeting: Meeting, patience: Callable[[], float]) -> list[dict[str, Any]]:
    """What each process wrote, by rank."""
    found: dict[int, dict[str, Any]] = {}
    written, since = -1, time.monotonic()
    while len(found) < meeting.size:
        for rank in range(meeting.size):
            if rank not in found and meeting.record(rank).exists():
                found[rank] = json.loads(meeting.record(rank).read_bytes())
                if "error" in found[rank]:
                    raise CheckpointError(found[rank]["error"])
        if not meeting.temporary.exists():
            raise CheckpointError(f"cannot save {meeting.folder}: a process gave up")
        now, bytes_there = time.monotonic(), _size(meeting.temporary)
        if bytes_there != written:
            written, since = bytes_there, now
        if now - since > patience():
            missing = min(set(range(meeting.size)) - found.keys())
            raise CheckpointError(
                f"cannot save {meeting.folder}: nothing came from rank {missing} for {patience():g} s; wanted a folder"
                " that all processes share"
            )
        time.sleep(0.0 if len(found) == meeting.size else POLL)
    return [found[rank] for rank in range(meeting.size)]


def _size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # renamed, or given up, in the meantime
        total = sum(path.stat().st_size for path in folder.iterdir())
    return total


GRACE = 10.0  # seconds that the others' slices are waited for when the run ends with an error: they may be dead
HASTE = 1.0  # the same where somebody insisted on the end: the others may not have begun to write


class Saveable(Protocol):
    """What can be saved: whole by one process, in slices by several."""

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]: ...
    def slices(self) -> Slices: ...


class Writer:
    """Writes one checkpoint at a time in a thread of its own; what went wrong is raised by the next call."""

    def __init__(self) -> None:
        # Python joins these threads at exit, so a save under way is finished even if nobody waits.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def save_state(
        self,
        folder: Path,
        state: Saveable,
        content: Mapping[str, object],
        *,
        after: Callable[[], None] | None = None,
    ) -> None:
        """`save` what a state holds."""
        self.save(folder, state.tensors(), content, after=after)

    def save(
        self,
        folder: Path,
        tensors: Mapping[str, Mapping[str, Tensor]],
        content: Mapping[str, object],
        *,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Copy the state and return; write it, then call `after`, in the background.

        Waits for the save before it. If that one failed, raises its error and starts nothing: call again to go on.
        """
        self.wait()
        snapshot = {stem: {name: _copied(tensor) for name, tensor in group.items()} for stem, group in tensors.items()}
        plain = _plain(content)
        self._begin(lambda: format.write(folder, snapshot, plain), after)

    def wait(self) -> None:
        """Until nothing is under way; raises what the last save raised, once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Finish, and take no more."""
        self._thread.shutdown(wait=True)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._thread.shutdown(wait=True)
        # What stopped the run is the news; a save that failed as well is a note to it.
        failed = self._under_way.exception() if self._under_way else None
        if failed is not None:
            error.add_note(str(failed))

    def _begin(self, write: Callable[[], None], after: Callable[[], None] | None) -> None:
        def run() -> None:
            write()
            if after is not None:
                after()

        self._under_way = self._thread.submit(run)


@dataclass(frozen=True, kw_only=True)
class Company:
    """The processes that save together."""

    rank: int
    size: int
    token: str  # the same on all of them, and on no other run: of it the hidden folder's name is made
    timeout: float  # seconds that the first one waits while nobody writes anything


class SharedWriter(Writer):
    """Writes what this process answers for, and, on the first one, completes what all have written."""

    def __init__(self, company: Company) -> None:
        super().__init__()
        self._company, self._saves, self._patience = company, 0, company.timeout

    def save_state(
        self,
        folder: Path,
        state: Saveable,
        content: Mapping[str, object],
        *,
        after: Callable[[], None] | None = None,
    ) -> None:
        """The same for a share of the state; `after` is called on the first process. Every process calls it."""
        self.wait()
        self._saves += 1
        place = aside(folder, "tmp", f"{self._company.token}{self._saves:04x}")
        meeting, plain = Meeting(place, folder, self._company.size), _plain(content)
        snapshot = {
            stem: [each._replace(values=_copied(each.values)) for each in slices]
            for stem, slices in state.slices().items()
        }
        first = self._company.rank == 0

        def write() -> None:
            write_slices(meeting, snapshot, rank=self._company.rank)
            if first:
                complete(meeting, plain, patience=lambda: self._patience)

        self._begin(write, after if first else None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self._patience = min(self._patience, HASTE if isinstance(error, KeyboardInterrupt) else GRACE)
        super().__exit__(kind, error, where)


def _copied(tensor: Tensor) -> Tensor:
    """A host copy that later updates do not reach; from a GPU this waits for the copy alone."""
    return tensor.detach().to("cpu", copy=True)


def _plain(content: Mapping[str, object]) -> dict[str, object]:
    """A copy too, and what JSON cannot hold is our mistake: fail here."""
    plain: dict[str, object] = json.loads(json.dumps(content))
    return plain
