"""The checkpoints of a run: written while it trains, pruned, and averaged at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import falconet
from falconet.checkpoint import format
from falconet.checkpoint.foreign import load_weights
from falconet.checkpoint.state import TrainState
from falconet.checkpoint.weight_average import Averaging, average, select
from falconet.checkpoint.writer import Writer
from falconet.config import commands, options
from falconet.config.options import further_average
from falconet.errors import CheckpointError, DivergedError
from falconet.parallel.world import World
from falconet.report.console import counted
from falconet.train.evaluate import Validation
from falconet.train.log import Output
from falconet.train.metrics import NotFiniteError
from falconet.train.plan import Plan


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

    def __post_init__(self) -> None:
        self._saved = {self.state.progress.update: self.last} if self.last else {}  # by the update they were saved at

    def name(self) -> str:
        """The name of a checkpoint saved now."""
        update = self.state.progress.update
        return self.output.style.checkpoint_name(update) or self.identity.checkpoint_name(*self.plan.place(update))

    def save(self) -> None:
        """Start writing a checkpoint; if the one before it failed, print that and continue."""
        update, folder = self.state.progress.update, self.folder / self.name()
        with self.output.stopwatch.standing():
            self._wait()
            self.writer.save_state(folder, self.state, self._content(update), after=self._prune)
            self.last = self._saved[update] = folder
            self.output.style.saved(folder)

    def finish(self) -> Path:
        """Wait for the last checkpoint; here a failed save is an error."""
        self.writer.wait()
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
            self.output.screen.line(f"warning: {error}; the run continues and will save again")

    def _prune(self) -> None:
        format.prune(self.folder, keep=self.kept, best="score", in_turn=self.was_due, run=self.identity.run)

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
            **self.output.measurements.for_checkpoint(update),
        }


def rule_of(section: options.Averaging | options.Average) -> Averaging:
    assert section.weight_avg_strategy != "none"
    last = section.weight_avg_N
    return Averaging(
        strategy=section.weight_avg_strategy,
        decay=section.weight_avg_exp_decay,
        last=None if last in ("all", -1) else int(last),
        discarded=section.weight_avg_discard if isinstance(section, options.Average) else 0,
    )


def write_average(folders: Sequence[Path], how: Averaging, *, weights: dict[str, Tensor], to: Path) -> None:
    """Save averaged weights with the rest of the newest checkpoint's state, so that the result can be restored too."""
    newest = folders[-1]
    manifest = format.verify(newest)
    others = [stem for stem in manifest.stems if stem != "model"]
    tensors = {"model": weights} | {stem: format.read_tensors(newest, stem, verified=manifest) for stem in others}
    averaged = {"strategy": how.strategy, "decay": how.decay, "of": [folder.name for folder in folders]}
    content = {key: value for key, value in manifest.content.items() if key not in ("files", "digest", "metrics")}
    format.write(to, tensors, content | {"averaged": averaged, "metrics": {}})


def averaged_name(newest: Path, suffix: str = "") -> Path:
    """`<model>_<data>_<epoch>_averaged` beside the others; further averages have a suffix."""
    return newest.with_name("_".join([newest.name.partition("+")[0], "averaged", *([suffix] if suffix else [])]))


def average_after_training(
    saving: Saving, validation: Validation, asked: commands.TrainOptions, *, world: World
) -> Path:
    """Write and measure every average that was asked for; the first one is what a next phase starts with."""
    first = _average(saving, validation, rule_of(asked.averaging), suffix="", world=world)
    for text in asked.averaging.weight_avg_also:
        more = further_average(text)
        assert more is not None, "the rules of the options refuse others"
        how = Averaging(strategy=more.strategy, decay=more.decay, last=more.last)
        _average(saving, validation, how, suffix=more.suffix, world=world)
    return first


def _average(saving: Saving, validation: Validation, how: Averaging, *, suffix: str, world: World) -> Path:
    """Average the phase's checkpoints in the first process, and measure the result in all of them."""

    def written() -> str:
        # Without what an interruption saved: an uninterrupted run must give the same average.
        saved = format.checkpoints_in(saving.folder)
        due = [folder for folder in saved if saving.was_due(format.read_manifest(folder).progress)]
        folders = select(due, how.last, phase=saving.plan.phase)
        name = saving.output.style.average_name(_in_words(how, len(folders)))
        to = folders[-1].with_name(name) if name else averaged_name(folders[-1], suffix)
        write_average(folders, how, weights=average(folders, how), to=to)
        saving.output.screen.line(f"averaged {counted(len(folders), 'checkpoint')} ({how.strategy}) into {to}")
        return str(to)

    to = Path(world.once(written))
    if saving.plan.validation_mode != "none":
        state = saving.state  # which is saved by now, and can take other weights
        weights = format.read_tensors(to, "model", verified=format.verify(to))
        load_weights(state.model, state.stages.own(weights), where=str(to))
        validation.average(to.name, suffix=suffix)
    return to


def _in_words(how: Averaging, count: int) -> str:
    """`N_5` or `exp_0.97`, as in the original's names; or `exp_0.97_N_5`, which it did not have."""
    if how.strategy == "mean":
        return f"N_{how.last or count}"
    return f"exp_{how.decay:.15g}" + (f"_N_{how.last}" if how.last else "")
