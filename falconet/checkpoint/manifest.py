"""manifest.json: the facts about a checkpoint, its files, and the slices of tensors in them."""

import hashlib
import json
import math
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from falconet.checkpoint.disk import FileRecord, write_bytes
from falconet.errors import CheckpointError, path_near
from falconet.report import folders
from falconet.report.epochs import ACCURACY, MEAN_AVERAGE_PRECISION, Metric
from falconet.writing import could_name_a_file

WHOLE, DIVIDED = 1, 2  # formats: files of whole tensors, or of slices that several processes wrote
FORMAT = DIVIDED  # the newest one that can be read
MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
WEIGHTS = (SUFFIX, ".pt", ".pth", ".bin", ".ckpt")  # usual endings of weights files, which are recognised by content
MOST_BYTES = 1 << 24  # of a manifest: a million class names, or 100,000 slices
MOST_CLASSES, MOST_UNNAMED = 1_000_000, 10_000  # with and without their names
MOST_THREADS = 1 << 16  # or processes
MOST_VALUES = 1 << 48  # of a tensor
LARGEST = 1 << 53  # epochs, images, updates: exact as a float
MOST_DIGITS = 15  # of a number among the options
SEVERAL_LABELS = "several_labels"  # in the manifest of a model for images with any number of labels; else absent
IMAGES = "images"  # in the manifest: how many images its run had, and their digest
SECTIONS = ("preprocessing", "metrics", "meter", "runtime", "versions")  # objects in the manifest; may be empty

T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """Where training was when the checkpoint was saved."""

    epoch: int
    images: int
    update: int
    phase: int = 1
    epoch_images: int | None = None  # that an epoch trains on; None: saved by an older version

    @property
    def epochs(self) -> float:
        """The epochs trained, including the part of an unfinished one."""
        return self.epoch + (self.images / self.epoch_images if self.epoch_images else 0.0)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A slice of a tensor in a file: the values `begin` to `end`, in the memory order of the whole tensor."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    begin: int
    end: int
    file: str
    channels_last: bool = False  # else row-major

    @property
    def key(self) -> str:
        """The slice's name in the file, which may hold several slices of one tensor."""
        return f"{self.name}:{self.begin}"


@dataclass(frozen=True)
class Manifest:
    """A typed view of manifest.json; `content` holds all of it, other keys included."""

    format: int
    model: str
    classes: int
    progress: Position
    class_names: tuple[str, ...]
    preprocessing: dict[str, Any]
    config: dict[str, dict[str, Any]]  # every option of its run, with its value and source
    plan: Any
    metrics: dict[str, Any]
    meter: dict[str, Any]
    runtime: dict[str, Any]
    versions: dict[str, Any]
    averaged: bool
    files: dict[str, FileRecord]
    content: dict[str, Any]
    parts: dict[str, list[Part]] = field(default_factory=dict)  # by stem; only where several processes wrote

    @property
    def stems(self) -> list[str]:
        """The kinds of tensors in the checkpoint: model, optimizer and so on."""
        return list(self.parts) or [name.removesuffix(SUFFIX) for name in self.files]

    @property
    def best(self) -> tuple[float, int, float, float] | None:
        """The accuracy of the best validation so far, its update, its loss, and its epoch."""
        match self.content.get("best"):
            case [int() | float() as accuracy, int() as update, int() | float() as loss, float() as epoch]:
                return accuracy, update, loss, epoch
            case [int() | float() as accuracy, int() as update, int() | float() as loss]:  # of older versions
                return accuracy, update, loss, self._epoch_of(update)
            case [int() | float() as accuracy, int() as update]:
                return accuracy, update, math.inf, self._epoch_of(update)
            case _:
                return None

    def _epoch_of(self, update: int) -> float:
        """The epoch of an earlier update, as if all epochs had as many."""
        last = self.progress.update
        return round(self.progress.epochs * min(update, last) / max(1, last), 6)  # whole where an epoch ended

    @property
    def several_labels(self) -> bool:
        """Whether an image may have several classes, so that each has its own probability."""
        return self.content.get(SEVERAL_LABELS) is True

    @property
    def metric(self) -> Metric:
        """The metric of the run's validations."""
        return MEAN_AVERAGE_PRECISION if self.several_labels else ACCURACY

    @property
    def score(self) -> float | None:
        """The number by which validated checkpoints are compared, higher being better; None: not validated."""
        value = self.metrics.get("score", self.metrics.get("validation_accuracy"))  # older ones have no score
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    @property
    def rank(self) -> tuple[float, float] | None:
        """The checkpoint's rank among validated ones; None: not validated."""
        return None if self.score is None else rank(self.score, self.metrics.get("score_loss", math.inf))

    @property
    def better_stem(self) -> str:
        """The weights that validated better: `model`, or `ema`, its moving average."""
        accuracy = self.metrics.get(f"validation_{self.metric.name}", math.inf)
        own = rank(accuracy, self.metrics.get("validation_loss", math.inf))
        return "ema" if "ema" in self.stems and self.rank is not None and self.rank > own else "model"

    def option(self, name: str) -> str:
        """The value of an option that every run has."""
        value = self.config.get(name, {}).get("value")
        if not isinstance(value, str):
            raise CheckpointError(f"the checkpoint's config has no usable '{name}'; expected that of a training run")
        return value

    def number(self, name: str) -> int:
        """The value of an option that is a whole number."""
        text = self.option(name)
        if not text.isdecimal() or len(text) > MOST_DIGITS:
            raise CheckpointError(f"the checkpoint's config has {text!r:.40} for '{name}', expected a number")
        return int(text)

    def digests(self, stem: str) -> tuple[str, ...]:
        """The digests of the files that hold `stem`; empty if none does."""
        names = sorted({part.file for part in self.parts.get(stem, ())} or {f"{stem}{SUFFIX}"})
        return tuple(self.files[name].sha256 for name in names if name in self.files)


