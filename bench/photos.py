"""Train on a folder of photos with Falconet, timm's train.py and Ultralytics, each at its defaults, for the same time.

    python bench/photos.py photos/ --seconds 60 --timm pytorch-image-models/train.py
    python bench/photos.py photos/ --timm train.py --model tf_efficientnet_lite0 --weights lite0.safetensors

`photos/` has train/<class>/ and val/<class>/, the layout that all three take. Each tool is started as its user would,
with one command and nothing but the model, the weights and the number of epochs; time counts from the start of the
process, imports included. A first run of three epochs measures how long an epoch takes; the second has as many epochs
as fit into --seconds, so that every schedule ends in time (--epochs skips the first run). Ultralytics has an option for
that of its own, and cannot use the file of --weights: it starts from random weights.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runs import add_row

ULTRALYTICS_START = 15.0  # seconds until its first update, which its limit leaves out
POLLED = 0.1  # seconds between looks at a tool's results


@dataclass(frozen=True)
class Tool:
    """A training program: its command, and the accuracies that it has written so far."""

    name: str
    command: Callable[[Path], list[str]]  # for a folder for results
    epochs: str | None  # its option for the number of epochs
    accuracies: Callable[[Path], list[float]]  # percent, one per epoch


@dataclass(frozen=True)
class Trained:
    """The result of one run."""

    tool: str
    command: str
    seconds: float
    accuracies: list[float]
    times: list[float]  # seconds from the start, per epoch

    @property
    def epochs(self) -> int:
        return len(self.accuracies)

    @property
    def last(self) -> float:
        return self.accuracies[-1]

    @property
    def best(self) -> float:
        return max(self.accuracies)


def falconet(photos: Path, model: str, weights: Path | None) -> Tool:
    def command(out: Path) -> list[str]:
        start = ["--pretrained", str(weights) if weights else "none"]
        line = ["train", str(photos), "--model", model, "--run-dir", str(out / "run"), *start]
        return [sys.executable, "-m", "falconet", *line]

    def accuracies(out: Path) -> list[float]:
        path = out / "run/metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]

    return Tool("Falconet", command, "--epoch", accuracies)


def timm(photos: Path, model: str, weights: Path | None, *, script: Path) -> Tool:
    classes = sum(1 for entry in (photos / "train").iterdir() if entry.is_dir())

    def command(out: Path) -> list[str]:
        line = ["--data-dir", str(photos), "--model", model, "--num-classes", str(classes)]
        start = ["--pretrained", "--pretrained-path", str(weights)] if weights else []
        return [sys.executable, str(script), *line, "--output", str(out), "--experiment", "run", *start]

    def accuracies(out: Path) -> list[float]:
        return [float(row["eval_top1"]) for row in _table(out / "run/summary.csv")]

    return Tool("timm", command, "--epochs", accuracies)


def ultralytics(photos: Path, model: str, *, seconds: float) -> Tool:
    def command(out: Path) -> list[str]:
        entry = "from ultralytics.cfg import entrypoint; entrypoint()"  # what its command `yolo` runs
        hours = (seconds - ULTRALYTICS_START) / 3600
        line = ["classify", "train", f"model={model}", f"data={photos.resolve()}", f"time={hours:.5f}"]
        return [sys.executable, "-c", entry, *line, f"project={out}", "name=run"]

    def accuracies(out: Path) -> list[float]:
        return [100 * float(row["metrics/accuracy_top1"]) for row in _table(out / "run/results.csv")]

    return Tool("Ultralytics", command, None, accuracies)


def _table(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def run(tool: Tool, epochs: int | None) -> Trained:
    """Train for some epochs, and record the time at which each accuracy appears in the tool's results."""
    length = [tool.epochs, str(epochs)] if tool.epochs else []
    with tempfile.TemporaryDirectory() as folder:
        out, times = Path(folder), list[float]()
        command = [*tool.command(out), *length]
        with (out / "log").open("w") as log:
            begin = time.perf_counter()
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            while process.poll() is None:
                time.sleep(POLLED)
                times += [time.perf_counter() - begin] * (len(tool.accuracies(out)) - len(times))
        seconds, found = time.perf_counter() - begin, tool.accuracies(out)
        if process.returncode or not found:
            raise SystemExit(f"{tool.name} failed: {' '.join(command)}\n{(out / 'log').read_text()[-2000:]}")
        times += [seconds] * (len(found) - len(times))
        return Trained(tool.name, " ".join(command), seconds, found, times)


def epochs_in(tool: Tool, seconds: float) -> int:
    """The number of epochs that fit, estimated from a run of three."""
    tried = run(tool, 3)
    each = (tried.times[2] - tried.times[0]) / 2
    start = tried.seconds - 3 * each
    print(f"{tool.name}: {start:.1f} s to start, {each:.2f} s per epoch", flush=True)
    return max(2, int((seconds - start) / each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="folder with train/<class>/ and val/<class>/")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each tool")
    parser.add_argument("--model", default="resnet50", help="timm's name of the network of Falconet and timm")
    parser.add_argument("--weights", type=Path, help="file of published weights for it; default: random weights")
    parser.add_argument("--timm", type=Path, help="timm's train.py, which its package does not contain")
    parser.add_argument("--ultralytics", help="a model of Ultralytics, such as yolo11n-cls.yaml")
    parser.add_argument(
        "--epochs", nargs="*", default=[], metavar="TOOL=N", help="falconet=20 timm=10: not measured first"
    )
    parser.add_argument("--output", type=Path, help="JSON lines to append the results to")
    arguments = parser.parse_args()
    photos, model, weights = arguments.photos, arguments.model, arguments.weights
    tools = [falconet(photos, f"timm:{model}", weights)]
    tools += [timm(photos, model, weights, script=arguments.timm)] if arguments.timm else []
    if arguments.ultralytics:
        tools += [ultralytics(photos, arguments.ultralytics, seconds=arguments.seconds)]
    known = {name: int(number) for name, _, number in (each.partition("=") for each in arguments.epochs)}
    results = []
    for tool in tools:
        timed = tool.epochs is not None and tool.name.lower() not in known
        results += [run(tool, epochs_in(tool, arguments.seconds) if timed else known.get(tool.name.lower()))]
        if arguments.output:
            add_row(arguments.output, {"photos": str(photos), **vars(results[-1])})
    print(f"{'tool':<14}{'epochs':>7}{'first':>9}{'seconds':>9}{'last':>9}{'best':>9}")
    for done in results:
        numbers = f"{done.epochs:>7}{done.times[0]:>9.1f}{done.seconds:>9.1f}{done.last:>8.2f}%{done.best:>8.2f}%"
        print(f"{done.tool:<14}{numbers}")


if __name__ == "__main__":
    main()
