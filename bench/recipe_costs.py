"""Estimate the hours of the named ImageNet configs on 1, 8 and 64 GPUs from the measured speed of one.

    python bench/recipe_costs.py --measure docs/evidence/recipe_rates.jsonl    one short run per network and micro-batch
    python bench/recipe_costs.py docs/evidence/recipe_rates.jsonl              the table, for docs/using/recipes.md

A config keeps its global batch. Its micro-batches were chosen for IPUs, so here they are as large as suits a GPU, at
most MOST images and at least LEAST, its stages run as one, and nothing is recomputed. Configs that train the same
network in the same formats with the same optimizer share their measurements. Communication is modelled as in
simulate_scaling.py.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import product
from pathlib import Path

from falconet.config import recipes
from falconet.config.commands import TrainOptions
from falconet.config.load import load_options, read_line
from product_runs import add_row, rows_in, train
from simulate_scaling import BACKWARD, GRADIENT_BYTES, Link, exposed

IMAGES = 1_281_167  # of ImageNet's training set
GPUS = (1, 8, 64)
MOST = {224: 256, 380: 64}  # images of a micro-batch, by their side
LEAST = 16
UPDATES = 40  # of a measurement
ALONE = (
    "--pipeline-splits --replicas 1 --batchnorm-span 1 --gradient-accumulation 1"
    " --no-enable-recompute --recompute-mode none"
)


@dataclass(frozen=True)
class Recipe:
    """The facts that determine how long a named config takes."""

    name: str
    network: str  # everything that decides how long one image takes, in words
    precision: str
    parameters: int
    side: int
    epochs: float
    batch: int

    def micro_batch(self, gpus: int) -> int | None:
        """The largest power of two that fits; None: the batch is too small for this many GPUs."""
        share = min(MOST[self.side], self.batch // gpus)
        return 1 << (share.bit_length() - 1) if share >= LEAST else None

    def hours(self, gpus: int, images_per_second: float) -> float:
        micro_batch = self.micro_batch(gpus)
        assert micro_batch is not None
        one = micro_batch / images_per_second
        size = self.parameters * GRADIENT_BYTES[self.precision]
        lost = exposed(size, backward=BACKWARD * one, message=Link(gpus).all_reduce) if gpus > 1 else 0.0
        accumulation = self.batch / (micro_batch * gpus)
        return self.epochs * IMAGES / self.batch * (accumulation * one + lost) / 3600


def all_recipes() -> list[Recipe]:
    """The configs that train on ImageNet, except bases of others."""
    from falconet.models import zoo

    found, counted = [], dict[str, int]()
    for name in recipes.all_configs():
        if recipes.about(name).startswith("Base of") or recipes.values_of(name).get("data") != "imagenet":
            continue
        options = load_options(TrainOptions, read_line(TrainOptions, ["--config", name, "--data-dir", "."])).options
        model, training, parallel = options.model, options.training, options.parallel
        default = type(model)()
        stated = (
            f"{each.name.replace('_', '-')} {getattr(model, each.name)}"
            for each in fields(model)
            if getattr(model, each.name) != getattr(default, each.name)
        )
        network = ", ".join([*stated, options.machine.precision, options.optimizer.optimizer])
        if network not in counted:
            counted[network] = zoo.count_parameters(zoo.build_model(model, classes=1000, seed=0))
        side = options.data.image_size
        replicas = 1 if parallel.replicas == "auto" else parallel.replicas
        assert isinstance(options.data.micro_batch_size, int)
        assert isinstance(training.epoch, int | float)
        found.append(
            Recipe(
                name=name,
                network=network,
                precision=options.machine.precision,
                parameters=counted[network],
                side=zoo.image_size(model.model) if side == "auto" else side,
                epochs=training.epoch,
                batch=options.data.micro_batch_size * training.gradient_accumulation * replicas,
            )
        )
    return found


Key = tuple[str, int]  # a network and a micro-batch


def needed(found: Sequence[Recipe]) -> dict[Key, Recipe]:
    """One config for each measurement; those of one GPU first, which say the most if the rest is cut off."""
    keys: dict[Key, Recipe] = {}
    for gpus, recipe in product(GPUS, found):
        if (size := recipe.micro_batch(gpus)) is not None:
            keys.setdefault((recipe.network, size), recipe)
    return keys


def measure(keys: Mapping[Key, Recipe], output: Path, *, device: str, updates: int) -> None:
    """Add the speed of each key to the file as it comes, except for those already in it."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    if others := {row["device"] for row in rows_in(output)} - {name}:
        raise SystemExit(f"{output} is of {' and '.join(sorted(others))}, this is {name}; expected another file")
    known = rates(output)
    for (network, size), recipe in keys.items():
        if (network, size) in known:
            continue
        line = f"--config {recipe.name} --data synthetic --classes 1000 {ALONE} --micro-batch-size {size}"
        try:
            speed = train(f"{line} --iterations {updates} --device {device}")
        except RuntimeError as error:
            print(f"left out: {error}", flush=True)
            continue
        print(f"{speed.images_per_second:10,.1f} images/s, micro-batch {size}: {network}", flush=True)
        about = {"device": name, "torch": version("torch"), "command": f"falconet train {line}"}
        row = {"network": network, "micro_batch": size, "images_per_second": round(speed.images_per_second, 1)}
        add_row(output, row | {"memory_gib": round(speed.memory, 2)} | about)


def rates(path: Path) -> dict[Key, float]:
    return {(row["network"], row["micro_batch"]): row["images_per_second"] for row in rows_in(path)}


def table(found: Sequence[Recipe], measured: Mapping[Key, float]) -> Iterator[str]:
    yield "| config | batch | epochs | images/s on one GPU | " + " | ".join(f"{gpus} GPU" for gpus in GPUS) + " |"
    yield "|---|" + "---:|" * (3 + len(GPUS))
    for recipe in found:
        speeds = {gpus: measured.get((recipe.network, recipe.micro_batch(gpus) or 0)) for gpus in GPUS}
        times = [_spelled(recipe.hours(gpus, speed)) if speed else "" for gpus, speed in speeds.items()]
        alone = f"{speeds[1]:,.0f}" if speeds[1] else ""
        yield f"| `{recipe.name}` | {recipe.batch:,} | {recipe.epochs:g} | {alone} | " + " | ".join(times) + " |"


def _spelled(hours: float) -> str:
    if hours >= 100:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{max(1, math.ceil(60 * hours))} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON lines with a measurement each")
    parser.add_argument("--measure", action="store_true", help="add those that are missing to the file first")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of each measurement")
    args = parser.parse_args()
    found = all_recipes()
    if args.measure:
        measure(needed(found), args.file, device=args.device, updates=args.updates)
    print("\n".join(table(found, rates(args.file))))


if __name__ == "__main__":
    main()
