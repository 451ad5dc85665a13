"""manifest.json: what a checkpoint is, which files it has, and what of which tensor they hold."""

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from falconet.checkpoint.disk import FileRecord, write_bytes
from falconet.errors import CheckpointError

WHOLE, DIVIDED = 1, 2  # formats: a file holds whole tensors; several processes wrote slices of them
FORMAT = DIVIDED  # the newest that can be read
MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
SECTIONS = ("preprocessing", "metrics", "meter", "runtime", "versions")  # of the manifest: objects, maybe empty

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far training had come."""

    epoch: int
    images: int
    update: int
    phase: int = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """A slice of a tensor in a file: values `begin` to `end` of it, in the order in which the whole lay in memory."""

    name: str
    shape: tuple[int, ...]  # of the whole
    dtype: str
    begin: int
    end: int
    file: str
    channels_last: bool = False  # else row-major

    @property
    def key(self) -> str:
        """Its name in the file, where a tensor may have several slices."""
        return f"{self.name}:{self.begin}"


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
    parts: dict[str, list[Part]] = field(default_factory=dict)  # by stem; of a checkpoint of several processes

    @property
    def stems(self) -> list[str]:
        """What it holds: model, optimizer and so on."""
        return list(self.parts) or [name.removesuffix(SUFFIX) for name in self.files]

    def digests(self, stem: str) -> tuple[str, ...]:
        """The digests of the files that hold `stem`; empty: none does."""
        names = sorted({part.file for part in self.parts.get(stem, ())} or {f"{stem}{SUFFIX}"})
        return tuple(self.files[name].sha256 for name in names if name in self.files)


class Checkpoint(NamedTuple):
    """A checkpoint on the disk."""

    folder: Path
    manifest: Manifest


def write_manifest(
    path: Path,
    content: Mapping[str, object],
    records: Mapping[str, FileRecord],
    parts: Mapping[str, Iterable[Part]] | None = None,
) -> None:
    """Write the manifest, which is the last file of a checkpoint."""
    number = DIVIDED if parts else WHOLE
    own: dict[str, object] = {"format": number, "files": {name: asdict(record) for name, record in records.items()}}
    if parts:
        own["parts"] = {stem: [asdict(part) for part in each] for stem, each in parts.items()}
    rest = {key: value for key, value in content.items() if key != "parts"}
    whole: dict[str, object] = {"format": number} | rest | own
    whole["digest"] = _digest(whole)
    # No newline at the end: a manifest cut at any byte is not JSON.
    write_bytes(path, memoryview(json.dumps(whole, indent=1).encode()))


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


def part_of(content: Mapping[str, Any], *, where: Path) -> Part:
    """A part as it was written, or a refusal."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: a part is {type(content).__name__}, wanted an object")
    shape = _typed(content, "shape", list, where)
    if not all(type(length) is int and length >= 0 for length in shape):
        raise CheckpointError(f"{where}: 'shape' is {shape}, wanted lengths")
    return Part(
        name=_typed(content, "name", str, where),
        shape=tuple(shape),
        dtype=_typed(content, "dtype", str, where),
        begin=_typed(content, "begin", int, where),
        end=_typed(content, "end", int, where),
        file=_typed(content, "file", str, where),
        channels_last=_typed(content, "channels_last", bool, where, False),
    )


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
        progress=Progress(
            **{key: _typed(progress, key, int, path) for key in ("epoch", "images", "update")},
            phase=_typed(progress, "phase", int, path, 1),
        ),
        class_names=tuple(names),
        config=content.get("config"),
        plan=content.get("plan"),
        averaged=bool(content.get("averaged")),
        files={
            name: FileRecord(_typed(record, "bytes", int, path), _typed(record, "sha256", str, path))
            for name, record in files.items()
        },
        content=content,
        parts=_parts(content, path) if content["format"] == DIVIDED else {},
        **{key: _typed(content, key, dict, path, {}) for key in SECTIONS},
    )


def _parts(content: dict[str, Any], path: Path) -> dict[str, list[Part]]:
    """What the files hold; every tensor must be there once, whole."""
    found = {}
    for stem, entries in _typed(content, "parts", dict, path).items():
        if not isinstance(entries, list):
            raise CheckpointError(f"{path}: 'parts' of '{stem}' is {type(entries).__name__}, wanted list")
        found[stem] = [part_of(entry, where=path) for entry in entries]
        for name, parts in by_name(found[stem]).items():
            _check_cover(name, parts, content["files"], path)
    return found


def by_name(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """The slices of each tensor, from its first value on."""
    found: dict[str, list[Part]] = {}
    for part in sorted(parts, key=lambda part: (part.name, part.begin)):
        found.setdefault(part.name, []).append(part)
    return found


def _check_cover(name: str, parts: list[Part], files: Mapping[str, object], path: Path) -> None:
    count = 1
    for length in parts[0].shape:
        count *= length
    edges = [part.begin for part in parts[1:]] + [count]
    if parts[0].begin != 0 or any(part.end != edge for part, edge in zip(parts, edges, strict=True)):
        raise CheckpointError(f"{path}: the slices of '{name}' do not make up its {count:,} values")
    if len({(part.shape, part.dtype, part.channels_last) for part in parts}) > 1:
        raise CheckpointError(f"{path}: the slices of '{name}' are of different tensors")
    missing = [part.file for part in parts if part.file not in files]
    if missing:
        raise CheckpointError(f"{path}: '{name}' is in {missing[0]!r}, which 'files' does not name")
    if parts[0].channels_last and len(parts[0].shape) != 4:
        raise CheckpointError(f"{path}: '{name}' is channels-last with {len(parts[0].shape)} dimensions")


def _typed(content: Mapping[str, Any], key: str, kind: type[T], path: Path, default: T | None = None) -> T:
    value = content.get(key, default)
    if type(value) is not kind:  # not isinstance: true is not a number here
        raise CheckpointError(f"{path}: '{key}' is {type(value).__name__}, wanted {kind.__name__}")
    return value


def require_folder(path: Path) -> None:
    """Refuse what is no folder, with the nearest name beside it that holds checkpoints."""
    if not path.is_dir():
        what = "a file; wanted a checkpoint or a folder of them" if path.exists() else "no such file or folder"
        raise CheckpointError(f"{path}: {what}{_meant(path)}")


def _meant(path: Path) -> str:
    names = [p.name for p in path.parent.glob("[!.]*") if p.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    held = [name for name in near if _holds_checkpoints(path.with_name(name))]
    return f"; did you mean '{held[0]}'?" if held else ""


def _holds_checkpoints(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or (folder / "checkpoints").is_dir() or any(folder.glob(f"*/{MANIFEST}"))
