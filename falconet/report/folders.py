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
_FAMILIES = (("resnet", "RN"), ("resnext", "RNX"), ("efficientnet-b", "EfficientNet-B"))


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
    image_size: int | None  # pixels; None: the model's own
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
    """Such as RN50_bs8x16rx8a_GN32_16.16."""
    family = next((short for long, short in _FAMILIES if shape.model.startswith(long) and _size(shape.model)), "")
    name = f"{family}{_size(shape.model)}" if family else _safe(shape.model)
    name += f"_bs{shape.micro_batch}"
    name += f"x{shape.replicas}r" * (shape.replicas > 1)
    if shape.pipelined:
        name += f"x{shape.accumulation}p"
    elif shape.accumulation > 1:
        name += f"x{shape.accumulation}a"
    name += {"group": f"_GN{shape.groups}", "batch": "_BN", "none": "_noBN"}[shape.norm]
    if not family.startswith("EfficientNet"):
        name += f"_{shape.precision}"
    # In full precision there is nothing to round, and the original's default, on, is not in the options.
    name += "_noSR" if shape.precision.startswith("16") and not shape.rounds_stochastically else ""
    cifar = shape.data.startswith("cifar") or (shape.model.endswith("-cifar") and shape.image_size == 32)
    if shape.image_size not in (None, 224) and not cifar:
        name += f"_{shape.image_size}x{shape.image_size}"
    return name


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
