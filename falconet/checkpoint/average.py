"""One model out of several checkpoints: their mean, or their exponential average in time order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from falconet.checkpoint import format
from falconet.errors import CheckpointError
from falconet.report.console import counted

MODEL = "model"  # the stem of the file that is averaged


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """How to average; `last` counts from the newest, None takes all."""

    strategy: Literal["mean", "exponential"]
    decay: float = 0.99
    last: int | None = None
    discarded: int = 0  # newest ones that are left out first


def average(folders: Sequence[Path], how: Averaging) -> dict[str, Tensor]:
    """The averaged model tensors: float64 arithmetic, the newest checkpoint's dtypes, its counters as they are.

    Memory: one float64 copy of the model and one checkpoint at a time.
    """
    chosen = select(folders, how.last, discarded=how.discarded)
    if not chosen:
        raise CheckpointError(f"nothing to average: {_listed(folders)}, of which none is a checkpoint of training")
    _require_one_model(chosen)
    running: dict[str, Tensor] = {}
    wanted: dict[str, str] = {}
    newest: dict[str, Tensor] = {}
    for folder in chosen:
        newest.clear()  # before the next one is read
        newest.update(format.read_tensors(folder, MODEL, verified=format.verify(folder)))
        shapes = {name: _described(tensor) for name, tensor in newest.items()}
        _require_same(chosen[0], wanted or shapes, folder, shapes)
        if not wanted:
            wanted = shapes
            running = {name: tensor.double() for name, tensor in newest.items() if tensor.is_floating_point()}
        else:
            _add(running, newest, how)
    if how.strategy == "mean":
        for total in running.values():
            total.div_(len(chosen))
    return {name: running[name].to(tensor.dtype) if name in running else tensor for name, tensor in newest.items()}


def select(folders: Sequence[Path], last: int | None, *, discarded: int = 0, phase: int | None = None) -> list[Path]:
    """The checkpoints to average, oldest first: averages left out, each state counted once, then the `last` of them.

    Those of one phase: of the newest, unless one is named.
    """
    assert last is None or last >= 1, last
    found: dict[tuple[object, ...], tuple[format.Progress, str, Path]] = {}
    for folder in folders:
        manifest = format.read_manifest(folder)
        if manifest.averaged:
            continue
        # Links and copies (a kept 'best') hold the same bytes at the same progress.
        digests = manifest.digests(MODEL)
        state = (manifest.progress, digests) if digests else (folder.resolve(),)
        found.setdefault(state, (manifest.progress, folder.name, folder))
    ordered = sorted(found.values(), key=lambda f: (f[0].epoch, f[0].images, f[0].update, f[1]))
    wanted = phase or (ordered[-1][0].phase if ordered else 1)
    chosen = [folder for progress, _, folder in ordered if progress.phase == wanted]
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


def _require_same(a: Path, wanted: dict[str, str], b: Path, shapes: dict[str, str]) -> None:
    for name in [*wanted, *shapes]:
        mine, yours = wanted.get(name, "missing"), shapes.get(name, "missing")
        if mine != yours:
            raise CheckpointError(f"cannot average {a} with {b}: {name} is {mine} in the first, {yours} in the second")


def _described(tensor: Tensor) -> str:
    """Precision is left out: checkpoints of two regimes average well."""
    shape = "x".join(map(str, tensor.shape)) or "one number"
    return f"{shape} ({'real' if tensor.is_floating_point() else str(tensor.dtype).removeprefix('torch.')})"


def _add(running: dict[str, Tensor], newest: dict[str, Tensor], how: Averaging) -> None:
    for name, total in running.items():
        if how.strategy == "mean":
            total.add_(newest[name])  # promoted to float64 as it is added
        else:
            total.mul_(how.decay).add_(newest[name].double(), alpha=1 - how.decay)


def _listed(folders: Sequence[Path]) -> str:
    return f"{len(folders)} given ({folders[0]}{', ...' if len(folders) > 1 else ''})" if folders else "none given"
