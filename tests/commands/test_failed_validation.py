"""A validation that fails in one of several processes ends all of them, with their epoch saved."""

import os

import pytest

from falconet.checkpoint import format
from runs import begin, finish
from tiny import TINY

pytestmark = pytest.mark.dist

# Counting a validation batch fails in one process.
FAILING = """
import os
if os.environ.get("RANK") == "{rank}":
    from falconet.evaluation import evaluate
    def fail(*_):
        raise {error}
    evaluate.count = fail
"""


def failing(folder, rank, error, *, options=""):
    """Exit code and outputs of a run whose validation fails in one of its two processes."""
    (folder / "sitecustomize.py").write_text(FAILING.format(rank=rank, error=error))
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    line = f"train {TINY} --replicas 2 --epoch 2 --run-dir r {options}"
    return finish(begin(line, folder, variables=paths))


def saved(folder):
    (only,) = format.checkpoints_in(folder / "r")
    return format.verify(only)


@pytest.mark.parametrize("rank", [0, 1])
def test_too_little_memory_in_one_process_is_one_line_and_the_epoch_is_saved(tmp_path, rank):
    code, _, err = failing(tmp_path, rank, "RuntimeError('CUDA out of memory')", options="--checkpoint-save-freq 2")
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("falconet train: out of memory on the device; "), err
    assert err.endswith("the newest checkpoint is r/checkpoints/resnet8-cifar_generated_1\n")
    found = saved(tmp_path)
    assert (found.progress.epoch, found.meter["unvalidated"]) == (1, True)
    (tmp_path / "sitecustomize.py").unlink()
    code, _, err = finish(begin("restore --checkpoint-input-path r", tmp_path))
    assert code == 0, err


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "expected"),
    [("__import__('falconet.errors').errors.DataError('gone')", 2), ("RuntimeError('a mistake of ours')", 1)],
    ids=["the user's", "ours"],
)
def test_other_failures_in_one_process_keep_their_exit_code(tmp_path, rank, error, expected):
    code, _, err = failing(tmp_path, rank, error, options="--checkpoint-save-freq 2 --max-restarts 0")
    assert code == expected, err
    assert "gone" in err if expected == 2 else f"[rank {rank}] RuntimeError: a mistake of ours" in err, err
    assert saved(tmp_path).progress.epoch == 1
