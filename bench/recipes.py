"""Train named configs over seeds, one run after the other in this process, and record what they reach.

    python bench/recipes.py cifar10-resnet20 cifar10-resnet56 --data-dir DIR --output docs/evidence/recipes.jsonl
    python bench/recipes.py NAME --data-dir DIR --output FILE --seeds 1 --minutes 5 [-- OPTIONS OF FALCONET TRAIN]
    python bench/recipes.py --show docs/evidence/recipes.jsonl [--plot docs/img/recipes.png] [--evidence FOLDER]

The runs are those of `falconet recipe verify NAME`, without starting Python for each. Every run is written when it
ends, with its validations; no run starts after --minutes. The same line again makes those that are not in the file;
with --again, all of them. If a seed has several runs, the last counts. The exit code is 1 if a run is missing.
--evidence writes the files that `falconet configs --evidence` shows, one per recipe.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import groupby, product
from pathlib import Path
from typing import Any

from falconet.commands.recipe_verify import evidence_in, trained_in
from falconet.config.evidence import Evidence, TrainedOnce
from falconet.config.recipes import all_configs
from product_runs import add_row, divided, falconet, give_memory_back, rows_in

SHOWN = 25  # percent below the best accuracy that a plot shows
# Of a plot, by how names begin.
FAMILIES = {"cifar10-": "CIFAR-10", "cifar100-": "CIFAR-100", "imagenette-": "Imagenette"}
Row = dict[str, Any]  # of one run


def trained(name: str, words: Sequence[str], *, data_dir: Path, seed: int) -> Row:
    """One run, with its validations and its time including the start."""
    with tempfile.TemporaryDirectory() as home:
        run, began = Path(home) / f"seed-{seed}", time.monotonic()
        line = ["train", "--config", name, "--data-dir", str(data_dir), "--seed", str(seed), "--run-dir", str(run)]
        try:
            falconet([*line, *words], run.with_suffix(".log"))
        finally:
            give_memory_back()
        whole = time.monotonic() - began
        found = trained_in(run, seed)
        about = evidence_in(name, Path(home), (found,))
        summary = json.loads((run / "summary.json").read_text())
        return {
            "recipe": name,
            **asdict(found),
            "moving_average": summary["metrics"].get("validation_ema/accuracy"),
            "whole": round(whole, 1),
            "curve": curve(run),
            "options": list(words),
            **{key: getattr(about, key) for key in ("device", "versions", "date")},
        }


def curve(run: Path) -> list[list[float]]:
    """Epoch, accuracy in percent and, if any, the moving average's accuracy for each validation."""
    found, epoch = [], 0.0
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        epoch = row.get("epoch", epoch)  # only a log point has it
        scores = [row[name] for name in ("validation/accuracy", "validation_ema/accuracy") if name in row]
        if scores:
            found.append([round(value, 3) for value in (epoch, *scores)])
    return found


def rows_of(path: Path) -> dict[str, list[Row]]:
    """The runs in a file by recipe; runs with further options are separate, by recipe and options."""
    last = {(_named(row), row["seed"]): row for row in rows_in(path)}
    by_name = [last[key] for key in sorted(last)]
    return {name: list(group) for name, group in groupby(by_name, key=_named)}


def _named(row: Row) -> str:
    return shlex.join([row["recipe"], *row["options"]])


def table(found: dict[str, list[Row]]) -> Iterator[str]:
    """The results as Markdown tables."""
    yield "| recipe | accuracy, % (mean, standard deviation) | moving average, % | seconds of training | in all |"
    yield "|---|---|---|--:|--:|"
    for name, rows in found.items():
        cells = [_spread([row[key] for row in rows if row[key] is not None]) for key in ("accuracy", "moving_average")]
        seconds = [f"{statistics.median(row[key] for row in rows):.0f}" for key in ("seconds", "whole")]
        yield " | ".join((f"| `{name}`, {len(rows)} runs" if len(rows) > 1 else f"| `{name}`", *cells, *seconds)) + " |"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    deviation = f", {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def evidence_of(name: str, rows: Sequence[Row]) -> Evidence:
    """The evidence from runs with the recipe's own options, on one kind of device."""
    if len(devices := {row["device"] for row in rows}) > 1:
        raise SystemExit(f"{name}: its runs are of {' and '.join(sorted(devices))}; expected one, in a file of its own")
    keys = [field.name for field in fields(TrainedOnce)]
    runs = tuple(TrainedOnce(**{key: row[key] for key in keys if key in row}) for row in rows)
    last = max(rows, key=lambda row: row["date"])
    return Evidence(
        recipe=name,
        runs=runs,
        command=f"falconet recipe verify {name} --seeds {len(runs)}",
        **{key: last[key] for key in ("device", "versions", "date")},
    )


