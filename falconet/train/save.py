"""The checkpoints of a run: written while it trains, pruned, and averaged at its end."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import falconet
from falconet.checkpoint import disk, format
from falconet.checkpoint.foreign import load_weights
from falconet.checkpoint.state import TrainState
from falconet.checkpoint.weight_average import Averaging, average, select
from falconet.checkpoint.writer import Writer
from falconet.config import commands, options
from falconet.config.options import further_average
from falconet.errors import NO_ROOM, CheckpointError, DiskError, DivergedError, UnsavedError
from falconet.parallel.world import ALONE, World
from falconet.report.console import counted
from falconet.report.styles import Origin
from falconet.train.evaluate import Validation, never
from falconet.train.log import Output
from falconet.train.metrics import NotFiniteError
from falconet.train.plan import Plan

SHORTEST, LONGEST = 1.0, 30.0  # seconds between two attempts to save while the run is paused
PATIENCE = 3600.0  # seconds that a paused run keeps trying
GLANCE = 0.2  # seconds between looks at whether it was asked to stop
MANIFEST_BYTES = 1 << 16  # at most, except with thousands of classes

IsWhole = Callable[[Path], bool]  # of a checkpoint; says why not


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

    def was_due(self, progress: format.Progress) -> bool:
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
        """Without writing a checkpoint that ends in the middle, over and over."""
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


def rule_of(section: options.Averaging | options.Average) -> Averaging:
    assert section.weight_avg_strategy != "none"
    last, epochs = section.weight_avg_N, section.weight_avg_epochs if isinstance(section, options.Averaging) else None
    return Averaging(
        strategy=section.weight_avg_strategy,
        decay=section.weight_avg_exp_decay,
        last=None if last in ("all", -1) or epochs is not None else int(last),
        epochs=epochs,
        discarded=section.weight_avg_discard if isinstance(section, options.Average) else 0,
    )


def made_of(folders: Sequence[Path], how: Averaging) -> dict[str, object]:
    """What an average states about itself: how it was made, and of what."""
    return {"strategy": how.strategy, "decay": how.decay, "of": [folder.name for folder in folders]}


def write_average(folders: Sequence[Path], made: Mapping[str, object], *, weights: dict[str, Tensor], to: Path) -> None:
    """Save averaged weights with the rest of the newest checkpoint's state, so that the result can be restored too."""
    newest = folders[-1]
    manifest = format.verify(newest)
    others = [stem for stem in manifest.stems if stem != "model"]
    tensors = {"model": weights} | {stem: format.read_tensors(newest, stem, verified=manifest) for stem in others}
    content = {key: value for key, value in manifest.content.items() if key not in ("files", "digest", "metrics")}
    format.write(to, tensors, content | {"averaged": made, "metrics": {}})


def averaged_name(newest: Path, suffix: str = "") -> Path:
    """`<model>_<data>_<epoch>_averaged` beside the others; further averages have a suffix."""
    return newest.with_name("_".join([newest.name.partition("+")[0], "averaged", *([suffix] if suffix else [])]))


def average_after_training(
    saving: Saving, validation: Validation, asked: commands.TrainOptions, *, world: World
) -> Path:
    """Write and measure every average that was asked for; the first one is what a next phase starts with."""

    @cache  # several averages may need a checkpoint, whose files take seconds to read
    def is_whole(folder: Path) -> bool:
        return format.is_whole(folder, saving.output.screen.line)

    first = _average(saving, validation, rule_of(asked.averaging), suffix="", is_whole=is_whole, world=world)
    for text in asked.averaging.weight_avg_also:
        more = further_average(text)
        assert more is not None, "the rules of the options refuse others"
        how = Averaging(strategy=more.strategy, decay=more.decay, last=more.last, epochs=more.epochs)
        _average(saving, validation, how, suffix=more.suffix, is_whole=is_whole, world=world)
    return first


def _average(
    saving: Saving, validation: Validation, how: Averaging, *, suffix: str, is_whole: IsWhole, world: World
) -> Path:
    """Average the phase's checkpoints in the first process, and measure the result in all of them."""

    def written() -> str:
        folders = _averaged_folders(saving, how, is_whole=is_whole)
        if not folders:
            raise CheckpointError(f"{saving.folder}: contains no undamaged checkpoint to average")
        name = saving.output.style.average_name(_in_words(how, len(folders)))
        to = folders[-1].with_name(name) if name else averaged_name(folders[-1], suffix)
        write_average(folders, made_of(folders, how), weights=average(folders, how), to=to)
        saving.output.screen.line(f"averaged {counted(len(folders), 'checkpoint')} ({how.strategy}) into {to}")
        return str(to)

    to = Path(world.once(written))
    if saving.plan.validation_mode != "none":
        state = saving.state  # which is saved by now, and can take other weights
        weights = format.read_tensors(to, "model", verified=format.verify(to))
        load_weights(state.model, state.stages.own(weights), where=str(to))
        origin = Origin(model=saving.identity.model, data=saving.identity.data, loss=None, accuracy=None)
        validation.average(to.name, suffix=suffix, origin=origin)
    return to


def _averaged_folders(saving: Saving, how: Averaging, *, is_whole: IsWhole) -> list[Path]:
    """The whole checkpoints of this phase that an average is of, oldest first; no more are looked at than it takes.

    Without what an interruption saved: an uninterrupted run must give the same average.
    """
    plan, due = saving.plan, []
    final = saving.state.progress.update  # saved out of turn by a training that ended early
    first = -math.inf if how.epochs is None else final - how.epochs * plan.updates_per_epoch
    for folder in format.checkpoints_in(saving.folder):
        manifest = format.readable_manifest(folder)
        if manifest is None:
            is_whole(folder)  # which says why not
            continue
        progress = manifest.progress
        in_turn = saving.was_due(progress) or progress.update == final
        if in_turn and plan.update_after(progress.epoch, progress.images) >= first:
            due.append(folder)
    newest_first = filter(is_whole, reversed(select(due, None, phase=plan.phase)))
    return list(islice(newest_first, how.last))[::-1]


def _in_words(how: Averaging, count: int) -> str:
    """`N_5` or `exp_0.97`, as in the original's names, whose N are epochs; or `exp_0.97_N_5`, which it did not have."""
    if how.strategy == "mean":
        return f"N_{how.last or count}" if how.epochs is None else f"N_{how.epochs}"
    return f"exp_{how.decay:.15g}" + (f"_N_{how.last}" if how.last else "")
