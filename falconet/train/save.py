"""The checkpoints of a run: written while it trains, and pruned."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import falconet
from falconet.checkpoint import disk, format
from falconet.checkpoint.manifest import IMAGES, SEVERAL_LABELS, Position
from falconet.checkpoint.state import TrainState
from falconet.checkpoint.writer import Writer
from falconet.errors import NO_ROOM, CheckpointError, DiskError, DivergedError, UnsavedError
from falconet.evaluation.evaluate import never
from falconet.parallel.world import ALONE, World
from falconet.report.console import counted
from falconet.train.build import BuiltPhase
from falconet.train.log import Output
from falconet.train.metrics import NotFiniteError
from falconet.train.plan import Plan
from falconet.train.preparation import Launch

SHORTEST, LONGEST = 1.0, 30.0  # seconds between two attempts to save while the run is paused
PATIENCE = 3600.0  # seconds that a paused run keeps trying
GLANCE = 0.2  # seconds between looks at whether it was asked to stop
MANIFEST_BYTES = 1 << 16  # at most, except with thousands of classes


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What every checkpoint of a run states about itself."""

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


def identity_of(built: BuiltPhase, folder: Path, *, mark: str | None = None) -> Identity:
    """What the checkpoints of a run state about themselves."""
    site, images = built.site, built.images
    return Identity(
        model=built.options.model.model,
        data=built.options.data.data,
        classes=images.classes,
        run=mark,
        content={
            "class_names": list(images.class_names),
            **({SEVERAL_LABELS: True} if images.label_sets is not None else {}),
            "preprocessing": images.preprocessing.to_json(),
            IMAGES: images.fingerprint(),
            "config": built.launch.stored(),
            "plan": built.plan.lines(),
            "initial_weights": _initial_weights(built.launch),
            "runtime": {
                "threads": site.threads,
                "processes": site.world.size,
                "splits": list(built.placement.splits),
                "device": str(site.world.device),
                "run_dir": str(folder),
                "cuda": torch.version.cuda,
            },
        },
    )


def _initial_weights(launch: Launch) -> str | None:
    """What the run's weights were before its first update, if they were pretrained; kept by a restored run."""
    if launch.initial:
        return launch.initial.source
    stored = launch.restored.manifest.content.get("initial_weights") if launch.restored else None
    return stored if isinstance(stored, str) else None


