"""Conversions of classifiers to ONNX or OpenVINO files, written by `falconet export` and kept on this machine."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image

from falconet import __version__
from falconet.checkpoint.disk import aside, discard, move_into_place, sweep
from falconet.config.commands import ExportOptions
from falconet.config.load import of_command
from falconet.config.options import Model
from falconet.config.settings import Setting
from falconet.data.preprocessing import Preprocessing
from falconet.errors import CheckpointError, Interrupted, UserError
from falconet.infer.classifier import Classifier
from falconet.infer.prediction import Activation
from falconet.report.console import Say
from falconet.report.run_files import EXPORT_RECORD

Kind = Literal["onnx", "openvino"]
FILES: dict[str, tuple[str, ...]] = {"onnx": ("model.onnx",), "openvino": ("model.xml", "model.bin")}  # the model first
LIBRARIES: dict[Kind, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),  # packages that write a kind of file, and compute with it
    "openvino": ("openvino",),
}
MOST_BYTES = 1 << 26  # in a record, which names up to a million classes
KEPT = 20  # conversions; ResNet-50 takes 102 MB
COMPARED = 8  # noise images on which the file must have the model's scores
LONGEST = 3600.0  # seconds per conversion: one to int8 computes thousands of images, perhaps with a large model
SETTLED = ("checkpoint-input-path", "checkpoint", "device", "precision", "threads", "capture", "model-cache-path")
_KEY = re.compile(r"[0-9a-f]{32}")


class ConversionError(UserError):
    """A model that cannot be converted on this machine."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An export folder in memory: the files of a model that takes pixels, and what their record says."""

    kind: Kind
    model: str
    precision: str
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    activation: Activation
    files: dict[str, bytes]
    record: dict[str, Any]

    def accuracy(self) -> str | None:
        """A line on what int8 costs, as measured when the file was written; None for fp32."""
        match self.record.get("int8"):
            case {
                "images": int() as images,
                "photos": str() as what,
                "right": int() as right,
                "right_in_fp32": int() as full,
            }:
                return f"int8: {100 * right / images:.2f} % of {what} right, in fp32 {100 * full / images:.2f} %"
            case {"images": int() as images, "photos": str() as what, "answer": str() as answer, "same": int() as same}:
                return f"int8: the same {answer} as in fp32 for {100 * same / images:.2f} % of {what}"
            case _:
                return None

    def is_of(self, classifier: Classifier, conversion: "Conversion") -> bool:
        """Whether the record says that this is a given conversion of a given classifier."""
        return (
            self.kind == conversion.kind
            and self.precision == ("int8" if conversion.int8 else "fp32")
            and self.model == classifier.served_name
            and self.preprocessing == classifier.preprocessing
            and self.class_names == classifier.class_names
            and self.activation == classifier.activation
        )


class Conversion(NamedTuple):
    """A conversion of a classifier: the kind of file, and the options it depends on."""

    kind: Kind
    int8: bool
    options: Model  # the options its model was built from
    line: Sequence[Setting]  # the settings it was opened with

    def key(self, classifier: Classifier) -> str:
        """A name for the result: classifiers with the same key have the same weights and give the same file."""
        about = {
            "versions": {name: version(name) for name in ("torch", *LIBRARIES[self.kind])} | {"falconet": __version__},
            "conversion": [self.kind, self.int8, repr(self.options), repr(classifier.data) if self.int8 else ""],
            "model": [classifier.name, classifier.activation, classifier.class_names],
            "preprocessing": classifier.preprocessing.to_json(),
        }
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for name, tensor in classifier.model.state_dict().items():
            digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:32]

    def argv(self, classifier: Classifier, output: Path, photos: Path) -> list[str]:
        """The words after `falconet`. The output is never in the run folder, which may come from another person."""
        own = [setting for setting in of_command(ExportOptions, self.line) if setting.bare not in SETTLED]
        source = [setting for setting in self.line if setting.bare == "checkpoint-input-path"]
        if classifier.checkpoint is not None:  # exactly this one: a run in progress may have a better one by now
            own = [setting for setting in own if setting.bare != "pretrained"]
            named = [f"--checkpoint-input-path={classifier.checkpoint}"]
        else:
            named = [word for setting in source for word in setting.argv()]
        # Training images are only read to calibrate: they may be many, or gone.
        how = ["--int8"] if self.int8 else [f"--photos={photos}", "--latency-batch=1"]
        return [
            "export",
            *(word for setting in own for word in setting.argv()),
            *named,
            *("--format", self.kind, "--preprocessing", f"--output={output}"),
            *("--device", "cpu", "--threads", str(torch.get_num_threads()), *how),
        ]


