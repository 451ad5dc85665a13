"""One checkpoint from several: the mean of their weights, or an exponential average in order of training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from falconet.checkpoint import format
from falconet.checkpoint.manifest import Position
from falconet.config import options, tool_options
from falconet.errors import CheckpointError
from falconet.report.console import counted

MODEL = "model"  # the stem of the file that is averaged


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """The method of averaging; `last`: the number of checkpoints, None: all."""

    strategy: Literal["mean", "exponential"]
    decay: float = 0.99
    last: int | None = None
    epochs: int | None = None  # whose checkpoints are averaged, counted from the newest; None: of all
    discarded: int = 0  # number of newest checkpoints to leave out before `last` is counted


def averaging_of(section: options.Averaging | tool_options.Average) -> Averaging:
    assert section.weight_avg_strategy != "none"
    last, epochs = section.weight_avg_N, section.weight_avg_epochs if isinstance(section, options.Averaging) else None
    return Averaging(
        strategy=section.weight_avg_strategy,
        decay=section.weight_avg_exp_decay,
        last=None if last in ("all", -1) or epochs is not None else int(last),
        epochs=epochs,
        discarded=section.weight_avg_discard if isinstance(section, tool_options.Average) else 0,
    )


def average(folders: Sequence[Path], how: Averaging) -> dict[str, Tensor]:
    """Average in float64; the result has the newest checkpoint's dtypes and its integer counters.

    Memory: a float64 copy of the model, plus one checkpoint at a time.
    """
    chosen = select(folders, how.last, discarded=how.discarded)
    if not chosen:
        raise CheckpointError(f"nothing to average: {_listed(folders)}, none of them saved by training")
    _require_one_model(chosen)
    running: dict[str, Tensor] = {}
    expected: dict[str, str] = {}
    newest: dict[str, Tensor] = {}
    for folder in chosen:
        newest.clear()  # free this one before reading the next
        newest.update(format.read_tensors(folder, MODEL, verified=format.verify(folder)))
        shapes = {name: _described(tensor) for name, tensor in newest.items()}
        _require_same(chosen[0], expected or shapes, folder, shapes)
        if not expected:
            expected = shapes
            running = {name: tensor.double() for name, tensor in newest.items() if tensor.is_floating_point()}
        else:
            _add(running, newest, how)
    if how.strategy == "mean":
        for total in running.values():
            total.div_(len(chosen))
    return {name: running[name].to(tensor.dtype) if name in running else tensor for name, tensor in newest.items()}


def select(folders: Sequence[Path], last: int | None, *, discarded: int = 0, phase: int | None = None) -> list[Path]:
    """Choose the checkpoints to average, oldest first: the `last` ones, without averages and duplicates.

    All are of one phase: `phase`, or by default the newest checkpoint's.
    """
    assert last is None or last >= 1, last
    found: dict[tuple[object, ...], tuple[Position, str, Path]] = {}
    for folder in folders:
        manifest = format.read_manifest(folder)
        if manifest.averaged:
            continue
        # Links and copies (such as 'best') hold the same bytes at the same progress.
        digests = manifest.digests(MODEL)
        state = (manifest.progress, digests) if digests else (folder.resolve(),)
        found.setdefault(state, (manifest.progress, folder.name, folder))
    ordered = sorted(found.values(), key=lambda f: (f[0].epoch, f[0].images, f[0].update, f[1]))
    which = phase or (ordered[-1][0].phase if ordered else 1)
    chosen = [folder for progress, _, folder in ordered if progress.phase == which]
    chosen = chosen[: max(0, len(chosen) - discarded)]
    return chosen if last is None else chosen[-last:]


def _require_one_model(folders: Sequence[Path]) -> None:
    first = format.read_manifest(folders[0])
    for folder in folders[1:]:
        other = format.read_manifest(folder)
        if (other.model, other.classes) != (first.model, first.classes):
            raise CheckpointError(
                f"cannot average {folders[0]} ({first.model}, {counted(first.classes, 'class')})"
                f" with {folder} ({other.model}, {counted(other.classes, 'class')})"
            )


def _require_same(a: Path, expected: dict[str, str], b: Path, shapes: dict[str, str]) -> None:
    for name in [*expected, *shapes]:
        mine, yours = expected.get(name, "missing"), shapes.get(name, "missing")
        if mine != yours:
            raise CheckpointError(f"cannot average {a} with {b}: {name} is {mine} in the first, {yours} in the second")


def _described(tensor: Tensor) -> str:
    """The shape and kind of a tensor, without its precision, because checkpoints of two regimes can be averaged."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} ({'float' if tensor.is_floating_point() else str(tensor.dtype).removeprefix('torch.')})"


def _add(running: dict[str, Tensor], newest: dict[str, Tensor], how: Averaging) -> None:
    for name, total in running.items():
        if how.strategy == "mean":
            total.add_(newest[name])  # promoted to float64 as it is added
        else:
            total.mul_(how.decay).add_(newest[name].double(), alpha=1 - how.decay)


def _listed(folders: Sequence[Path]) -> str:
    return f"{len(folders)} given ({folders[0]}{', ...' if len(folders) > 1 else ''})" if folders else "none given"


def made_of(folders: Sequence[Path], how: Averaging) -> dict[str, object]:
    """What an average states about itself: how it was made, and of what."""
    return {"strategy": how.strategy, "decay": how.decay, "of": [folder.name for folder in folders]}


def write(folders: Sequence[Path], made: Mapping[str, object], *, weights: dict[str, Tensor], to: Path) -> None:
    """Save averaged weights with the rest of the newest checkpoint's state, so that the result can be restored too."""
    newest = folders[-1]
    manifest = format.verify(newest)
    others = [stem for stem in manifest.stems if stem != MODEL]
    tensors = {MODEL: weights} | {stem: format.read_tensors(newest, stem, verified=manifest) for stem in others}
    content = {key: value for key, value in manifest.content.items() if key not in ("files", "digest", "metrics")}
    format.write(to, tensors, content | {"averaged": made, "metrics": {}})


def name_of(newest: Path, suffix: str = "") -> Path:
    """`<model>_<data>_<epoch>_averaged` beside the others; further averages have a suffix."""
    return newest.with_name("_".join([newest.name.partition("+")[0], "averaged", *([suffix] if suffix else [])]))