@dataclass(kw_only=True)
class Saving:
    """Saves the state when the loop asks for it, and knows which checkpoints are on the disk."""

    plan: Plan
    state: TrainState
    output: Output
    identity: Identity
    folder: Path  # of all checkpoints
    kept: int | None  # newest checkpoints to keep; None: all
    writer: Writer
    last: Path | None = None  # the newest one
    world: World = ALONE
    stopping: Callable[[], bool] = never  # whether this process was asked to stop

    def __post_init__(self) -> None:
        self._saved = {self.state.progress.update: self.last} if self.last else {}  # by the update they were saved at

    def name(self) -> str:
        """The name of a checkpoint saved now."""
        update = self.state.progress.update
        return self.output.style.checkpoint_name(update) or self.identity.checkpoint_name(*self.plan.place(update))

    def check_room(self) -> None:
        """Refuse to train what the disk has no room to save."""
        sizes = self._sizes()

        def check() -> str:
            try:
                disk.reserve(self.folder, sizes)
            except OSError as error:
                helps = NO_ROOM[error.errno].helps if error.errno in NO_ROOM else "make room"
                size = f"{sum(sizes) / 1e6:,.1f} MB"
                raise DiskError(
                    f"{self.folder}: no room for a checkpoint of {size} ({error.strerror}); {helps},"
                    " or choose another --run-dir or --checkpoint-output-path"
                ) from error
            return ""

        self.world.once(check)

    def save(self) -> None:
        """Start writing a checkpoint. If the one before it failed, wait for this one, and pause until it is written."""
        self.state.progress.seconds = self.output.stopwatch.lap().seconds
        with self.output.stopwatch.standing():
            failed = self._failure()
            if failed is None:
                self._begin()
            else:
                self._say(f"warning: {failed}; saving again")
                self._insist()
            if not self.state.progress.unvalidated:  # else that comes first
                self.output.style.saved(self.folder / self.name())

    def amend(self) -> None:
        """Add to the checkpoint of this update what was measured since it was saved."""
        update = self.state.progress.update
        content = self._content(update)
        changes = {key: content[key] for key in ("meter", "metrics", "best")}
        self.writer.amend(self._saved[update], changes, after=self._prune)
        self.output.style.saved(self._saved[update])

    def finish(self) -> Path:
        """Wait for the last checkpoint; if it failed, try again, and pause until it is written."""
        failed = self._failure()
        if failed is not None:
            self._say(f"warning: {failed}; saving again")
            self._insist()
        assert self.last is not None
        return self.last

    def was_due(self, progress: Position) -> bool:
        """Whether an uninterrupted run has this checkpoint too; assumed of those of other phases."""
        return progress.phase != self.plan.phase or self.plan.saved_in_turn(progress.epoch, progress.images)

    def lost(self) -> str:
        """What stopping at once costs."""
        whole = [update for update, folder in self._saved.items() if folder.exists()]
        newest = max(whole, default=self.plan.updates_before)
        since = f" since {self._saved[newest]}" if whole else ""
        return f"stopped at once: {counted(self.state.progress.update - newest, 'update')} lost{since}"

    def diverged(self, error: NotFiniteError) -> DivergedError:
        """The error with the last good checkpoint: the newest one whose weights gave a finite loss."""
        self._wait()
        good = [folder for update, folder in self._saved.items() if update < error.update - 1 and folder.exists()]
        found = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier good checkpoint"
        return DivergedError(f"{error}; {found}; a smaller --lr or a longer --warmup-epoch usually helps")

    def _wait(self) -> None:
        try:
            self.writer.wait()
        except CheckpointError as error:
            self._say(f"warning: {error}")

    def _begin(self) -> None:
        update, folder = self.state.progress.update, self.folder / self.name()
        self.writer.save_state(folder, self.state, self._content(update), after=self._prune)
        self.last = self._saved[update] = folder

    def _failure(self) -> CheckpointError | None:
        """Wait for the save in progress; its error in any process, which all of them must answer alike."""
        failed = None
        try:
            self.writer.wait()
        except CheckpointError as error:
            failed = error
        if not self._any(failed is not None):
            return None
        return failed or CheckpointError(f"cannot save {self.last}: another process has failed")

    def _insist(self) -> None:
        """Save; while that fails, nothing more is trained, because all of it might be lost."""
        self.world.at("saving")
        self._begin()
        failed = self._failure()
        if failed is None:
            return
        if not self._any(self.stopping()):
            self._say(f"{failed}; paused, and trying again for up to {PATIENCE / 60:g} minutes")
        pause, end = SHORTEST, time.monotonic() + PATIENCE
        while failed is not None:
            self._rest(pause, failed)
            pause = min(2 * pause, LONGEST)
            if self._any(self.world.is_first and time.monotonic() > end):
                raise UnsavedError(f"{failed}; gave up after {PATIENCE / 60:g} minutes; {self._newest()}") from failed
            if self._has_room():
                self._begin()
                failed = self._failure()
        self._say(f"saved {self.last}; the run continues")

    def _rest(self, seconds: float, failed: CheckpointError) -> None:
        """Wait between two attempts; a run that is asked to stop does so with what is on the disk."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stopping():
            time.sleep(GLANCE)
        if self._any(self.stopping()):
            self._say(str(failed))
            raise KeyboardInterrupt

    def _has_room(self) -> bool:
        """Whether there is room, found without writing a checkpoint that ends in the middle, over and over."""
        sizes, full = self._sizes(), False
        if self.world.is_first:
            try:
                disk.reserve(self.folder, sizes)
            except OSError:
                full = True
        return not self._any(full)

    def _sizes(self) -> list[int]:
        """Bytes of the files of a checkpoint; several processes write about equal ones."""
        size = self.world.size
        totals = self.world.sum(torch.tensor(list(self.state.saved_bytes().values()))).tolist()
        return [total // size for total in totals] * size + [MANIFEST_BYTES]

    def _any(self, mine: bool) -> bool:
        return bool(self.world.max(torch.tensor(int(mine))))

    def _newest(self) -> str:
        whole = [folder for folder in self._saved.values() if folder.exists()]
        return f"the newest whole checkpoint is {whole[-1]}" if whole else "there is no earlier checkpoint"

    def _say(self, text: str) -> None:
        self.output.screen.line(text)

    def _prune(self) -> None:
        format.prune(self.folder, keep=self.kept, in_turn=self.was_due, run=self.identity.run)

    def _content(self, update: int) -> dict[str, Any]:
        epoch, updates = self.plan.place(update)
        batch = self.plan.global_batch
        progress = {"epoch": epoch, "images": updates * batch, "update": update, "phase": self.plan.phase}
        return {
            "model": self.identity.model,
            "classes": self.identity.classes,
            "progress": progress | {"epoch_images": self.plan.updates_per_epoch * batch},
            "meter": self.state.progress.to_json(),
            "versions": {"falconet": falconet.__version__, "torch": torch.__version__},
            "run": self.identity.run,
            **self.identity.content,
            **self.output.measurements.for_checkpoint(update),
        }
