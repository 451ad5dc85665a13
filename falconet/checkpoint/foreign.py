"""Weights from elsewhere: safetensors and torch files, read as data, never run."""

import pickle
import re
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from falconet.errors import CheckpointError

WRAPPERS = ("state_dict", "model_state_dict", "model", "model_ema")  # what trainers call the weights; the first wins
PREFIX = re.compile(r"^(module\.)+")  # what wrapping in replicas adds

# What torch.load was seen to raise on torn, flipped and random files.
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
    MemoryError,  # a torn length field asks for terabytes
)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Names and tensors of a weights file, in host memory, without what trainers put around them."""
    try:
        found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; wanted a weights file") from error
    weights: dict[str, Tensor] = {}
    for key, value in _unwrapped(found, path).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: '{key}' is {type(value).__name__}; wanted names and tensors alone")
        name = PREFIX.sub("", str(key).replace("_orig_mod.", ""))  # torch.compile adds the latter, at any depth
        if name in weights:
            raise CheckpointError(f"{path}: two tensors are called '{name}' once wrappers' prefixes are gone")
        weights[name] = value.detach()
    if not weights:
        raise CheckpointError(f"{path}: no tensor in it")
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, where: str, name: str = "this model") -> None:
    """Copy `weights` into `model` if each one fits; nothing is changed otherwise."""
    wanted = model.state_dict()
    missing = [key for key in wanted if key not in weights]
    surplus = [key for key in weights if key not in wanted]
    other = [
        f"{key} {_shape(weights[key])}, wanted {_shape(tensor)}"
        for key, tensor in wanted.items()
        if key in weights and weights[key].shape != tensor.shape
    ]
    groups = ((missing, "missing"), (surplus, "too many"), (other, "of another shape"))
    faults = [f"{len(keys)} {what} ({keys[0]}{', ...' if len(keys) > 1 else ''})" for keys, what in groups if keys]
    if faults:
        raise CheckpointError(f"{where} does not fit {name}: {', '.join(faults)}")
    model.load_state_dict(dict(weights))


def _read_safetensors(path: Path) -> object:
    try:
        return safetensors.torch.load(path.read_bytes())
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not safetensors, or torn ({' '.join(str(error).split())})") from error


def _read_torch(path: Path) -> object:
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # about pickle protocols and old storages: not the user's concern
            return torch.load(path, weights_only=True, map_location="cpu")
    except NONSENSE as error:
        refused = re.search(r"GLOBAL (\w[\w.]*\w)", str(error))
        if refused:
            raise CheckpointError(f"{path}: refused, it asks for {refused[1]}; wanted tensors alone") from None
        raise CheckpointError(f"{path}: torn, or neither safetensors nor a torch weights file") from error


def _unwrapped(found: object, path: Path) -> Mapping[object, object]:
    while isinstance(found, Mapping):
        inner = next((found[key] for key in WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inner is None:
            return found
        found = inner
    raise CheckpointError(f"{path}: holds {type(found).__name__}; wanted names and tensors")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