def plot(found: dict[str, list[Row]], path: Path) -> None:
    """Draw every recipe's validations, or its moving average's if it has one; a picture per data set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    families = [family for family in FAMILIES if any(name.startswith(family) for name in found)]
    figure, places = pyplot.subplots(
        1, len(families), figsize=(4.5 * len(families), 4.5), layout="constrained", squeeze=False
    )
    for axes, family in zip(places[0], families, strict=True):
        mine = {name: rows for name, rows in found.items() if name.startswith(family)}
        for number, (name, rows) in enumerate(mine.items()):
            for row in rows:
                # Of each validation, what was measured last: the moving average, where there is one.
                curve = [(point[0], point[-1]) for point in row["curve"]]
                label = name if row is rows[0] else None  # once for all seeds
                style = "-" if len(curve) > 1 else "o"
                axes.plot(*zip(*curve, strict=True), style, color=f"C{number}", alpha=0.8, label=label)
        best = max(point[-1] for rows in mine.values() for row in rows for point in row["curve"])
        axes.set(title=FAMILIES[family], xlabel="epoch", ylabel="validation accuracy, %", ylim=(best - SHOWN, best + 1))
        axes.legend(fontsize=8, loc="lower right")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def show(path: Path, *, picture: Path | None, evidence: Path | None) -> None:
    """Print the table of a file of runs; draw them and write their evidence where asked for."""
    found = rows_of(path)
    if not found:
        raise SystemExit(f"{path}: no runs; expected a file that --output has written")
    print("\n".join(table(found)))
    if evidence:
        evidence.mkdir(parents=True, exist_ok=True)
        for name, rows in found.items():
            if name == rows[0]["recipe"]:  # with its own options alone
                (evidence / f"{name}.json").write_text(evidence_of(name, rows).to_json())
    if picture:
        plot(found, picture)


def main() -> None:
    here, further = divided(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--output", type=Path, help="JSON lines, one per run")
    parser.add_argument("--again", action="store_true", help="also make runs that the file has")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of such a file; trains nothing")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="with --show: draw the validations, too")
    parser.add_argument("--evidence", type=Path, metavar="FOLDER", help="with --show: write a file per recipe, too")
    args = parser.parse_args(here)
    if args.show:
        show(args.show, picture=args.plot, evidence=args.evidence)
        return
    if not (args.names and args.data_dir and args.output):
        parser.error("expected names of configs, --data-dir and --output, or --show")
    unknown = [name for name in args.names if name not in all_configs()]
    if unknown or args.seeds < 1:
        parser.error(f"not a named config: {', '.join(unknown)}" if unknown else "expected one seed or more")
    until = time.monotonic() + 60 * args.minutes
    done = set() if args.again else {(_named(row), row["seed"]) for row in rows_in(args.output)}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    missing = 0
    # One recipe after the other, so that what is there at the end is whole.
    for name, seed in product(args.names, seeds):
        if (shlex.join([name, *further]), seed) in done:
            print(f"{name}, seed {seed}: is in {args.output}", flush=True)
            continue
        if time.monotonic() > until:
            print(f"{name}, seed {seed}: no time is left", flush=True)
            missing += 1
            continue
        try:
            row = trained(name, further, data_dir=args.data_dir, seed=seed)
        except RuntimeError as error:
            print(f"{name}, seed {seed}: left out: {error}", flush=True)
            missing += 1
            continue
        print(
            f"{name}, seed {seed}: {row['accuracy']:.2f} % of {row['images']:,} images, {row['seconds']} s,"
            f" {row['whole']} s in all",
            flush=True,
        )
        add_row(args.output, row)
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
