"""Save checkpoints in the background, from one process or from several that each write a share."""

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

Slices = Mapping[str, Sequence[Slice]]  # by stem: model, optimizer and so on

POLL = 0.02  # seconds between looking for the other processes' records
GRACE = 10.0  # seconds to wait for the other processes when the run ends with an error: they may be dead
HASTE = 1.0  # the same after an interrupt: the other processes may not have started to write


class Saveable(Protocol):
    """State that one process saves as a whole, or several processes in slices."""

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]: ...
    def slices(self) -> Slices: ...


class Writer:
    """Writes one checkpoint at a time in a background thread; the next call raises what went wrong."""

    def __init__(self) -> None:
        # Python joins these threads at exit, so a save in progress is finished even without `wait`.
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
        """Save what a state holds; see `save`."""
        self.save(folder, state.tensors(), content, after=after)

    def save(
        self,
        folder: Path,
        tensors: Mapping[str, Mapping[str, Tensor]],
        content: Mapping[str, object],
        *,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Copy the state and return; in the background, write it and then call `after`.

        First waits for the previous save. If that one failed, raises its error and saves nothing; call again to retry.
        """
        self.wait()
        snapshot = {stem: {name: _copied(tensor) for name, tensor in group.items()} for stem, group in tensors.items()}
        plain = _plain(content)
        self._begin(lambda: format.write(folder, snapshot, plain), after)

    def amend(self, folder: Path, changes: Mapping[str, object], *, after: Callable[[], None] | None = None) -> None:
        """Replace entries of the manifest after the save in progress; if that save failed, this fails too."""
        before, plain = self._under_way, _plain(changes)

        def write() -> None:
            if before is not None:
                before.result()
            format.amend(folder, plain)

        self._begin(write, after)

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait for the save in progress and accept no more."""
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
        # Report what stopped the run; a save that failed as well is a note on it.
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
    """The processes that save together, seen from one of them."""

    rank: int
    size: int
    token: str  # shared by these processes and no other run; names the hidden folder
    timeout: float  # seconds that the first process waits while no process writes anything


class SharedWriter(Writer):
    """Writes this process's share; on the first process, also completes the checkpoint."""

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
        """Save this process's share; all processes must call it, and `after` runs on the first one."""
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

    def amend(self, folder: Path, changes: Mapping[str, object], *, after: Callable[[], None] | None = None) -> None:
        """Replace entries of the manifest on the first process, which writes it; the others need not call this."""
        if self._company.rank == 0:
            super().amend(folder, changes, after=after)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self._patience = min(self._patience, HASTE if isinstance(error, KeyboardInterrupt) else GRACE)
        super().__exit__(kind, error, where)


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the host that later updates do not change; for a GPU, this waits only for the copy."""
    return tensor.detach().to("cpu", copy=True)


def _plain(content: Mapping[str, object]) -> dict[str, object]:
    """A deep copy of the content; if JSON cannot hold it, that is a bug, and fails here rather than in the thread."""
    plain: dict[str, object] = json.loads(json.dumps(content))
    return plain


@dataclass(frozen=True)
class Meeting:
    """The hidden folder in which the processes meet, and the checkpoint it becomes.

    A record there states that the files of one process are on the disk. Once all records are there, the first process
    writes the manifest and renames the folder.
    """

    temporary: Path
    folder: Path
    size: int  # processes

    def record(self, rank: int) -> Path:
        return self.temporary / f"rank-{rank:05d}.json"


def write_slices(meeting: Meeting, slices: Slices, *, rank: int) -> None:
    """Write the slices of one process, then the record of them or of the error."""
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
    """Write atomically: the record appears whole or not at all."""
    partial = path.with_suffix(".begun")
    partial.unlink(missing_ok=True)  # left when a full disk cut an earlier one short
    with partial.open("x", encoding="utf-8") as file:
        json.dump(content, file)
    partial.rename(path)


def _give_up(meeting: Meeting, rank: int, text: str) -> None:
    """Report the error so that the first process does not wait, and free the disk of this process's files."""
    if rank == 0:  # the one that would have completed it
        shutil.rmtree(meeting.temporary, ignore_errors=True)
        return
    try:
        for path in meeting.temporary.glob(f"*-{rank:05d}{SUFFIX}"):
            path.unlink()
        _write_record(meeting.record(rank), {"error": text})
    except OSError:
        shutil.rmtree(meeting.temporary, ignore_errors=True)


def complete(meeting: Meeting, content: Mapping[str, object], *, patience: Callable[[], float]) -> None:
    """Wait for all slices, then turn the folder into a checkpoint; called on the first process.

    `patience`: the seconds to wait while no process writes anything.
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
        read_manifest(meeting.temporary)  # refuses slices that do not add up to whole tensors
        sync_folder(meeting.temporary)
        move_into_place(meeting.temporary, meeting.folder)
    except OSError as error:
        raise CheckpointError(f"cannot save {meeting.folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(meeting.temporary, ignore_errors=True)  # already renamed on success


def _records(meeting: Meeting, patience: Callable[[], float]) -> list[dict[str, Any]]:
    """Wait for the records of all processes; return them by rank."""
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
                f"cannot save {meeting.folder}: no data from rank {missing} for {patience():g} s;"
                " expected a folder that all processes share"
            )
        time.sleep(0.0 if len(found) == meeting.size else POLL)
    return [found[rank] for rank in range(meeting.size)]


def _size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
        total = sum(path.stat().st_size for path in folder.iterdir())
    return total
