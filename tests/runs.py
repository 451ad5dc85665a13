"""Runs as a user starts them: started, watched from outside, stopped, and compared bit by bit."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import torch

from falconet.checkpoint import format
from falconet.report.folders import RunShape
from falconet.train import loop

RN50 = RunShape(
    model="resnet50",
    data="imagenet",
    micro_batch=8,
    accumulation=8,
    replicas=16,
    pipelined=False,
    norm="group",
    groups=32,
    precision="16.16",
    rounds_stochastically=True,
    image_size=224,
)

LIMIT = 300  # seconds; a launch takes about 10 on a quiet machine


def stop_at(monkeypatch, update, act=lambda: True):
    """Ask the loop to stop after an update, if `act`, which is called then, returns true."""
    plain = loop.train

    def train(plan, progress, step, *, watch, **rest):
        stopping = watch.stopping

        def asked():
            return (progress.update == update and act()) or stopping()

        plain(plan, progress, step, watch=replace(watch, stopping=asked), **rest)

    monkeypatch.setattr(loop, "train", train)


def begin(command, cwd, *, launcher=(sys.executable, "-m", "falconet"), variables=None):
    line = [*launcher, *command.split()]
    env = os.environ | (variables or {})
    return subprocess.Popen(
        line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


# The first worker does not log an update until the file `go` exists: no run ends before a test has sent its signals.
STANDING = """
import json, os, time
plain = json.dumps
def dumps(content, *rest, **named):
    while isinstance(content, dict) and content.get("update") == {update} and not os.path.exists("go"):
        time.sleep(0.01)
    return plain(content, *rest, **named)
json.dumps = dumps
"""


def standing(home, *, update):
    """The environment of a run that stands still at an update."""
    (home / "sitecustomize.py").write_text(STANDING.format(update=update))
    return {"PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])}


def finish(process):
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def updates(run):
    log = run / "metrics.jsonl"
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""  # the last line may be incomplete
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line["update"] for line in lines if "train/loss" in line]


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def state(run):
    """Every tensor of the newest checkpoint."""
    folder = format.checkpoints_in(run)[-1]
    manifest = format.verify(folder)
    return {
        f"{stem}:{key}": tensor
        for stem in manifest.stems
        for key, tensor in format.read_tensors(folder, stem, verified=manifest).items()
    }


def metrics(run):
    """The last value of each metric for each update, except times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("train/images_per_second", "train/waiting_percent", "validation/seconds")
    return {(line["update"], key): value for line in lines for key, value in line.items() if key not in timed}


def assert_bitwise(one, other):
    left, right = state(one), state(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    assert metrics(one) == metrics(other)
