"""The names of run folders: ours, and those that tools of the originals look for."""

import os
import random
import re
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RUNS = "FALCONET_RUNS"  # the variable that names where new run folders go; `falconet bench` sets it
_RESIDUAL = {"resnet": "RN", "resnext": "RNX"}


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What names are made of."""

    model: str
    data: str
    micro_batch: int
    accumulation: int
    replicas: int
    pipelined: bool
    norm: str  # batch, group or none
    groups: int
    precision: str
    rounds_stochastically: bool
    image_size: int  # pixels
    suffix: str | None = None  # that was asked for


def fresh(style: str, shape: RunShape, *, version: str) -> Path:
    """A folder that is not there yet."""
    home = Path(os.environ.get(RUNS) or ("runs" if style == "falconet" else "logs"))
    suffix = f"_{shape.suffix.replace('/', '-')}" if shape.suffix else ""
    if style == "pytorch":
        return _first_free(home, lambda: f"{pytorch_name(shape)}{suffix}_{_three()}")
    if style == "tensorflow":
        return _first_free(home, lambda: f"{tensorflow_name(shape)}{suffix}_v{version}_{_three()}")
    now = time.strftime("%Y%m%d-%H%M%S")
    if style == "popart":
        return _numbered(home / now / (_size(shape.model) or shape.model), suffix[1:] or "net")
    return _numbered(home, f"{_safe(shape.model)}_{shape.data}_{now}{suffix}")


def pytorch_name(shape: RunShape) -> str:
    return f"{_safe(shape.model)}_bs{shape.micro_batch}_{shape.precision}fp_r{shape.replicas}_di1"


def tensorflow_name(shape: RunShape) -> str:
    """Such as RN50_bs8x16rx8a_GN32_16.16; each of its models had a form of its own."""
    efficient, squeezed = shape.model.startswith("efficientnet"), shape.model.startswith("squeezenet")
    name = f"{_tensorflow_model(shape.model)}_bs{shape.micro_batch}"
    replicas = f"x{shape.replicas}r" * (shape.replicas > 1)
    accumulation = f"x{shape.accumulation}{'p' if shape.pipelined else 'a'}"
    accumulation *= shape.pipelined or shape.accumulation > 1
    name += accumulation + replicas if efficient else replicas + accumulation
    if not squeezed:
        name += {"group": f"_GN{shape.groups}", "batch": "_BN", "none": "_noBN"}[shape.norm]
    if not efficient:
        # In the other precisions nothing is rounded, and the original's default, on, is not in the options.
        is_plain = shape.precision == "16.16" and not shape.rounds_stochastically
        name += f"_{shape.precision}" + "_noSR" * is_plain
    cifar = shape.data.startswith("cifar") or (shape.model.endswith("-cifar") and shape.image_size == 32)
    if shape.image_size != 224 and not cifar:
        name += f"_{shape.image_size}x{shape.image_size}"
    return name


def _tensorflow_model(model: str) -> str:
    """Family and size; others, which it did not have, by our name."""
    residual = re.match(r"(resnet|resnext)(\d+)", model)
    if residual:
        return f"{_RESIDUAL[residual[1]]}{residual[2]}"
    if model.startswith("efficientnet-"):
        return f"EfficientNet-{model.removeprefix('efficientnet-').upper()}"
    return "SN" if model.startswith("squeezenet") else _safe(model)


def _size(model: str) -> str:
    found = re.search(r"\d+", model)
    return found[0] if found else ""


def _three() -> str:
    """Three characters at random, whatever the seed of the run: a second run of it gets another folder."""
    return "".join(random.SystemRandom().choices(string.ascii_uppercase + string.digits, k=3))


def _first_free(home: Path, name: Callable[[], str]) -> Path:
    return next(folder for _ in range(1000) if not (folder := home / name()).exists())


def _numbered(home: Path, name: str) -> Path:
    taken = [home / name, *(home / f"{name}-{number}" for number in range(2, 1000))]
    return next(folder for folder in taken if not folder.exists())


def _safe(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", model)
