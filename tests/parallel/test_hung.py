"""A hung worker ends the run, with an error that names it and where it was."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from runs import begin, updates, wait_for
from tiny import TINY
from watched import children, wait_until_gone

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TIMEOUT = 20  # seconds; also for the processes to meet, on a busy machine
ENDING = 30 + 60  # torch's agent waits 30 s before it kills what does not end; the rest is for a busy machine
LINE = f"--replicas 2 --logs-per-epoch 4 --collective-timeout {TIMEOUT} --max-restarts 0 --epoch 5000 --run-dir r"


def rank_of(pid):
    return int(re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())[1])


def ended(process, *, hung):
    """What a run says whose worker hangs since `hung`."""
    out, err = process.communicate(timeout=TIMEOUT + ENDING + 60)
    assert process.returncode == 1, out
    assert time.monotonic() - hung < TIMEOUT + ENDING
    return err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_is_named_with_where_it_was(tmp_path, rank):
    process = begin(f"train {TINY} {LINE}", tmp_path)
    wait_for(lambda: len(updates(tmp_path / "r")) > 5, "update 6")
    workers = children(process.pid)
    stopped = next(pid for pid in workers if rank_of(pid) == rank)
    os.kill(stopped, signal.SIGSTOP)
    err = ended(process, hung=time.monotonic())
    silent = rf"rank {rank} gives no sign of life, last seen"
    assert re.search(rf"rank {1 - rank}: timed out after {TIMEOUT} s in update \d+, [a-z ']+: {silent}", err)
    wait_until_gone(*workers)


# Opening the photo waits for ever once the file `hang` is there, as a dead file server's files do.
HANGING = """
import os, time
opened = os.open
def patient(path, *rest, **named):
    while str(path).endswith("train/dark/3.png") and os.path.exists("hang"):
        time.sleep(0.1)
    return opened(path, *rest, **named)
os.open = patient
"""


def test_a_worker_that_waits_for_an_image_is_named(tmp_path, image_folder):
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    data = f"--data folder --data-dir {image_folder} --model resnet8-cifar --image-size 32 --device cpu --threads 1"
    line = f"train {data} --micro-batch-size 4 {LINE} --warmup-epoch 0 --dataloader-workers 1"
    process = begin(line, tmp_path, variables=paths)
    wait_for(lambda: len(updates(tmp_path / "r")) > 5, "update 6")
    (tmp_path / "hang").touch()
    err = ended(process, hung=time.monotonic())
    where = rf"rank (\d): timed out after {TIMEOUT} s in update \d+, [a-z ']+: rank (\d) did not arrive, last seen"
    found = re.search(where + r" \d+ s ago in reading the images of update \d+", err)
    assert found, err
    assert found[1] != found[2]
