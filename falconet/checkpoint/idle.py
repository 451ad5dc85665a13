"""The writer of a process that leaves saving to the first one."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from falconet.checkpoint.writer import Writer


class IdleWriter(Writer):
    """Takes what a Writer takes and does nothing with it."""

    def save(
        self,
        folder: Path,
        tensors: Mapping[str, Mapping[str, Tensor]],
        content: Mapping[str, object],
        *,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Not here."""
