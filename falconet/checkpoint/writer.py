"""Saving behind training's back: the loop waits for a copy, not for the disk."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from falconet.checkpoint import files, together
from falconet.checkpoint.disk import aside
from falconet.checkpoint.together import Meeting, Slices

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
        self._begin(lambda: files.write(folder, snapshot, plain), after)

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
            together.write_slices(meeting, snapshot, rank=self._company.rank)
            if first:
                together.complete(meeting, plain, patience=lambda: self._patience)

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
