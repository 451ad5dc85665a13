"""Compare averages of one run's weights: last, best, moving average, mean and exponential averages of checkpoints.

    python bench/averaging.py --data-dir DIR --output averaging.json -- --config cifar10-resnet20 --epoch 40
    python bench/averaging.py --show docs/evidence/averaging.json       the table, for docs/using/recipes.md

Words after `--` go to `falconet train`, with --ema-half-life 2 and a checkpoint after every epoch. The run is kept
if --run names a folder; the same line again continues with what is missing there and in --output. Without --run it
starts again. Each average is validated twice: with the mean of batch norm's statistics, and with statistics estimated
from training images. The best checkpoint is chosen on the same images that measure it, so its accuracy is too
high.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from falconet import writing
from runs import device_of, divided, falconet, give_memory_back

AVERAGES = {
    **{f"mean of the last {count}": f"--weight-avg-N {count}" for count in (2, 5, 10, 20)},
    **{
        f"exponential, decay {decay}": f"--weight-avg-strategy exponential --weight-avg-exp-decay {decay}"
        for decay in (0.5, 0.8, 0.9, 0.97)
    },
}
ESTIMATED = 10_000  # training images
_ACCURACY = re.compile(r"^accuracy of the average: ([\d.]+)%", re.M)


def trained(words: list[str], run: Path) -> Iterator[tuple[str, list[float | None]]]:
    """The accuracies that the run itself measures; an existing run is not made again."""
    saved = ["--checkpoint-save-freq", "1", "--checkpoints-kept", "all"]  # else only the newest three are there
    if not (run / "summary.json").exists():
        line = ["train", *words, "--ema-half-life", "2", *saved, "--no-report", "--run-dir", str(run), "--resume"]
        falconet(line, run.with_suffix(".log"))
        give_memory_back()
    rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    found = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    moving = [row["validation_ema/accuracy"] for row in rows if "validation_ema/accuracy" in row]
    yield "last", [found[-1], None]
    yield "best of all validations", [max(found), None]
    yield "moving average, half-life 2 epochs", [moving[-1], None]


def averaged(words: str, run: Path) -> float:
    """The accuracy of one average, in percent."""
    log = run.with_suffix(".log")
    with tempfile.TemporaryDirectory() as folder:
        line = f"average {run} {words} --validate --checkpoint-output-path {folder}/average"
        falconet(line.split(), log)
    text = log.read_text()
    match, asked = _ACCURACY.search(text), re.search(r"--weight-avg-N (\d+)", words)
    assert match is not None
    if asked is not None and f"averaged {asked[1]} checkpoints" not in text:
        raise RuntimeError(f"expected {asked[1]} checkpoints to average; the run has fewer epochs")
    return float(match[1])


def table(rows: dict[str, list[float | None]]) -> Iterator[str]:
    yield "| weights | accuracy, % | with batch norm estimated again |"
    yield "|---|---:|---:|"
    for name, cells in rows.items():
        yield f"| {name} | " + " | ".join("" if cell is None else f"{cell:.2f}" for cell in cells) + " |"


def main() -> None:
    here, further = divided(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="as of falconet train; not a part of the record")
    parser.add_argument("--output", type=Path, help="JSON, written after each average")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="of the run, which is kept (default: it is not)")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of such a file; trains nothing")
    args = parser.parse_args(here)
    if args.show:
        print("\n".join(table(json.loads(args.show.read_text())["accuracies"])))
        return
    about = {
        "command": f"falconet train {shlex.join(further)}",
        "device": device_of(further),
        "torch": version("torch"),
    }
    stored = json.loads(args.output.read_text()) if args.run and args.output and args.output.exists() else {}
    before = {name: stored.get(name) for name in about}
    if stored and before != about:
        parser.error(f"{args.output} is of {', '.join(map(str, before.values()))}; this is {', '.join(about.values())}")
    rows: dict[str, list[float | None]] = stored.get("accuracies", {})

    def keep(name: str, cells: list[float | None]) -> None:
        rows[name] = cells
        print(name, *cells, flush=True)
        if args.output:
            writing.replace(
                args.output.parent, args.output.name, json.dumps(about | {"accuracies": rows}, indent=1) + "\n"
            )

    with tempfile.TemporaryDirectory() as folder:
        run = args.run or Path(folder) / "run"
        for name, cells in trained([*further, *(["--data-dir", args.data_dir] if args.data_dir else [])], run):
            keep(name, cells)
        for name, words in AVERAGES.items():
            if name in rows:
                continue
            again = averaged(f"{words} --batchnorm-images {ESTIMATED}", run)
            keep(name, [averaged(words, run), again])
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
