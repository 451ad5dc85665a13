"""Weights from other programs: safetensors and torch files, read as data and never executed.

Files are recognised by content, not by name. `load_foreign` copies tensors into a model, whatever their names;
`origin.py` finds the options of the model that follow from the program that wrote the file.
"""

import argparse
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from falconet.checkpoint import torch_file
from falconet.config.options import Model
from falconet.errors import CheckpointError
from falconet.models import zoo

WRAPPERS = (  # keys under which trainers store the weights; the first one found is taken, averages last
    *("state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights", "params"),
    *("state_dict_ema", "ema_state_dict", "model_ema", "ema"),
)
ARGUMENTS = ("args", "opts")  # keys under which trainers store the options of their command line
# Parts of a name that DataParallel, DistributedDataParallel and torch.compile add, at any depth.
ADDED = frozenset(("module", "_orig_mod"))
MOST_TRIED = 3  # models of timm
COUNTERS = frozenset(("n_averaged",))  # of torch's AveragedModel; not a weight

# What torch.load has been seen to raise on truncated, corrupted and random files.
NONSENSE = (
    pickle.UnpicklingError,
    struct.error,
    RuntimeError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,  # a corrupted length field asks for terabytes
    zipfile.BadZipFile,
    zlib.error,
)
DEEPEST = 8  # wrappers around the weights
SNIFFED = 512  # bytes that show what a file is
# What people pass by mistake: the start of the file, and what it is.
MISTAKEN = (
    (b"version https://git-lfs", "is a Git LFS pointer; `git lfs pull` fetches the weights"),
    (b"<", "is a web page or XML, not weights; a download that failed?"),
    (b"\xff\xd8\xff", "is a photo; expected a run, a checkpoint or a weights file"),
    (b"\x89PNG", "is a photo; expected a run, a checkpoint or a weights file"),
    (b"\x1f\x8b", "is compressed with gzip; expected the file inside"),
    (b"BZh", "is compressed with bzip2; expected the file inside"),
    (b"\xfd7zXZ", "is compressed with xz; expected the file inside"),
    (b"\x89HDF", "is HDF5, as Keras writes it; expected safetensors or a torch weights file"),
    (b"\x08", "is perhaps ONNX; expected safetensors or a torch weights file"),
)
COUNT = "num_batches_tracked"  # of batch norm; files of torch 0.4 and older lack it, and evaluation does not use it
ANY_CLASSES = 1000
MOST_NAMED = 3  # tensors of one kind in an error
NUMBERED = re.compile(r"(features|classifier)(\.\w+)*")  # torchvision's names, whose numbers are the order
Layers = dict[str, dict[str, Tensor]]  # by the layer's name: its tensors by the last part of theirs


@dataclass(frozen=True)
class WeightsFile:
    """The content of another program's file."""

    path: Path
    weights: dict[str, Tensor]  # on the host, in the file's order, names without the additions of wrappers
    arguments: dict[str, Any]  # the options of the program that wrote it, if it stored them


@dataclass(frozen=True)
class Fit:
    """Weights under a model's names, and the differences between the two."""

    tensors: dict[str, Tensor]  # those with the right shape
    missing: tuple[str, ...]  # in the weights
    surplus: tuple[str, ...]  # in the weights, under their own names
    reshaped: Mapping[str, tuple[Tensor, Tensor]]  # of another shape: the file's and the model's
    classifier: str  # the model's last layer

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.surplus or self.reshaped)

    @property
    def other_classes(self) -> int | None:
        """The weights' number of classes, if nothing but the classifier differs."""
        if self.missing or self.surplus or not self.reshaped:
            return None
        if any(name.rpartition(".")[0] != self.classifier for name in self.reshaped):
            return None
        found, _ = next(iter(self.reshaped.values()))
        return found.shape[0]

    def faults(self) -> str:
        """The tensors that do not fit, by name, in one line."""
        reshaped = [f"{name} {_shape(got)}, expected {_shape(own)}" for name, (got, own) in self.reshaped.items()]
        groups = ((self.missing, "missing"), (self.surplus, "unexpected"), (reshaped, "with another shape"))
        return ", ".join(f"{len(names):,} {what} ({_listed(names)})" for names, what in groups if names)