def rank(accuracy: float, loss: float) -> tuple[float, float]:
    """A sort key for validations, highest for the best: by accuracy, then by lower loss."""
    return accuracy, -loss if math.isfinite(loss) else -math.inf


class Checkpoint(NamedTuple):
    """A checkpoint on disk."""

    folder: Path
    manifest: Manifest


def write_manifest(
    path: Path,
    content: Mapping[str, object],
    records: Mapping[str, FileRecord],
    parts: Mapping[str, Iterable[Part]] | None = None,
) -> None:
    """Write the manifest; it is the last file of a checkpoint to be written."""
    number = DIVIDED if parts else WHOLE
    own: dict[str, object] = {"format": number, "files": {name: asdict(record) for name, record in records.items()}}
    if parts:
        own["parts"] = {stem: [asdict(part) for part in each] for stem, each in parts.items()}
    rest = {key: value for key, value in content.items() if key != "parts"}
    whole: dict[str, object] = {"format": number} | rest | own
    whole["digest"] = _digest(whole)
    # No final newline, so that a manifest truncated at any byte is not JSON.
    write_bytes(path, memoryview(json.dumps(whole, indent=1).encode()))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint `folder`, without looking at its tensor files."""
    path = folder / MANIFEST
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise CheckpointError(f"{path}: not a file of at most {MOST_BYTES:,} bytes, as manifests are")
        content = json.loads(path.read_bytes())
        digest = _digest(content) if isinstance(content, dict) else None
    except FileNotFoundError:
        what = "has no manifest.json, so it is not a complete checkpoint" if folder.is_dir() else "no such checkpoint"
        raise CheckpointError(f"{folder}: {what}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder}: is a file; expected a checkpoint folder") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not JSON (truncated, or not a manifest)") from None
    if not isinstance(content, dict) or not {"format", "files"} <= content.keys():
        raise CheckpointError(f"{path}: not the manifest of a Falconet checkpoint")
    number = _typed(content, "format", int, path)
    if number > FORMAT:
        raise CheckpointError(
            f"{path}: has format {number}, but this version of Falconet reads at most {FORMAT}; upgrade Falconet"
        )
    if content.get("digest") != digest:
        raise CheckpointError(f"{path}: contents changed since it was written (digest mismatch)")
    for text in _texts(content):
        if not could_name_a_file(text):
            raise CheckpointError(f"{path}: holds the text {text!a:.80}; expected text that a file name may have")
    return _manifest(content, path)


def _texts(content: object) -> Iterator[str]:
    """Every text in the content, including keys."""
    left = [content]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case dict() as entries:
                left += [*entries.keys(), *entries.values()]
            case list() as values:
                left += values


def part_of(content: Mapping[str, Any], *, where: Path) -> Part:
    """Parse the slice that an entry describes."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: a part is {type(content).__name__}, expected an object")
    shape = _typed(content, "shape", list, where)
    if len(shape) > 8 or not all(type(length) is int and 0 <= length <= MOST_VALUES for length in shape):
        raise CheckpointError(f"{where}: 'shape' is {shape!s:.80}, expected lengths")
    if math.prod(max(1, length) for length in shape) > MOST_VALUES:
        raise CheckpointError(f"{where}: 'shape' is {shape}, expected at most {MOST_VALUES:,} values")
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
    # Through JSON and back, so that tuples and integer keys are hashed as they will be read.
    plain = json.loads(json.dumps(rest))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _manifest(content: dict[str, Any], path: Path) -> Manifest:
    progress = _typed(content, "progress", dict, path)
    files = _typed(content, "files", dict, path)
    names = _typed(content, "class_names", list, path, [])
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: 'class_names' holds something other than names")
    classes = _whole(content, "classes", path, least=1, most=MOST_CLASSES if names else MOST_UNNAMED)
    if names and len(names) != classes:
        raise CheckpointError(f"{path}: 'class_names' holds {len(names):,} names, expected {classes:,}, one per class")
    _check_runtime(_typed(content, "runtime", dict, path, {}), path)
    for name, value in _typed(content, "metrics", dict, path, {}).items():
        if not isinstance(value, int | float | None):
            raise CheckpointError(f"{path}: the metric '{name}' is {type(value).__name__}, expected a number")
    for name, record in files.items():
        if Path(name).name != name or not name.endswith(SUFFIX) or not isinstance(record, dict):
            raise CheckpointError(f"{path}: 'files' names {name!r}, expected plain file names that end in {SUFFIX}")
    return Manifest(
        format=content["format"],
        model=_typed(content, "model", str, path),
        classes=classes,
        progress=Position(
            **{key: _whole(progress, key, path) for key in ("epoch", "images", "update")},
            phase=_whole(progress, "phase", path, least=1, default=1),
            epoch_images=_whole(progress, "epoch_images", path, default=0) or None,
        ),
        class_names=tuple(names),
        config=_config(content, path),
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


def _whole(
    content: Mapping[str, Any], key: str, path: Path, *, least: int = 0, most: int = LARGEST, default: int | None = None
) -> int:
    value = _typed(content, key, int, path, default)
    if not least <= value <= most:
        raise CheckpointError(f"{path}: '{key}' is {value!s:.40}, expected {least:,} to {most:,}")
    return value


def _config(content: dict[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """The options of the run; each has a value, which is text, a switch or a list of texts."""
    found = content.get("config")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: 'config' is {type(found).__name__}, expected dict")
    for name, entry in found.items():
        if not isinstance(entry, dict) or "value" not in entry:
            raise CheckpointError(f"{path}: the option '{name}' in 'config' has no value")
    return found


def _check_runtime(stored: dict[str, Any], path: Path) -> None:
    """Check the values that a restored run adopts: threads and processes, which change bits, and splits of stages."""
    for key in ("threads", "processes"):
        if key in stored:
            _whole(stored, key, path, least=1, most=MOST_THREADS)
    splits = _typed(stored, "splits", list, path, [])
    if not all(isinstance(name, str) for name in splits):
        raise CheckpointError(f"{path}: 'splits' holds something other than names of layers")


def _parts(content: dict[str, Any], path: Path) -> dict[str, list[Part]]:
    """Parse the slices by stem; together they must hold every tensor exactly once."""
    found = {}
    for stem, entries in _typed(content, "parts", dict, path).items():
        if not isinstance(entries, list):
            raise CheckpointError(f"{path}: 'parts' of '{stem}' is {type(entries).__name__}, expected list")
        found[stem] = [part_of(entry, where=path) for entry in entries]
        for name, parts in by_name(found[stem]).items():
            _check_cover(name, parts, content["files"], path)
    return found


def by_name(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """The slices of each tensor, in order."""
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
        raise CheckpointError(f"{path}: the slices of '{name}' do not add up to its {count:,} values")
    if len({(part.shape, part.dtype, part.channels_last) for part in parts}) > 1:
        raise CheckpointError(f"{path}: the slices of '{name}' disagree on its shape, dtype or memory order")
    missing = [part.file for part in parts if part.file not in files]
    if missing:
        raise CheckpointError(f"{path}: '{name}' is in {missing[0]!r}, which 'files' does not name")
    if parts[0].channels_last and len(parts[0].shape) != 4:
        raise CheckpointError(f"{path}: '{name}' is channels-last with {len(parts[0].shape)} dimensions")


def _typed(content: Mapping[str, Any], key: str, kind: type[T], path: Path, default: T | None = None) -> T:
    value = content.get(key, default)
    if type(value) is not kind:  # not isinstance, which takes True for an integer
        raise CheckpointError(f"{path}: '{key}' is {type(value).__name__}, expected {kind.__name__}")
    return value


def require_folder(path: Path, *, or_weights: bool = False) -> None:
    """Refuse a path that is not a folder; suggest the nearest name. `or_weights`: a weights file is suggested too."""
    if not path.is_dir():
        what = "is a file; expected a checkpoint or a folder of them" if path.exists() else "no such file or folder"
        raise CheckpointError(f"{path}: {what}{checkpoints_near(path, or_weights=or_weights)}")


def checkpoints_near(missing: Path, *, or_weights: bool) -> str:
    """`; did you mean 'x'?` for what holds checkpoints, or weights, beside a missing path or among the runs."""
    files = WEIGHTS if or_weights else ()
    return path_near(missing, folders.home("runs"), holds=_holds_checkpoints, files=files)


def _holds_checkpoints(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or (folder / "checkpoints").is_dir() or any(folder.glob(f"*/{MANIFEST}"))
