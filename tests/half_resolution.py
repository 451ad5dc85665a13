"""A tiny run at half resolution, and what it writes."""

import json
from pathlib import Path

from falconet.checkpoint import format
from tiny import TINY

# Phase 1: 2 epochs of 32 // 8 = 4 updates. Phase 2: 2 epochs of 32 // (4 x 2) = 4 updates, counted 9 to 16.
HALF = (
    f"{TINY} --model resnet8-cifar --half-res-training --weight-avg-strategy mean --fine-tune-epoch 2"
    " --fine-tune-lr 0.2 --fine-tune-micro-batch-size 4 --fine-tune-gradient-accumulation 2"
    " --fine-tune-first-trainable-layer layer3/0"
)
NAME = "resnet8-cifar_generated"
EARLY = ("conv1.", "bn1.", "layer1.", "layer2.")


def metrics(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def logged(run):
    """The last number logged for each update, except speeds."""
    kept = ("loss", "accuracy", "lr", "loss_scale")
    lines = ((line["update"], name, value) for line in metrics(run) for name, value in line.items())
    return {(update, name): value for update, name, value in lines if name.rpartition("/")[2] in kept}


def tensors(folder):
    manifest = format.verify(Path(folder))
    read = {stem: format.read_tensors(Path(folder), stem, verified=manifest) for stem in manifest.stems}
    return {f"{stem}:{name}": tensor for stem, group in read.items() for name, tensor in group.items()}
