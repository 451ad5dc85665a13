"""Saving behind training's back: the loop waits for a copy, not for the disk."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from falconet.checkpoint import files


class Writer:
    """Writes one checkpoint at a time in a thread of its own; what went wrong is raised by the next call."""

    def __init__(self) -> None:
        # Python joins these threads at exit, so a save under way is finished even if nobody waits.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

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
        plain = json.loads(json.dumps(content))  # a copy too, and what JSON cannot hold is our mistake: fail here
        self._under_way = self._thread.submit(_write, folder, snapshot, plain, after)

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


def _copied(tensor: Tensor) -> Tensor:
    """A host copy that later updates do not reach; from a GPU this waits for the copy alone."""
    return tensor.detach().to("cpu", copy=True)


def _write(
    folder: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    content: Mapping[str, object],
    after: Callable[[], None] | None,
) -> None:
    files.write(folder, tensors, content)
    if after is not None:
        after()