def missing(kind: Kind) -> str | None:
    """The first missing package that a kind of file needs."""
    return next((name for name in LIBRARIES[kind] if find_spec(name) is None), None)


def cache_folder(chosen: Path | None) -> Path | None:
    """The folder for conversions: in --model-cache-path, else in the user's cache; None if there is none."""
    if chosen is not None:
        return chosen / "engines"
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        parent = chosen if chosen.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # as in a container that runs under an arbitrary user id
        return None
    return parent / "falconet" / "engines"


def converted(classifier: Classifier, conversion: Conversion, cache: Path | None, say: Say) -> Exported:
    """Convert a classifier, or take its file from the cache."""
    entry = None if cache is None else cache / conversion.key(classifier)
    found = kept(entry, classifier, conversion) if entry else None
    if found:
        return found
    runtime = "OpenVINO" if conversion.kind == "openvino" else "ONNX Runtime"
    how = " in int8, with images of its run" if conversion.int8 else ""
    begun = f"converting {classifier.name} for {runtime}{how}"
    try:
        return _newly(entry, classifier, conversion, lambda rest: say(f"{begun}; {rest}"))
    except OSError as error:
        raise ConversionError(f"{error.filename or 'the conversion'}: {error.strerror or error}") from error
    except CheckpointError as error:  # a file that changed at the same moment
        raise ConversionError(str(error)) from error


def _newly(entry: Path | None, classifier: Classifier, conversion: Conversion, say: Say) -> Exported:
    if entry is None or (problem := _unwritable(entry.parent)):
        why = "there is no home folder" if entry is None else f"{entry.parent}: {problem}"
        say(f"the result is not kept for the next start ({why})")
        with tempfile.TemporaryDirectory() as scratch:
            return _convert(classifier, conversion, Path(scratch) / "export")
    say(f"the result is kept in {entry.parent}")
    with _locked(entry.parent):
        return kept(entry, classifier, conversion) or _made(entry, classifier, conversion)  # by another server, or now


def _made(entry: Path, classifier: Classifier, conversion: Conversion) -> Exported:
    sweep(entry.parent)
    output = aside(entry, "tmp")
    try:
        made = _convert(classifier, conversion, output)
        move_into_place(output, entry)
    finally:
        discard(output)
    _prune(entry.parent)
    return made


def forget(classifier: Classifier, conversion: Conversion, cache: Path | None) -> None:
    """Remove what the cache holds for a classifier."""
    if cache is not None:
        discard(cache / conversion.key(classifier))


def kept(entry: Path, classifier: Classifier, conversion: Conversion) -> Exported | None:
    """The conversion in the cache; None if there is none, or if it is torn or another one."""
    try:
        found = read_export(entry)
    except CheckpointError:
        return None
    if not found.is_of(classifier, conversion):
        return None
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(entry)  # mark it as used
    return found


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be kept in a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else "may not be written to"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Take turns with other servers, so that those that start together convert the same model once."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: both convert, and the later one stays
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _prune(folder: Path) -> None:
    """Keep only the conversions that were used last."""
    found = [path for path in folder.iterdir() if _KEY.fullmatch(path.name)]
    for path in sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True)[KEPT:]:
        discard(path)


