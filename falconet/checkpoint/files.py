"""Checkpoints on disk: folders of safetensors with a manifest written last, whole or refused."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from falconet.errors import CheckpointError, did_you_mean

FORMAT = 1
MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
ASIDE = re.compile(r"\..+\.(tmp|old)-\d+-[0-9a-f]+")  # being written, or being removed
ABANDONED = 3600.0  # seconds; no write takes an hour, so an aside folder that old belongs to a killed run
SECTIONS = ("preprocessing", "metrics", "meter", "runtime", "versions")  # of the manifest: objects, maybe empty
CHUNK = 1 << 22  # bytes written and hashed at a time

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far training had come."""

    epoch: int
    images: int
    update: int


@dataclass(frozen=True)
class FileRecord:
    """What a file of the checkpoint must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A typed view of manifest.json; keys it does not name are in `content`, which is the whole of it."""

    format: int
    model: str
    classes: int
    progress: Progress
    class_names: tuple[str, ...]
    preprocessing: dict[str, Any]
    config: Any
    plan: Any
    metrics: dict[str, Any]
    meter: dict[str, Any]
    runtime: dict[str, Any]
    versions: dict[str, Any]
    averaged: bool
    files: dict[str, FileRecord]
    content: dict[str, Any]


def write(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], content: Mapping[str, object]) -> None:
    """Save `tensors` (file stem -> name -> tensor) and `content` as the checkpoint `folder`, all of it or nothing.

    A checkpoint already there is replaced by two renames; a crash between them leaves it beside, as `.name.old-*`.
    """
    try:
        _refuse_to_replace_other_things(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = _aside(folder, "tmp")
        temporary.mkdir()
        try:
            records = {}
            for stem, group in tensors.items():
                data = safetensors.torch.save(_storable(group))
                records[f"{stem}{SUFFIX}"] = _write_bytes(temporary / f"{stem}{SUFFIX}", memoryview(data))
            _write_manifest(temporary / MANIFEST, content, records)
            _sync_folder(temporary)
            _move_into_place(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"cannot save {folder}: {error.strerror or error}") from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint `folder`; the tensor files are not looked at."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        what = "no manifest.json in it, so not a whole checkpoint" if folder.is_dir() else "no such checkpoint"
        raise CheckpointError(f"{folder}: {what}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder}: a file; wanted a checkpoint, which is a folder") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not JSON (torn, or not a manifest)") from None
    if not isinstance(content, dict) or not {"format", "files"} <= content.keys():
        raise CheckpointError(f"{path}: not the manifest of a Falconet checkpoint")
    number = _typed(content, "format", int, path)
    if number > FORMAT:
        raise CheckpointError(f"{path}: written by format {number}, this Falconet reads up to {FORMAT}: upgrade")
    if content.get("digest") != _digest(content):
        raise CheckpointError(f"{path}: contents changed since it was written (digest mismatch)")
    return _manifest(content, path)


def verify(folder: Path) -> Manifest:
    """The manifest of `folder`, after comparing the size and the digest of every file it names."""
    manifest = read_manifest(folder)
    _check_sizes(folder, manifest)
    for name, record in manifest.files.items():
        with _named(folder / name), (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != record.sha256:
            raise CheckpointError(f"{folder / name}: contents changed since it was written (digest mismatch)")
    return manifest


def read_tensors(folder: Path, stem: str, *, verified: Manifest) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint that `verify` found whole, in host memory of their own."""
    path = folder / f"{stem}{SUFFIX}"
    if path.name not in verified.files:
        stems = [name.removesuffix(SUFFIX) for name in verified.files]
        held = ", ".join(stems) or "nothing"
        raise CheckpointError(f"{folder}: holds no '{stem}', only {held}{did_you_mean(stem, stems)}")
    with _named(path):
        data = path.read_bytes()  # not mapped: a mapped file that is cut short later takes the process with it
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not safetensors ({' '.join(str(error).split())})") from error


def checkpoints_in(path: Path) -> list[Path]:
    """`path` itself, or the checkpoints in the folder or run folder it names: oldest first, unreadable ones last."""
    if not path.is_dir():
        what = "a file; wanted a checkpoint or a folder of them" if path.exists() else "no such file or folder"
        names = [p.name for p in path.parent.glob("[!.]*") if p.is_dir()] if path.parent.is_dir() else []
        raise CheckpointError(f"{path}: {what}{did_you_mean(path.name, names)}")
    if (path / MANIFEST).exists():
        return [path]
    inner = path / "checkpoints"
    found = _children(inner if inner.is_dir() else path)
    return found or [path] * _looks_like_one(path)


def newest_whole(path: Path, note: Callable[[str], None]) -> Path:
    """The newest verified checkpoint in `path`, averages only for want of others; each one passed over is noted."""
    candidates = checkpoints_in(path)
    errors = []
    for folder in _newest_first(candidates):
        try:
            verify(folder)
        except CheckpointError as error:
            errors.append(error)
            if folder != path:
                note(f"passed over {error}")
        else:
            return folder
    if candidates == [path]:
        raise refuse(path, errors[0])
    if not errors:
        raise CheckpointError(f"{path}: no checkpoint in it; wanted a checkpoint, a folder of them or a run folder")
    raise CheckpointError(f"{path}: none of the {len(errors)} checkpoints in it is whole; {errors[0]}")


def refuse(folder: Path, error: CheckpointError) -> CheckpointError:
    """`error` about `folder`, with the newest whole checkpoint beside it offered if there is one."""
    siblings = checkpoints_in(folder.parent) if folder.parent.is_dir() else []
    for other in _newest_first(siblings):
        if other.resolve() != folder.resolve():
            with contextlib.suppress(CheckpointError):
                verify(other)
                return CheckpointError(f"{error}; the newest whole one is {other}")
    return error


def prune(folder: Path, *, keep: int | None, best: str = "validation_accuracy") -> list[Path]:
    """Remove the oldest checkpoints in `folder` beyond `keep`, sparing the one with the highest metric `best`.

    Torn, foreign, averaged and linked ones are neither counted nor removed. Returns what was removed.
    """
    if keep is None:
        return []
    linked = {p.resolve() for p in folder.iterdir() if p.is_symlink()}
    named = [p for p in _children(folder) if not p.is_symlink() and "averaged" not in p.name]
    ours = [(p, m) for p, m in _well_sized(named) if not m.averaged]
    marks = [m.metrics.get(best) for _, m in ours]
    known = [mark for mark in marks if isinstance(mark, int | float) and mark == mark]
    spared = marks.index(max(known)) if known else None
    surplus = [p for i, (p, _) in enumerate(ours[: max(len(ours) - keep, 0)]) if i != spared]
    removed = [p for p in surplus if p.resolve() not in linked]
    for path in removed:
        old = _aside(path, "old")
        with _named(path):
            path.rename(old)  # first, so that a crash half way leaves nothing that looks like a checkpoint
        _discard(old)
    _sweep(folder)
    return removed


def _refuse_to_replace_other_things(folder: Path) -> None:
    """Nothing but a checkpoint is ever replaced by a checkpoint."""
    if folder.exists():  # iterdir says 'Not a directory' of a file
        others = sorted(p.name for p in folder.iterdir() if p.name != MANIFEST and p.suffix != SUFFIX)
        if others:
            raise CheckpointError(f"cannot save {folder}: it holds other things ({others[0]}); wanted another name")


def _write_manifest(path: Path, content: Mapping[str, object], records: Mapping[str, FileRecord]) -> None:
    files = {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in records.items()}
    whole: dict[str, object] = {"format": FORMAT} | dict(content) | {"format": FORMAT, "files": files}
    whole["digest"] = _digest(whole)
    # No newline at the end: a manifest cut at any byte is not JSON.
    _write_bytes(path, memoryview(json.dumps(whole, indent=1).encode()))


def _write_bytes(path: Path, data: memoryview) -> FileRecord:
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), digest.hexdigest())


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host copies in plain order where they are not so already; safetensors takes no shared storage and no strides."""
    plain: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return plain


def _move_into_place(temporary: Path, folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        old = _aside(folder, "old")
        folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        _sync_folder(folder.parent)
        _discard(old)
    else:
        temporary.rename(folder)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(folder: Path, why: str) -> Path:
    return folder.with_name(f".{folder.name}.{why}-{os.getpid()}-{secrets.token_hex(4)}")


def _discard(old: Path) -> None:
    """What cannot be removed now is swept later; a link goes, not what it points to."""
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed runs left aside."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may sweep too
            if ASIDE.fullmatch(path.name) and time.time() - path.lstat().st_mtime > ABANDONED:
                _discard(path)


def _digest(content: Mapping[str, object]) -> str:
    rest = {key: value for key, value in content.items() if key != "digest"}
    # Through JSON twice, so that what is written and what is read back (tuples, integer keys) agree.
    plain = json.loads(json.dumps(rest))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _manifest(content: dict[str, Any], path: Path) -> Manifest:
    progress = _typed(content, "progress", dict, path)
    files = _typed(content, "files", dict, path)
    names = _typed(content, "class_names", list, path, [])
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: 'class_names' holds other things than names")
    for name, record in files.items():
        if Path(name).name != name or not name.endswith(SUFFIX) or not isinstance(record, dict):
            raise CheckpointError(f"{path}: 'files' names {name!r}, wanted plain names that end in {SUFFIX}")
    return Manifest(
        format=content["format"],
        model=_typed(content, "model", str, path),
        classes=_typed(content, "classes", int, path),
        progress=Progress(**{key: _typed(progress, key, int, path) for key in ("epoch", "images", "update")}),
        class_names=tuple(names),
        config=content.get("config"),
        plan=content.get("plan"),
        averaged=bool(content.get("averaged")),
        files={
            name: FileRecord(_typed(record, "bytes", int, path), _typed(record, "sha256", str, path))
            for name, record in files.items()
        },
        content=content,
        **{key: _typed(content, key, dict, path, {}) for key in SECTIONS},
    )


def _typed(content: Mapping[str, Any], key: str, kind: type[T], path: Path, default: T | None = None) -> T:
    value = content.get(key, default)
    if type(value) is not kind:  # not isinstance: true is not a number here
        raise CheckpointError(f"{path}: '{key}' is {type(value).__name__}, wanted {kind.__name__}")
    return value


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        path = folder / name
        with _named(path):
            size = path.stat().st_size
        if size < record.bytes:
            raise CheckpointError(f"{path}: {record.bytes - size:,} bytes short of {record.bytes:,} (torn)")
        if size > record.bytes:
            raise CheckpointError(f"{path}: {size - record.bytes:,} bytes more than {record.bytes:,} (not as written)")


def _looks_like_one(path: Path) -> bool:
    """Whole or not: a folder that only a checkpoint looks like."""
    return path.is_dir() and ((path / MANIFEST).exists() or any(path.glob(f"*{SUFFIX}")))


def _children(home: Path) -> list[Path]:
    return sorted((p for p in home.iterdir() if not p.name.startswith(".") and _looks_like_one(p)), key=_age)


def _readable(folder: Path) -> Manifest | None:
    with contextlib.suppress(CheckpointError):
        return read_manifest(folder)
    return None


def _age(folder: Path) -> tuple[bool, int, int, int, str]:
    """Sorts by progress; what cannot be read comes last, by name."""
    manifest = _readable(folder)
    progress = manifest.progress if manifest else Progress(0, 0, 0)
    return manifest is None, progress.epoch, progress.images, progress.update, folder.name


def _newest_first(folders: list[Path]) -> list[Path]:
    """Averages come last all the same: training cannot go on exactly from one."""
    averages = [folder for folder in reversed(folders) if (manifest := _readable(folder)) and manifest.averaged]
    return [folder for folder in reversed(folders) if folder not in averages] + averages


def _well_sized(folders: list[Path]) -> Iterator[tuple[Path, Manifest]]:
    """Those not torn, by their sizes alone: hashing every old checkpoint after each save would cost too much."""
    for folder in folders:
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(folder)
            _check_sizes(folder, manifest)
            yield folder, manifest


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What the system says about `path`, as one line."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
