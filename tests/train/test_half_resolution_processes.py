"""Half-resolution training in separate processes: killed with signal 9, and in several replicas."""

import signal
import subprocess
import sys

import pytest
import torch

from falconet.checkpoint import format
from half_resolution import EARLY, HALF, NAME, logged, tensors
from runs import stop_at, wait_for


def test_a_run_killed_in_the_second_phase_continues_bit_for_bit(tmp_path, falconet):
    line = f"train {HALF} --fine-tune-epoch 40 --checkpoint-save-freq 0.5 --checkpoints-kept all --validation-mode none"
    command = [sys.executable, "-m", "falconet", *line.split(), "--run-dir", "killed"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for((tmp_path / f"killed/checkpoints/{NAME}_2+00002").exists, "the second phase's first checkpoint")
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    # Both are compared two epochs later, of forty, so the speed of the machine does not matter.
    epochs = format.read_manifest(format.newest_whole(tmp_path / "killed", note=print)).progress.epoch + 2
    for run, start in (
        ("killed", "restore --checkpoint-input-path killed"),
        ("straight", f"{line} --run-dir straight"),
    ):
        assert stops_after(epochs, falconet, start) == 130, run
    left, right = (tensors(tmp_path / f"{run}/checkpoints/{NAME}_{epochs}") for run in ("straight", "killed"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def stops_after(epochs, falconet, line):
    # 4 updates per epoch in both phases
    with pytest.MonkeyPatch.context() as patched:
        stop_at(patched, 4 * epochs)
        return falconet(line).code


@pytest.mark.dist
@pytest.mark.usefixtures("forked_workers")
def test_replicas_train_both_phases(falconet):
    # Group norm does not see how the images are divided, so the losses are those of one process.
    line = f"train {HALF} --norm-type group --norm-num-groups 4 --logs-per-epoch 4 --lr 0.02 --fine-tune-lr 0.02"
    alone = falconet(f"{line} --gradient-accumulation 2 --iterations 2 --run-dir alone")
    assert alone.code == 0, alone.err
    both = falconet(
        f"{line} --replicas 2 --iterations 2 --fine-tune-gradient-accumulation 1 --enable-optimizer-rts --run-dir both"
    )
    assert both.code == 0, both.err
    left, right = logged("alone"), logged("both")
    assert left.keys() == right.keys()
    assert {key[0] for key in left} == set(range(1, 13))  # 2 epochs of 2 updates, 2 epochs of 4
    assert right == pytest.approx(left, rel=1e-4)
    averaged, last = (tensors(f"both/checkpoints/{NAME}_{end}") for end in ("2_averaged", "4"))
    for name, tensor in averaged.items():
        if name.startswith("model:"):
            assert torch.equal(tensor, last[name]) == name.removeprefix("model:").startswith(EARLY), name