def _convert(classifier: Classifier, conversion: Conversion, output: Path) -> Exported:
    """Run `falconet export` in a separate process, because tracing blocks all other threads for seconds."""
    with tempfile.TemporaryDirectory() as photos:
        side, noise = classifier.preprocessing.image_size, np.random.default_rng(0)
        for number in range(COMPARED):
            Image.fromarray(noise.integers(0, 256, (side, side, 3), np.uint8)).save(Path(photos) / f"{number}.png")
        argv = [sys.executable, "-m", "falconet", *conversion.argv(classifier, output, Path(photos))]
        done = _finished(argv)
    if done.returncode:
        raise ConversionError(_reason(done).removeprefix(f"nothing is written to {output}: "))
    return read_export(output)


_exports: set["subprocess.Popen[str]"] = set()  # for which threads of this process wait


def _finished(argv: list[str]) -> "subprocess.CompletedProcess[str]":
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
    ) as export:
        _exports.add(export)
        try:
            out, err = export.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            raise ConversionError(f"`falconet export` did not finish within {LONGEST / 60:.0f} minutes") from None
        finally:
            export.kill()  # if this was interrupted
            ended = export not in _exports
            _exports.discard(export)
    if ended:
        raise Interrupted
    return subprocess.CompletedProcess(argv, export.returncode, out, err)


def end_exports() -> None:
    """End the conversions of other threads: they remove what was written, then raise Interrupted."""
    while _exports:
        with contextlib.suppress(KeyError):  # it has just finished
            _exports.pop().kill()


def _reason(done: "subprocess.CompletedProcess[str]") -> str:
    """Why an export failed: its last line, which is an error or a comparison that it did not pass."""
    said = [line.strip() for text in (done.stdout, done.stderr) for line in text.splitlines() if line.strip()]
    if done.returncode < 0 or not said:
        killed = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with {done.returncode}"
        return f"`falconet export` {killed}"
    return said[-1].removeprefix("falconet export: ")


def read_export(folder: Path) -> Exported:
    """Read an export folder and check the files' digests; CheckpointError if it is torn, or not an export."""
    where = folder / EXPORT_RECORD
    try:
        record = json.loads(_read(where, most=MOST_BYTES))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{where}: not JSON; expected the record of an export") from None
    match record:
        case {
            "format": str() as kind,
            "model": str() as model,
            "precision": str() as precision,
            "input": {"type": str() as taken},
            "preprocessing": dict() as preprocessing,
            "class_names": [*names],
            "probabilities": str() as activation,
            "files": dict() as files,
        } if activation in get_args(Activation) and all(isinstance(name, str) for name in names):
            pass
        case _:
            raise CheckpointError(f"{where}: not the record of an export")
    if kind not in FILES:
        raise CheckpointError(f"{folder}: is an export as {kind}; expected onnx or openvino")
    if taken != "uint8":
        raise CheckpointError(f"{folder}: takes normalised images; expected an export with --preprocessing")
    try:
        prepared = Preprocessing.from_json(preprocessing)
    except UserError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return Exported(
        kind="openvino" if kind == "openvino" else "onnx",
        model=model,
        precision=precision,
        preprocessing=prepared,
        class_names=tuple(names),
        activation="sigmoid" if activation == "sigmoid" else "softmax",
        files={name: _checked(folder / name, files.get(name)) for name in FILES[kind]},
        record=record,
    )


def _checked(path: Path, stated: object) -> bytes:
    """Read a file, which must have the stated size and digest."""
    match stated:
        case {"bytes": int() as size, "sha256": str() as digest}:
            content = _read(path, most=size)
        case _:
            raise CheckpointError(f"{path}: the record does not state its size and digest")
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{path}: contents changed since it was written (digest mismatch)")
    return content


def _read(path: Path, *, most: int) -> bytes:
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode) or state.st_size > most:  # a pipe would never end
            raise CheckpointError(f"{path}: not a file of at most {most:,} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