def read_file(path: Path) -> WeightsFile:
    """Read the weights into host memory, without the wrappers that trainers add, and the arguments beside them."""
    try:
        with path.open("rb") as file:
            found = _read_safetensors(path) if _is_safetensors(file.read(SNIFFED)) else _read_torch(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; expected a weights file") from error
    weights: dict[str, Tensor] = {}
    for key, value in _unwrapped(found, path).items():
        if not isinstance(key, str):
            raise CheckpointError(
                f"{path}: a tensor is called by a {type(key).__name__}; expected only names and tensors"
            )
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: '{key}' is {type(value).__name__}; expected only names and tensors")
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_complex():
            raise CheckpointError(f"{path}: '{key}' is sparse, complex or without values; expected plain tensors")
        name = ".".join(part for part in key.split(".") if part not in ADDED)
        if name in weights:
            raise CheckpointError(f"{path}: two tensors are called '{name}' after removing wrapper prefixes")
        if name not in COUNTERS:
            weights[name] = value.detach()
    if not weights:
        raise CheckpointError(f"{path}: holds no tensors")
    return WeightsFile(path, weights, _arguments(found))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of `read_file` alone."""
    return read_file(path).weights


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, where: str, name: str = "this model") -> None:
    """Copy `weights` of the same names into `model` if all of them fit; otherwise change nothing."""
    fit = _by_name(model.state_dict(), weights)
    if not fit.is_whole:
        raise CheckpointError(f"{where} does not fit {name}: {fit.faults()}")
    model.load_state_dict(dict(weights))


def load_foreign(model: nn.Module, weights: Mapping[str, Tensor], *, where: str, name: str = "this model") -> None:
    """Copy these tensors, whatever their names, into `model`, if all of them fit; otherwise change nothing.

    To take only a part, such as all but the classifier of other classes, use `fit` and load its `tensors`.
    """
    found = fit(model.state_dict(), weights)
    if not found.is_whole:
        raise CheckpointError(f"{where} does not fit {name}: {found.faults()}{_hint(found, weights, where=where)}")
    model.load_state_dict(found.tensors)


def fit(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Fit:
    """Find the tensors of another program that belong to `own`, a model's state; `weights`: in the file's order.

    Layers of the same name belong together. Those that remain are paired in order, if each pair agrees in what it
    holds and in every shape: both list their layers in the order of creation, which is that of the forward
    pass in the programs known here. The classifier, last in both, may have another number of classes.
    """
    weights = _without_common_prefix(own, weights)
    layers, ours = _layers(weights), _layers(own)
    theirs = [name for name in layers if name not in ours]
    open_ = [name for name in ours if name not in layers]
    pairs = _paired(theirs, open_, layers, ours)
    renamed = {
        pairs.get(name.rpartition(".")[0], name.rpartition(".")[0]) + f".{_leaf(name)}": name for name in weights
    }
    counts = {
        name: torch.zeros_like(tensor) for name, tensor in own.items() if _leaf(name) == COUNT and name not in renamed
    }
    found = {new.removeprefix("."): weights[old] for new, old in renamed.items()}
    shaped = {name: _like(tensor, own[name]) if name in own else tensor for name, tensor in found.items()}
    return _by_name(own, shaped | counts, original=renamed)


def fitting_model(weights: Mapping[str, Tensor], *, where: str = "") -> tuple[str, int] | None:
    """A model that these weights would fit, and their number of classes; only shapes are compared.

    It is one of the zoo's models, which takes about 6 s of a core, or a timm model whose name is in their path.
    """
    shapes = {name: tensor.to("meta") for name, tensor in weights.items()}
    ours = sorted(zoo.names(), key=lambda name: not name.endswith("-cifar"))  # the quickest first
    for name in (*ours, *_named_after(where)):
        found = fit(shapes_of(name, classes=ANY_CLASSES), shapes)
        if found.is_whole or found.other_classes:
            return name, found.other_classes or ANY_CLASSES
    return None


def shapes_of(name: str, *, classes: int) -> Mapping[str, Tensor]:
    """The state of a model without its values."""
    try:
        with torch.device("meta"):
            return zoo.build_model(Model(model=name), classes=classes, seed=0).state_dict()
    except NotImplementedError:  # timm's RegNets look at a tensor of widths, which torch 2.11 cannot do there
        state = zoo.build_model(Model(model=name), classes=classes, seed=0).state_dict()
        return {key: tensor.to("meta") for key, tensor in state.items()}


def _named_after(path: str) -> list[str]:
    """The timm models whose names are in a path, longest first: convnext_tiny-983f3dbf.pth, a folder of the hub."""
    import timm

    words = path.lower().replace("-", "_")
    found = [name for name in timm.list_models() if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", words)]
    return [zoo.TIMM_PREFIX + name for name in sorted(found, key=len, reverse=True)[:MOST_TRIED]]


def _is_safetensors(start: bytes) -> bool:
    """Whether a file starts with eight bytes of length and then JSON, which no zip file or pickle does."""
    return start[8:9] == b"{" and not start.startswith((torch_file.ZIP, pickle.PROTO))


def _read_safetensors(path: Path) -> object:
    try:
        return safetensors.torch.load(path.read_bytes())
    except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: truncated, or not safetensors ({' '.join(str(error).split())})") from error


def _read_torch(path: Path) -> object:
    try:
        torch_file.check(path)
        with (
            warnings.catch_warnings(action="ignore"),  # about pickle protocols and old storages: no help to the user
            torch.serialization.safe_globals([argparse.Namespace]),
            path.open("rb") as file,  # of a path, torch reads the ending
        ):
            return torch.load(file, weights_only=True, map_location="cpu")
    except NONSENSE as error:
        refused = re.search(r"GLOBAL (\w[\w.]*\w)", str(error))
        if refused:
            raise CheckpointError(
                f"{path}: refused: it would import {refused[1]}; expected only tensors, as"
                " torch.save(model.state_dict(), ...) writes them"
            ) from None
        raise CheckpointError(f"{path}: {_mistaken(path)}") from error


def _mistaken(path: Path) -> str:
    """A guess, in words, at the format of a file that cannot be read."""
    with path.open("rb") as file:
        start = file.read(SNIFFED)
    if start[257:262] == b"ustar":
        return "is a tar archive; expected the file inside"
    unknown = "truncated, or neither safetensors nor a torch weights file"
    return next((what for magic, what in MISTAKEN if start.lstrip().startswith(magic)), unknown)


def _arguments(found: object) -> dict[str, Any]:
    if isinstance(found, Mapping):
        for key in ARGUMENTS:
            stored = found.get(key)
            if isinstance(stored, argparse.Namespace):
                return vars(stored)
            if isinstance(stored, dict):
                return {name: value for name, value in stored.items() if isinstance(name, str)}
    return {}


def _unwrapped(found: object, path: Path) -> Mapping[object, object]:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: holds {type(found).__name__}; expected names and tensors")
    weights: Mapping[object, Any] = found
    for _ in range(DEEPEST):
        inner = next((weights[key] for key in WRAPPERS if isinstance(weights.get(key), Mapping)), None)
        if inner is None:
            return weights
        weights = inner
    raise CheckpointError(f"{path}: its weights are wrapped more than {DEEPEST} times; expected names and tensors")


def _hint(found: Fit, weights: Mapping[str, Tensor], *, where: str) -> str:
    """A hint at the model that the weights are for."""
    if found.other_classes:
        return f"; these weights are for {found.other_classes:,} classes"
    other = fitting_model(weights, where=where)
    return f"; these weights fit {other[0]} with {other[1]:,} classes (all {len(weights):,} tensors)" if other else ""


def _by_name(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, original: Mapping[str, str] | None = None
) -> Fit:
    """Match weights by name; `original`: their names in the file."""
    called = original or {}
    return Fit(
        tensors={name: weights[name] for name, t in own.items() if name in weights and weights[name].shape == t.shape},
        missing=tuple(name for name in own if name not in weights),
        surplus=tuple(
            called.get(name, name) for name in weights if name not in own and not (original and _leaf(name) == COUNT)
        ),
        reshaped={
            name: (weights[name], tensor)
            for name, tensor in own.items()
            if name in weights and weights[name].shape != tensor.shape
        },
        classifier=next(reversed(_layers(own)), ""),
    )


def _without_common_prefix(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights without a prefix that a trainer adds to every name, such as Lightning's `model.`."""
    firsts, known = {name.partition(".")[0] for name in weights}, {name.partition(".")[0] for name in own}
    if len(firsts) != 1 or firsts <= known or not all("." in name for name in weights):
        return weights
    return _without_common_prefix(own, {name.partition(".")[2]: tensor for name, tensor in weights.items()})


def _layers(weights: Mapping[str, Tensor]) -> Layers:
    layers: Layers = {}
    for name, tensor in weights.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != COUNT:
            layers.setdefault(layer, {})[leaf] = tensor
    return layers


def _paired(theirs: Sequence[str], ours: Sequence[str], layers: Layers, own: Layers) -> dict[str, str]:
    """The model's name of each layer of the file; empty if the two do not agree, or agree in several ways."""
    if not theirs or len(theirs) != len(ours):
        return {}
    if list(layers) == sorted(layers):  # as safetensors are stored, whatever the order was
        if all(NUMBERED.fullmatch(name) for name in theirs):
            theirs = sorted(theirs, key=_number)
        elif len({_signature(own[name]) for name in ours}) == len(ours):
            shaped = {_signature(layers[name]): name for name in theirs}
            theirs = [shaped.get(_signature(own[name]), theirs[-1]) for name in ours]
        else:
            return {}
    pairs = list(zip(theirs, ours, strict=True))
    last = next(reversed(own))
    agree = all(
        _signature(layers[a], from_=int(b == last)) == _signature(own[b], from_=int(b == last)) for a, b in pairs
    )
    return dict(pairs) if agree and len(set(theirs)) == len(ours) else {}


def _signature(layer: Mapping[str, Tensor], *, from_: int = 0) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The tensors of a layer with shapes from a dimension on; a linear layer counts as a 1 x 1 convolution."""
    return tuple(sorted((leaf, _as_linear(tensor)[from_:]) for leaf, tensor in layer.items()))


def _as_linear(tensor: Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return shape[:2] if shape[2:] == (1, 1) else shape


def _like(tensor: Tensor, own: Tensor) -> Tensor:
    return tensor.reshape(own.shape) if _as_linear(tensor) == _as_linear(own) else tensor


def _number(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """A sort key that puts features.10 after features.2, and the classifier after the features."""
    parts = [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]
    return not name.startswith("features"), parts


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - MOST_NAMED:,} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
