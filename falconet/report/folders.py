"""The place and the name of a new run folder."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

RUNS = "FALCONET_RUNS"  # the variable that names where new run folders go; `falconet bench` sets it


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The facts that the name of a run is made of."""

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
    in_a_row: int = 1  # --device-iterations
    suffix: str | None = None  # --name-suffix
    parent: Path | None = None  # where its folder goes; None: the folder of all run folders


def fresh(shape: RunShape) -> Path:
    """A new path `runs/<model>_<data>_<time>`."""
    return numbered(home(shape.parent or "runs"), f"{plain(shape.model)}_{shape.data}_{now()}{suffix(shape)}")


def home(default: str | Path) -> Path:
    """The folder that holds all run folders."""
    return Path(os.environ.get(RUNS) or default)


def numbered(folder: Path, name: str) -> Path:
    """The first of the paths name, name-2, name-3 ... that does not exist yet."""
    candidates = [folder / name, *(folder / f"{name}-{number}" for number in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def plain(model: str) -> str:
    """A model's name without characters that are unsuitable for a folder."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", model)


def suffix(shape: RunShape) -> str:
    return f"_{shape.suffix.replace('/', '-')}" if shape.suffix else ""
