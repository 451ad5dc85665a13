"""The checkpoints of a run: written while it goes on, the oldest removed, the good ones known."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import falconet
from falconet.checkpoint import format
from falconet.checkpoint.state import TrainState
from falconet.checkpoint.writer import Writer
from falconet.errors import CheckpointError, DivergedError
from falconet.report.console import counted
from falconet.train.metrics import NotFiniteError
from falconet.train.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What every checkpoint of a run says about itself."""

    model: str
    data: str
    classes: int
    content: Mapping[str, object]  # class names, preprocessing, config, plan, runtime
    run: str | None = None  # a mark that the checkpoints of this run share, and no others

    def checkpoint_name(self, epoch: int, updates: int) -> str:
        """`model_data_epoch`, and `+updates` for one saved within an epoch."""
        safe = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in self.model)
        within = f"+{updates:05d}" if updates else ""
        return f"{safe}_{self.data}_{epoch}{within}"


@dataclass(kw_only=True)
class Saving:
    """Hands the state to a writer, and knows what is on the disk."""

    plan: Plan
    state: TrainState
    identity: Identity
    folder: Path  # of all checkpoints
    kept: int | None  # newest checkpoints to keep; None: all
    writer: Writer
    say: Callable[[str], None]
    last: Path | None = None  # the newest one

    def __post_init__(self) -> None:
        self._saved = {self.state.progress.update: self.last} if self.last else {}  # by the update they were saved at

    def save(self, name: str, facts: Mapping[str, object]) -> Path:
        """Begin a checkpoint, with `facts` of this moment; one before it that failed is said, and the run goes on."""
        self._wait()
        folder, update = self.folder / name, self.state.progress.update
        self.writer.save_state(folder, self.state, {**self._content(update), **facts}, after=self._prune)
        self.last = self._saved[update] = folder
        return folder

    def finish(self) -> Path:
        """Wait for the last checkpoint; here a failed save is an error."""
        self.writer.wait()
        assert self.last is not None
        return self.last

    def in_turn(self, progress: format.Progress) -> bool:
        """Whether a run without interruptions has this checkpoint as well; those of other phases are taken to be."""
        return progress.phase != self.plan.phase or self.plan.saved_in_turn(progress.epoch, progress.images)

    def lost(self) -> str:
        """What stopping at once costs."""
        whole = [update for update, folder in self._saved.items() if folder.exists()]
        newest = max(whole, default=self.plan.updates_before)
        since = f" since {self._saved[newest]}" if whole else ""
        return f"stopped at once: {counted(self.state.progress.update - newest, 'update')} lost{since}"

    def diverged(self, error: NotFiniteError) -> DivergedError:
        """The same error with the last good checkpoint named: one whose weights gave a loss that was a number."""
        self._wait()
        good = [folder for update, folder in self._saved.items() if update < error.update - 1 and folder.exists()]
        found = f"the last good checkpoint is {good[-1]}" if good else "there is no good checkpoint from before"
        return DivergedError(f"{error}; {found}; a smaller --lr or a longer --warmup-epoch usually helps")

    def _wait(self) -> None:
        try:
            self.writer.wait()
        except CheckpointError as error:
            self.say(f"warning: {error}; the run goes on and will save again")

    def _prune(self) -> None:
        format.prune(self.folder, keep=self.kept, best="score", in_turn=self.in_turn, run=self.identity.run)

    def _content(self, update: int) -> dict[str, Any]:
        epoch, updates = self.plan.place(update)
        progress = {"epoch": epoch, "images": updates * self.plan.global_batch, "update": update}
        return {
            "model": self.identity.model,
            "classes": self.identity.classes,
            "progress": progress | {"phase": self.plan.phase},
            "meter": self.state.progress.to_json(),
            "versions": {"falconet": falconet.__version__, "torch": torch.__version__},
            "run": self.identity.run,
            **self.identity.content,
        }
