"""Measure a short recipe: accuracy and seconds over seeds, one run after the other in this process.

python3 bench/speedrun.py --data-dir DIR [--config cifar10-speedrun] [--seeds 25] [--output FILE.jsonl]
    [--peer SCRIPT] [--peer-runs 25] [--minutes 8] [-- OPTIONS OF FALCONET TRAIN]

A first run, which is not counted, compiles kernels and lets cuDNN choose its own. The seconds of further runs are
those that they write themselves: `counted` in summary.json, training and validation without start-up and capturing
graphs. Whitening filters are made before that clock starts, so their time is measured separately and added.

--peer: the script of a record, such as airbench94_muon.py, run unchanged beside ours; it prints accuracy and seconds of
each run, of which the first is its own warm-up, and is ended after enough runs.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from falconet.bench.statistics import estimate
from falconet.data.preprocessing import normaliser
from falconet.data.sources import cifar
from falconet.data.storage import ArraySource
from falconet.models import zoo
from falconet.models.speednet import WHITENED_FROM, SpeedNet
from product_runs import add_row, divided, falconet


class Measured(NamedTuple):
    """One run."""

    who: str
    number: int  # its seed, or its number
    accuracy: float  # percent
    seconds: float
    parts: dict[str, float]  # of the seconds


def our_runs(words: list[str], *, seeds: int, whitening: float) -> Generator[Measured, None, None]:
    """The warm-up run, then one run per seed."""
    for number in range(-1, seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            seed = ["--seed", str(max(number, 0)), "--run-dir", str(run)]
            falconet(["train", *words, *seed], Path(folder) / "log")
            summary = json.loads((run / "summary.json").read_text())
        parts = {**summary["seconds"], "whitening": round(whitening, 4)}
        accuracy = summary["metrics"]["validation/accuracy"]
        yield Measured("falconet", number, accuracy, parts["counted"] + whitening, parts)


def whitening_seconds(data_dir: Path) -> float:
    """The seconds to make whitening filters from images on the device, as in the records; the median of five."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = zoo.build("speednet8-cifar", classes=10, seed=0).to(device)
    assert isinstance(model, SpeedNet)
    splits = cifar.load(data_dir, kind="cifar10")
    assert isinstance(splits.train, ArraySource)
    normalise = normaliser(splits.preprocessing_at(cifar.SIDE)).to(device)
    chosen = np.linspace(0, len(splits.train), WHITENED_FROM, endpoint=False, dtype=np.int64)
    pixels = torch.from_numpy(splits.train.images[chosen]).to(device).permute(0, 3, 1, 2)
    taken = []
    for _ in range(6):
        begun = time.perf_counter()
        model.whiten(normalise(part) for part in torch.split(pixels, 500))
        float(model.conv1.weight.sum())  # waits for the device
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken[1:]))


def peer_runs(script: Path, data_dir: Path, *, runs: int) -> Generator[Measured, None, None]:
    """The runs of a record's script, first its warm-up, in a folder with the data that it expects."""
    with tempfile.TemporaryDirectory() as folder:
        _lay_out(data_dir, Path(folder) / "cifar10")
        command = [sys.executable, "-u", str(script.resolve())]
        errors = Path(folder) / "errors"  # of a compiled script, mostly pages about the choice of kernels
        with (
            errors.open("w") as file,
            subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=file, text=True) as process,
        ):
            assert process.stdout is not None
            try:
                for number, (accuracy, seconds) in enumerate(islice(peer_results(process.stdout), runs + 1)):
                    yield Measured(script.stem, number - 1, 100 * accuracy, seconds, {})
                if process.poll():
                    print(f"{script.name} failed:\n{errors.read_text(errors='replace')[-2500:]}")
            finally:
                process.kill()  # it would go on for 200 runs


def peer_results(lines: Iterator[str]) -> Iterator[tuple[float, float]]:
    """The accuracy, 0 to 1, and the seconds of each run, from a table with a row `eval` after each."""
    columns: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "tta_val_acc" in cells:
            columns = cells
        elif columns and len(cells) == len(columns):
            row = dict(zip(columns, cells, strict=True))
            seconds = row.get("time_seconds", row.get("total_time_seconds", ""))
            if row["epoch"] == "eval" and row["tta_val_acc"] and seconds:
                yield float(row["tta_val_acc"]), float(seconds)


def _lay_out(data_dir: Path, target: Path) -> None:
    """Write CIFAR-10 in the form that the records' scripts store after downloading it."""
    target.mkdir()
    splits = cifar.load(data_dir, kind="cifar10")
    for name, source in (("train", splits.train), ("test", splits.validation)):
        assert isinstance(source, ArraySource)
        images, labels = torch.from_numpy(source.images), torch.from_numpy(source.labels)
        torch.save({"images": images, "labels": labels, "classes": list(source.class_names)}, target / f"{name}.pt")


def collect(runs: Generator[Measured, None, None], *, until: float, output: Path | None) -> list[Measured]:
    """Print, write and return every run except the warm-up; end early if the next one would take too long."""
    found: list[Measured] = []
    begun = time.monotonic()
    with contextlib.closing(runs):
        for each in runs:
            took, begun = time.monotonic() - begun, time.monotonic()
            name = "warm-up" if each.number < 0 else f"run {each.number}"
            parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in each.parts.items())
            print(f"{each.who} {name}: {each.accuracy:.2f} % in {each.seconds:.3f} s  {parts}".rstrip(), flush=True)
            if output:
                add_row(output, each._asdict())
            if each.number >= 0:
                found.append(each)
            if begun + 1.5 * took > until:
                print(f"{each.who}: no time for another run", flush=True)
                break
    return found


def summarise(found: list[Measured]) -> None:
    for what, values in (
        ("accuracy, %", [each.accuracy for each in found]),
        ("seconds", [each.seconds for each in found]),
    ):
        over = estimate(values)
        spread = f", standard deviation {over.std:.4f}, 95 % interval {over.low:.4f} to {over.high:.4f}"
        print(f"{found[0].who}, {len(found)} runs: {what}: mean {over.mean:.4f}{spread if over.count > 1 else ''}")


def main() -> None:
    words, further = divided(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--config", default="cifar10-speedrun")
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--peer-runs", type=int, default=25)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything; the peer gets a half of them")
    asked = parser.parse_args(words)
    end = time.monotonic() + 60 * asked.minutes
    whitening = whitening_seconds(asked.data_dir)
    command = ["--config", asked.config, "--data-dir", str(asked.data_dir), *further]
    ours = our_runs(command, seeds=asked.seeds, whitening=whitening)
    until = (time.monotonic() + end) / 2 if asked.peer else end
    results = [collect(ours, until=until, output=asked.output)]
    if asked.peer:
        theirs = peer_runs(asked.peer, asked.data_dir, runs=asked.peer_runs)
        results.append(collect(theirs, until=end, output=asked.output))
    for found in filter(None, results):
        summarise(found)


if __name__ == "__main__":
    main()
