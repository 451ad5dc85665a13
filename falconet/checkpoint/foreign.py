"""Weights of other programs: safetensors and torch files, read as data and never executed."""

import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from falconet.checkpoint import torch_file
from falconet.errors import CheckpointError

WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "model_ema",
)  # keys under which trainers store the weights; the first one found is taken
PREFIX = re.compile(r"^(module\.)+")  # added by DataParallel and DistributedDataParallel

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


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a weights file into host memory, without the wrappers that trainers add."""
    try:
        found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
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
        name = PREFIX.sub("", key.replace("_orig_mod.", ""))  # added by torch.compile, at any depth
        if name in weights:
            raise CheckpointError(f"{path}: two tensors are called '{name}' after removing wrapper prefixes")
        weights[name] = value.detach()
    if not weights:
        raise CheckpointError(f"{path}: holds no tensors")
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, where: str, name: str = "this model") -> None:
    """Copy `weights` into `model` if all of them fit; otherwise change nothing."""
    expected = model.state_dict()
    missing = [key for key in expected if key not in weights]
    surplus = [key for key in weights if key not in expected]
    other = [
        f"{key} {_shape(weights[key])}, expected {_shape(tensor)}"
        for key, tensor in expected.items()
        if key in weights and weights[key].shape != tensor.shape
    ]
    groups = ((missing, "missing"), (surplus, "unexpected"), (other, "with another shape"))
    faults = [f"{len(keys)} {what} ({keys[0]}{', ...' if len(keys) > 1 else ''})" for keys, what in groups if keys]
    if faults:
        raise CheckpointError(f"{where} does not fit {name}: {', '.join(faults)}")
    model.load_state_dict(dict(weights))


def _read_safetensors(path: Path) -> object:
    try:
        return safetensors.torch.load(path.read_bytes())
    except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: truncated, or not safetensors ({' '.join(str(error).split())})") from error


def _read_torch(path: Path) -> object:
    try:
        torch_file.check(path)
        # Warnings about pickle protocols and old storages are no help to the user.
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, weights_only=True, map_location="cpu")
    except NONSENSE as error:
        refused = re.search(r"GLOBAL (\w[\w.]*\w)", str(error))
        if refused:
            raise CheckpointError(f"{path}: refused: it would import {refused[1]}; expected only tensors") from None
        raise CheckpointError(f"{path}: truncated, or neither safetensors nor a torch weights file") from error


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


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
