"""Checkpoints on disk: folders of safetensors with a manifest written last; written, verified, found and pruned."""

# torch is imported where tensors are read or written: the command line finds a checkpoint without it.
from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from falconet.checkpoint.disk import FileRecord as FileRecord
from falconet.checkpoint.disk import aside, discard, move_into_place, named, sweep, sync_folder, write_bytes
from falconet.checkpoint.manifest import MANIFEST, SUFFIX, Position, by_name, require_folder, write_manifest
from falconet.checkpoint.manifest import Checkpoint as Checkpoint
from falconet.checkpoint.manifest import Manifest as Manifest
from falconet.checkpoint.manifest import read_manifest as read_manifest
from falconet.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

Which = Literal["best", "last"] | int  # of the checkpoints in a folder; a number: the one after that many epochs


def write(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], content: Mapping[str, object]) -> None:
    """Save `tensors` (file stem -> name -> tensor) and `content` as the checkpoint `folder`, completely or not at all.

    An existing checkpoint is replaced by two renames; a crash between them leaves it as `.name.old-*`.
    """
    import safetensors.torch

    try:
        refuse_to_replace_other_things(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = aside(folder, "tmp")
        temporary.mkdir()
        try:
            records = {}
            for stem, group in tensors.items():
                data = safetensors.torch.save(storable(group))
                records[f"{stem}{SUFFIX}"] = write_bytes(temporary / f"{stem}{SUFFIX}", memoryview(data))
            write_manifest(temporary / MANIFEST, content, records)
            _check_readable(temporary, folder)
            sync_folder(temporary)
            move_into_place(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"cannot save {folder}: {error.strerror or error}") from error


def amend(folder: Path, changes: Mapping[str, object]) -> None:
    """Replace entries of a checkpoint's manifest, by one rename; its tensors stay as they are."""
    try:
        manifest = read_manifest(folder)
        content = {key: value for key, value in manifest.content.items() if key not in ("files", "digest")}
        temporary = aside(folder, "tmp")
        temporary.mkdir()
        try:
            write_manifest(temporary / MANIFEST, content | dict(changes), manifest.files, manifest.parts)
            _check_readable(temporary, folder)
            (temporary / MANIFEST).replace(folder / MANIFEST)
            sync_folder(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot save {folder}: {error.strerror or error}") from error


def _check_readable(temporary: Path, folder: Path) -> None:
    """Refuse a checkpoint that could not be read again, before it replaces an older one."""
    try:
        read_manifest(temporary)
    except CheckpointError as error:
        raise CheckpointError(f"cannot save {folder}: {str(error).removeprefix(f'{temporary / MANIFEST}: ')}") from None


def refuse_to_replace_other_things(folder: Path) -> None:
    """Refuse to replace a folder that holds anything but a checkpoint."""
    if folder.exists():  # for a file, iterdir raises 'Not a directory'
        others = _other_things(folder)
        if others:
            raise CheckpointError(f"cannot save {folder}: it holds other files ({others[0]}); choose another name")


def _other_things(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != MANIFEST and p.suffix != SUFFIX)


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous host tensors, copied where needed: safetensors accepts neither strides nor shared storage."""
    plain: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return plain


def verify(folder: Path) -> Manifest:
    """Check the size and digest of every file of a checkpoint; return its manifest."""
    manifest = read_manifest(folder)
    _check_sizes(folder, manifest)
    for name, record in manifest.files.items():
        with named(folder / name), (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != record.sha256:
            raise CheckpointError(f"{folder / name}: contents changed since it was written (digest mismatch)")
    return manifest


def read_tensors(folder: Path, stem: str, *, verified: Manifest) -> dict[str, Tensor]:
    """Read the tensors of one kind, from a checkpoint that `verify` accepted, into host memory."""
    from falconet.parallel.slices import Slice, joined

    if stem not in verified.stems:
        held = ", ".join(verified.stems) or "nothing"
        raise CheckpointError(f"{folder}: holds no '{stem}'; it holds {held}{did_you_mean(stem, verified.stems)}")
    if stem not in verified.parts:
        return _read(folder / f"{stem}{SUFFIX}")
    parts = verified.parts[stem]
    content = {file: _read(folder / file) for file in sorted({part.file for part in parts})}
    whole = {}
    for name, each in by_name(parts).items():
        slices = []
        for part in each:
            values = content[part.file].pop(part.key, None)
            if values is None or values.numel() != part.end - part.begin or str(values.dtype) != f"torch.{part.dtype}":
                raise CheckpointError(f"{folder / part.file}: '{part.key}' does not match the manifest")
            slices.append(Slice(name, values, part.shape, part.begin, part.channels_last))
        whole[name] = joined(slices)
    return whole


def model_weights(folder: Path, manifest: Manifest, stem: str) -> dict[str, Tensor]:
    """The model's weights or (`ema`) those of its moving average, under the model's names."""
    weights = read_tensors(folder, stem, verified=manifest)
    return {name.removeprefix("average/"): tensor for name, tensor in weights.items() if name != "updates"}


def _read(path: Path) -> dict[str, Tensor]:
    import safetensors.torch
    from safetensors import SafetensorError

    with named(path):
        data = path.read_bytes()  # not mmap: truncating a mapped file later would crash the process
    try:
        found = safetensors.torch.load(data)
    except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not safetensors ({' '.join(str(error).split())})") from error
    for name, tensor in found.items():
        if tensor.is_complex():
            raise CheckpointError(f"{path}: '{name}' holds complex numbers; expected real ones")
    return found


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        path = folder / name
        with named(path):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait
            raise CheckpointError(f"{path}: is not a file")
        size = found.st_size
        apart = f"{abs(size - record.bytes):,} byte{'s' * (abs(size - record.bytes) != 1)}"
        if size < record.bytes:
            raise CheckpointError(f"{path}: {apart} short of {record.bytes:,} (truncated)")
        if size > record.bytes:
            raise CheckpointError(f"{path}: {apart} more than the expected {record.bytes:,}")


def checkpoints_in(path: Path) -> list[Path]:
    """List the checkpoints in a folder or run folder, or `path` itself; oldest first, unreadable ones last."""
    require_folder(path)
    if (path / MANIFEST).exists():
        return [path]
    inner = path / "checkpoints"
    found = _children(inner if inner.is_dir() else path)
    return found or [path] * looks_like_one(path)


def undamaged(path: Path, note: Callable[[str], None]) -> list[Path]:
    """The undamaged checkpoints of `checkpoints_in`, checked file by file; the others are noted."""
    return [folder for folder in checkpoints_in(path) if is_whole(folder, note)]


def is_whole(folder: Path, note: Callable[[str], None]) -> bool:
    """Whether `verify` accepts a checkpoint; one that it refuses is noted."""
    try:
        verify(folder)
    except CheckpointError as error:
        note(f"passed over {error}")
        return False
    return True


def choose(path: Path, which: Which, note: Callable[[str], None]) -> Checkpoint:
    """Find one checkpoint in a folder of checkpoints or a run folder; a path to a checkpoint is used directly.

    best: the highest recorded score, then the lowest loss, then the earliest; if nothing was
    validated, the newest. Damaged ones are noted, and the next best or next older one is taken, except where a number
    asks for one.
    """
    found = checkpoints_in(path)
    if isinstance(which, int):
        return _after_epoch(path, found, which)
    if which == "last":
        folder = newest_whole(path, note)
    else:
        if len(found) > 1 and all(_rank(folder) is None for folder in found):
            note(f"note: {path}: no checkpoint was validated, so the newest is used instead of the best")
        folder = _first_whole(path, _best_first(found), note)
    return Checkpoint(folder, read_manifest(folder))


def newest_whole(path: Path, note: Callable[[str], None]) -> Path:
    """Find the newest checkpoint in `path` that verifies, otherwise an average; note each one skipped."""
    return _first_whole(path, _newest_first(checkpoints_in(path)), note)


def _after_epoch(path: Path, found: Sequence[Path], epoch: int) -> Checkpoint:
    readable = [(folder, manifest) for folder in found if (manifest := readable_manifest(folder))]
    whole = [(folder, each) for folder, each in readable if not each.progress.images and not each.averaged]
    for folder, manifest in whole:
        if manifest.progress.epoch == epoch:
            try:
                verify(folder)
            except CheckpointError as error:
                raise refuse(folder, error) from None
            return Checkpoint(folder, manifest)
    epochs = ", ".join(str(manifest.progress.epoch) for _, manifest in whole) or "none"
    raise CheckpointError(f"{path}: holds no checkpoint of epoch {epoch}; the epochs it has: {epochs}")


def _first_whole(path: Path, candidates: Sequence[Path], note: Callable[[str], None]) -> Path:
    errors = []
    for folder in candidates:
        try:
            verify(folder)
        except CheckpointError as error:
            errors.append(error)
            if folder != path:
                note(f"skipped {error}")
        else:
            return folder
    if list(candidates) == [path]:
        raise refuse(path, errors[0])
    if not errors:
        raise CheckpointError(f"{path}: holds no checkpoint; expected a checkpoint, a folder of them or a run folder")
    which = "its one checkpoint is not" if len(errors) == 1 else f"none of its {len(errors)} checkpoints is"
    raise CheckpointError(f"{path}: {which} complete; {errors[0]}")


def whole_after(path: Path, progress: Position) -> Path | None:
    """Find the newest checkpoint in `path` that verifies, is not an average and is further on than `progress`."""
    for folder in _newest_first(checkpoints_in(path)):
        manifest = readable_manifest(folder)
        if manifest and not manifest.averaged and _order(manifest.progress) > _order(progress):
            with contextlib.suppress(CheckpointError):
                verify(folder)
                return folder
    return None


def refuse(folder: Path, error: CheckpointError) -> CheckpointError:
    """Add the newest complete checkpoint beside `folder`, if there is one, to an error about `folder`."""
    siblings = checkpoints_in(folder.parent) if folder.parent.is_dir() else []
    for other in _newest_first(siblings):
        if other.resolve() != folder.resolve():
            with contextlib.suppress(CheckpointError):
                verify(other)
                return CheckpointError(f"{error}; the newest complete one is {other}")
    return error


def looks_like_one(path: Path) -> bool:
    """Whether this is a checkpoint, complete or damaged."""
    return path.is_dir() and ((path / MANIFEST).exists() or any(path.glob(f"*{SUFFIX}")))


def _children(home: Path) -> list[Path]:
    return sorted((p for p in home.iterdir() if not p.name.startswith(".") and looks_like_one(p)), key=_age)


def readable_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint, if it can be read."""
    with contextlib.suppress(CheckpointError):
        return read_manifest(folder)
    return None


def _age(folder: Path) -> tuple[bool, int, int, int, str]:
    """A sort key by progress; unreadable checkpoints come last, by name."""
    manifest = readable_manifest(folder)
    progress = manifest.progress if manifest else Position(0, 0, 0)
    return manifest is None, *_order(progress), folder.name


def _order(progress: Position) -> tuple[int, int, int]:
    return progress.epoch, progress.images, progress.update


def _newest_first(folders: list[Path]) -> list[Path]:
    """Sort checkpoints from the newest; averages last, because training cannot resume exactly from one."""
    averages = [folder for folder in reversed(folders) if (manifest := readable_manifest(folder)) and manifest.averaged]
    return [folder for folder in reversed(folders) if folder not in averages] + averages


def _best_first(folders: list[Path]) -> list[Path]:
    """Sort by rank, the rest from the newest; unreadable ones come first, because any may have been the best."""
    unreadable = [folder for folder in folders if readable_manifest(folder) is None]
    ranks = {folder: found for folder in folders if (found := _rank(folder)) is not None}
    best = sorted(ranks, key=ranks.__getitem__, reverse=True)  # stable: equal ones stay in their order
    return [*unreadable, *best, *(each for each in _newest_first(folders) if each not in (*unreadable, *best))]


def _rank(folder: Path) -> tuple[float, float] | None:
    manifest = readable_manifest(folder)
    return manifest.rank if manifest else None


def prune(
    folder: Path,
    *,
    keep: int | None,
    in_turn: Callable[[Position], bool] = lambda _: True,
    run: str | None = None,
) -> list[Path]:
    """Remove the oldest checkpoints in `folder` beyond `keep`, except the best validated one.

    One saved out of turn by an interruption does not count: it is removed as soon as there is a newer one.
    Damaged, foreign, averaged, linked and initial checkpoints, and those whose manifest names another `run`, are
    neither counted nor removed. Returns the removed ones.
    """
    if keep is None:
        return []
    linked = {os.path.realpath(p) for p in folder.iterdir() if p.is_symlink()}  # Path's raises for a link to itself
    plain = [p for p in _children(folder) if not p.is_symlink() and "averaged" not in p.name]
    sized = [(p, m) for p, m in _well_sized(plain) if not m.averaged and m.progress.update > 0]
    ours = [(p, m) for p, m in sized if m.content.get("run") == run]
    ranks = {i: m.rank for i, (_, m) in enumerate(ours) if m.rank is not None}
    spared = max(ranks, key=ranks.__getitem__, default=None)  # of equal ones the earliest
    counted = [i for i, (_, m) in enumerate(ours) if in_turn(m.progress)]
    held = {spared, *counted[max(len(counted) - keep, 0) :], *({len(ours) - 1} - set(counted))}
    surplus = [p for i, (p, _) in enumerate(ours) if i not in held]
    removed = [p for p in surplus if os.path.realpath(p) not in linked and not _other_things(p)]
    for path in removed:
        old = aside(path, "old")
        with named(path):
            path.rename(old)  # first, so that a crash while removing leaves nothing that looks like a checkpoint
        discard(old)
    sweep(folder)
    return removed


def _well_sized(folders: list[Path]) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoints whose files have the right size; hashing all of them after each save would take too long."""
    for folder in folders:
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(folder)
            _check_sizes(folder, manifest)
            yield folder, manifest
