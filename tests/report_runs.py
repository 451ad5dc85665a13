"""Run folders as `falconet train` writes them, made without training: for tests of what is read from them."""

import base64
import io
import json

from PIL import Image

OPTIONS = {"model": "resnet8-cifar", "data": "digits", "optimizer": "sgd", "micro-batch-size": "64", "lr": "0.1"}
UPDATES = 10  # per epoch


def lines(objects):
    return "".join(json.dumps(each) + "\n" for each in objects)


def metrics(epochs, *, points=1):
    """A loss of 2 / epoch, an accuracy of 100 - 50 / epoch; `points`: log points per epoch."""
    found = []
    for number in range(1, epochs * points + 1):
        epoch, update = number / points, number * UPDATES // points
        found.append(
            {
                "update": update,
                "epoch": epoch,
                "train/loss": 2 / epoch,
                "train/accuracy": 100 - 50 / epoch,
                "train/lr": 0.1 / epoch,
                "train/images_per_second": 1000.0,
                "train/waiting_percent": 5.0,
            }
        )
        if number % points == 0:
            score = 100 - 60 / epoch
            found.append({"update": update, "validation/accuracy": score, "validation/loss": 1 / epoch})
    return found


def picture(colour="red", side=8):
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, "PNG")
    return {"kind": "png", "data": base64.b64encode(file.getvalue()).decode()}


def answers(names, *, images=10, update=30):
    """The first class is taken for the second once, the others are right."""
    count = len(names)
    cells = [[0, 0, images - 1], [0, 1, 1], *([label, label, images] for label in range(1, count))]
    correct = [images - 1, *[images] * (count - 1)]
    example = {"path": f"val/{names[0]}/1.jpg", "label": names[0], "predicted": names[1], "probability": 0.9}
    hit = {"path": f"val/{names[1]}/2.jpg", "label": names[1], "predicted": names[1], "probability": 0.4}
    return {
        "checkpoint": "ckpt_3",
        "epoch": "3",
        "update": update,
        "images": images * count,
        "per_class": [
            {"class": name, "images": images, "correct": right, "accuracy": 100 * right / images}
            for name, right in zip(names, correct, strict=True)
        ],
        "confusion": {"columns": ["label", "predicted", "images"], "cells": cells},
        "calibration": {
            "error": 4.5,
            "bins": [
                {"low": 0.0, "high": 0.5, "images": 2, "accuracy": 50.0, "confidence": 40.0},
                {"low": 0.5, "high": 1.0, "images": images * count - 2, "accuracy": 99.0, "confidence": 95.0},
            ],
        },
        "mistakes": [{**example, "picture": picture("red")}],
        "hits": [{**hit, "picture": picture("green")}],
    }


def write_run(folder, *, epochs=3, names=("cat", "dog", "owl"), options=(), points=1):
    """A whole run; `options`: (name, value, source) that are not at their defaults."""
    (folder / "report").mkdir(parents=True)
    stated = {name: (value, "default") for name, value in OPTIONS.items()}
    stated |= {name: (value, source) for name, value, source in options}
    (folder / "config.yaml").write_text("".join(f"{n}: {v}  # {s}\n" for n, (v, s) in stated.items()))
    (folder / "plan.txt").write_text("model resnet8-cifar, 75,290 parameters\n")
    (folder / "metrics.jsonl").write_text(lines(metrics(epochs, points=points)))
    times = [{"update": UPDATES * (each + 1), "milliseconds": [10.0 + each] * UPDATES} for each in range(epochs)]
    (folder / "updates.jsonl").write_text(lines(times))
    summary = {"updates": epochs * UPDATES, "images_per_second": 990.0, "training_seconds": 12.3}
    (folder / "summary.json").write_text(json.dumps({**summary, "peak_memory_bytes": 2**30}))
    memory = [{"update": UPDATES * (each + 1), "device": 2**30, "host": 2**29} for each in range(epochs)]
    (folder / "report/memory.jsonl").write_text(lines(memory))
    (folder / "report/answers.json").write_text(json.dumps(answers(list(names))))
    seen = {"update": 1, "pictures": [{"label": "cat 70 % + dog 30 %", **picture("blue")}]}
    (folder / "report/batch.json").write_text(json.dumps(seen))
    layer = {"name": "conv1", "kind": "Conv2d", "parameters": 432, "output": "16 x 8 x 8", "multiplications": 27648}
    (folder / "report/layers.json").write_text(json.dumps({"layers": [layer]}))
    (folder / "report/environment.json").write_text(json.dumps({"device": "CPU", "PyTorch": "2.15"}))
    for number in range(1, epochs + 1):
        saved = folder / f"checkpoints/ckpt_{number}"
        saved.mkdir(parents=True)
        manifest = {
            "progress": {"epoch": number, "images": 0, "update": number * UPDATES, "epoch_images": 640},
            "metrics": {"score": 100 - 60 / number, "score_loss": 1 / number},
            "files": {"model.safetensors": {"bytes": 2_500_000}},
        }
        (saved / "manifest.json").write_text(json.dumps(manifest))
    return folder


def profile(**more):
    """A summary of --profile: 10 ms an update, 6 of them convolutions and 2 idle; three layers, two of them as one."""
    return {
        "what": "update",
        "device": "cuda",
        "captured": True,
        "processes": 1,
        "traced": 2,
        "last": 6,
        "looked": 3,
        "milliseconds": 10.0,
        "idle": 2.0,
        "kinds": [
            {"kind": "norm", "calls": 4, "milliseconds": 2.0},
            {"kind": "convolution, forward", "calls": 2, "milliseconds": 6.0},
        ],
        "kernels": [
            {"name": "sm90_xmma_fprop", "kind": "convolution, forward", "calls": 2, "milliseconds": 6.0},
            {"name": "_normalise", "kind": "norm", "calls": 4, "milliseconds": 2.0},
        ],
        "left_out": 7,
        "layers": {
            "rows": [
                {"names": ["conv1"], "kind": "Conv2d", "forward": 1.0, "backward": 2.5, "kept": 2**20, "made": 2**21},
                {
                    "names": ["bn1", "act1"],
                    "kind": "FusedNorm",
                    "forward": 0.5,
                    "backward": 1.0,
                    "kept": 512,
                    "made": 0,
                },
            ],
            "rest": {"forward": 0.0, "backward": 0.0, "optimizer": 0.75, "other": 0.0},
            "passes": 4,
        },
        "memory": {
            "is_whole": True,
            "before": 2**30,
            "after": 2**30,
            "peak": 3 * 2**30,
            "peak_at": 4.0,
            "peak_phase": "backward",
            "peak_layers": ["conv1"],
            "milliseconds": 8.0,
            "points": [2**30, 2 * 2**30, 3 * 2**30, 2**30],
            "phases": [["forward", 0.0, 4.0], ["backward", 4.0, 7.0], ["optimizer", 7.0, 8.0]],
        },
        **more,
    }


def several_labels(folder, *, epochs=3):
    """A run on photos that have several labels each: 25 of them, 30 labels."""
    write_run(folder, epochs=epochs)
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {"train/accuracy": "train/exact", "validation/accuracy": "validation/mAP"}
    renamed = [{names.get(name, name): value for name, value in point.items()} for point in points]
    (folder / "metrics.jsonl").write_text(lines(renamed))
    classes = [{"class": name, "images": 10, "average_precision": 50.0} for name in ("red", "blue", "round")]
    answered = {"epoch": "3", "images": 25, "mAP": 50.0, "several_labels": True, "per_class": classes}
    (folder / "report/answers.json").write_text(json.dumps(answered))
    return folder
