"""Compare training from JPEG files with synthetic data: images per second of each, their ratio, and the time waited.

    python bench/from_files.py FOLDER                                any folder of JPEG files, flat or not
    python bench/from_files.py FOLDER --models resnet50:512 mobilenet-v3-large:512 --kinds files-cpu marked-cuda
    python bench/from_files.py FOLDER --device cpu --images 256 --models resnet18:16 --options="--image-size 64"

Each measurement is `falconet train` with a model and its micro-batch, from files, from files with restart markers,
from files as `falconet data pack --resize 320` stores them, or from shards that `falconet data pack` made of them,
decoded by --decode-device cpu or cuda. The kinds take turns in one process per model, so that a change in the machine's
speed affects all of them. The photos are linked repeatedly until there are --images, and come from the page cache. The
first quarter of the updates is warm-up and not counted; it must be longer than what is read ahead, which takes up to
7,000 images. A run that fails is reported and left out; the exit code is 1 then. The table at the end has the runs of
this call only; --output keeps each with its options.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

from falconet import __version__
from falconet.data import native
from falconet.data.packing import Recipe, prepared
from runs import add_row, falconet, rows_in, train

ENDINGS = {".jpg", ".jpeg"}
CLASSES = 1000
OPTIONS = "--image-size 224 --precision 16.16 --loss-scaling 128"
SYNTHETIC = "synthetic"
LIBRARIES = ("torch", "torchvision")
RECIPES = {"marked": Recipe(), "resized": Recipe(resize=320)}
KINDS = [f"{stored}-{decoded}" for stored, decoded in product(("files", *RECIPES, "shards"), ("cpu", "cuda"))]


def link_photos(folder: Path, images: int, into: Path) -> None:
    """`into`/train and `into`/val with CLASSES folders of links to the photos."""
    found = sorted(path.resolve() for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if not found:
        raise SystemExit(f"{folder}: contains no JPEG files")
    for split, count in (("train", images), ("val", CLASSES)):
        for number in range(count):
            place = into / split / f"{number % CLASSES:04}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:07}.jpg").symlink_to(found[number % len(found)])
    for path in found:
        path.read_bytes()  # into the page cache
    size = sum(path.stat().st_size for path in found) / len(found)
    print(f"{into.name}: {len(found)} photos of {size / 1000:.0f} kB on average, {images} links", flush=True)


def stored_photos(folder: Path, into: Path, recipe: Recipe) -> Path:
    """The photos as `falconet data pack` stores them."""
    library = native.library()
    if library is None:
        raise SystemExit(f"{into.name}: {native.why_not()}")
    into.mkdir()
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    with ThreadPoolExecutor() as pool:
        outcomes = pool.map(partial(prepared, recipe=recipe, library=library), found)
        for number, outcome in enumerate(outcomes):
            (into / f"{number:05}.jpg").write_bytes(outcome.data)
    return into


def compare(model: str, args: argparse.Namespace, home: Path, outputs: Sequence[Path]) -> None:
    """Measure all kinds with one model, in a separate process, which exits with 1 if one of them fails."""
    name, _, batch = model.partition(":")
    options = f"--model {name} --micro-batch-size {batch} --device {args.device} {args.options}"
    # As ImageNet, not as a folder, which would bring the optimizer and augmentation of the config `photos`.
    photos = "--data imagenet --data-dir {} --decode-device {}"
    data = {SYNTHETIC: f"--data synthetic --classes {CLASSES} --iterations {args.images // int(batch)}"}
    for kind in args.kinds:
        stored, _, decoded = kind.partition("-")
        data[kind] = photos.format(home / stored, decoded)
    versions = {"falconet": __version__, **{name: version(name) for name in LIBRARIES}}
    about = {"options": options, "images": args.images, "versions": versions}
    failed = False
    for number in range(args.rounds):
        synthetic: float | None = None  # of this round
        for kind, given in data.items():
            try:
                speed = train(f"{options} {given}")
            except RuntimeError as error:
                print(f"{model} {kind} failed: {error}", flush=True)
                failed = True
                continue
            rate = speed.images_per_second
            synthetic = rate if kind == SYNTHETIC else synthetic
            ratio = f"{rate / synthetic:6.1%} of synthetic  " if synthetic else ""
            words = f"{rate:8,.0f} images/s  {ratio}waited {speed.waited:.1f} %"
            print(f"{model:24} round {number + 1}  {kind:12} {words}", flush=True)
            entry = {"model": model, "kind": kind, "images_per_second": rate, "waited_percent": speed.waited}
            for output in outputs:
                add_row(output, entry | about)
    sys.exit(failed)


def table(path: Path) -> Iterator[str]:
    """A Markdown table of the medians and their ratios to synthetic data."""
    rates: dict[str, dict[str, list[float]]] = {}
    for run in rows_in(path):
        rates.setdefault(run["model"], {}).setdefault(run["kind"], []).append(run["images_per_second"])
    kinds = [kind for kind in (SYNTHETIC, *KINDS) if any(kind in found for found in rates.values())]
    yield f"| model and batch | {' | '.join(kind.replace('-', ', ') for kind in kinds)} |"
    yield "|---|" + "---:|" * len(kinds)
    for model, found in rates.items():
        medians = {kind: statistics.median(rates) for kind, rates in found.items()}
        whole = medians.get(SYNTHETIC)
        words = {kind: f"{rate:,.0f}" + (f" ({rate / whole:.1%})" if whole else "") for kind, rate in medians.items()}
        cells = [words.get(kind, "") for kind in kinds]
        yield f"| {model.replace(':', ', ')} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=["resnet50:512"], metavar="NAME:MICRO-BATCH")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["files-cpu"])
    parser.add_argument("--images", type=int, default=61_440, help="training images")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--options", default=OPTIONS, help="of every run")
    parser.add_argument("--output", type=Path, help="JSON lines to append each run to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        runs, failed = home / "runs.jsonl", False
        runs.touch()
        stored, count = {kind.partition("-")[0] for kind in args.kinds}, max(args.images, CLASSES)
        link_photos(args.folder, count, home / "files")
        for kind, recipe in RECIPES.items():
            if kind in stored:
                link_photos(stored_photos(args.folder, home / f"{kind}-photos", recipe), count, home / kind)
        if "shards" in stored:
            falconet(["data", "pack", str(home / "files"), str(home / "shards")], home / "pack.log")
            print((home / "pack.log").read_text().splitlines()[-1], flush=True)
        for model in args.models:
            outputs = [runs, args.output] if args.output else [runs]
            process = multiprocessing.get_context("spawn").Process(target=compare, args=(model, args, home, outputs))
            process.start()
            process.join()
            failed = failed or process.exitcode != 0
        print("\n".join(table(runs)))
    sys.exit(failed)


if __name__ == "__main__":
    main()
