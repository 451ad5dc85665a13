"""Successive runs of `falconet train` in this process, and their speed; shared by comparisons in this folder.

Starting a process takes seconds, most of it to import torch; five runs in one process are five runs of the same loop.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = 4  # log points of a run; the first one is warm-up


@dataclass(frozen=True)
class Speed:
    """The speed of a run after its first log point."""

    images_per_second: float
    waited: float  # percent of the time, for data
    memory: float  # GiB of the device at most; 0 on a CPU


def falconet(words: Sequence[str], log: Path) -> None:
    """Run one command of the product, with its output in the log. RuntimeError if it fails."""
    from falconet import cli
    from falconet.exits import INTERRUPTED

    with _printing_to(log):
        code = cli.main(list(words))
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"falconet {' '.join(words)}\n{log.read_text(errors='replace')[-2500:]}")


def divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a script's line before and after `--`: its own options, and those of `falconet train`."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def device_of(words: Sequence[str]) -> str:
    """The name of the device on which `falconet train` computes with these options."""
    import torch

    from falconet.config.commands import TrainOptions
    from falconet.config.load import parse, read_line
    from falconet.parallel.world import device_kind

    kind = device_kind(parse(TrainOptions, read_line(TrainOptions, words)).options.machine.device)
    return torch.cuda.get_device_name() if kind == "cuda" else "CPU"


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, without an unfinished last one; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to such a file, replacing an unfinished last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row).encode() + b"\n")


def train(options: str) -> Speed:
    """Train one epoch without validation."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        line = f"{options} --epoch 1 --warmup-epoch 0 --validation-mode none --logs-per-epoch {PARTS}"
        try:
            falconet(["train", *line.split(), "--run-dir", f"{folder}/run"], Path(folder) / "log")
        finally:
            memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            give_memory_back()
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        notes = [
            line for line in (Path(folder) / "log").read_text(errors="replace").splitlines() if "not captured" in line
        ]
    print("\n".join(notes), end="\n" * len(notes), flush=True)  # such a run is slower
    counted = [entry for entry in map(json.loads, lines) if "train/images_per_second" in entry][1:PARTS]
    rate = len(counted) / sum(1 / entry["train/images_per_second"] for entry in counted)
    return Speed(rate, statistics.mean(entry["train/waiting_percent"] for entry in counted), memory)


def give_memory_back() -> None:
    """Return memory for the next run, or for another process whose turn it is."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # nothing happens where CUDA was not used


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """Redirect standard output and error to a file, including those of libraries and threads."""
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    with log.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
