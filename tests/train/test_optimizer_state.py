"""Divided and offloaded optimizer state, from the command line to its checkpoints."""

import json
from pathlib import Path

import pytest

from falconet.checkpoint import format
from tiny import TINY

pytestmark = pytest.mark.usefixtures("two_cores", "forked_workers")

HALF = "--precision 16.16 --enable-stochastic-rounding --auto-loss-scaling --enable-optimizer-rts"


def test_a_half_precision_run_with_divided_state_is_saved_per_rank_and_read_by_every_command(falconet):
    answer = falconet(f"train {TINY} {HALF} --replicas 2 --epoch 2 --run-dir r")
    assert answer.code == 0, answer.err
    assert "optimizer sgd, state sharded over the replicas, seed" in answer.out
    saved = format.checkpoints_in(Path("r"))
    manifest = format.verify(saved[-1])
    assert manifest.format == 2
    for stem in ("model", "optimizer"):
        sizes = [manifest.files[f"{stem}-{rank:05d}.safetensors"].bytes for rank in (0, 1)]
        assert max(sizes) < 1.2 * min(sizes), "one process wrote more than its share"
    held = json.loads(Path("r/summary.json").read_text())["memory_bytes"]
    assert held["optimizer_state"]["host"] < 0.6 * held["whole_state"]
    assert "on the host of this process, " in answer.out

    assert falconet("validate --checkpoint-input-path r").code == 0
    assert falconet("average --checkpoint-input-path r").code == 0
    averaged = next(folder for folder in format.checkpoints_in(Path("r")) if folder.name.endswith("_averaged"))
    assert format.verify(averaged).format == 1

    alone = falconet("restore --checkpoint-input-path r --epoch 3 --replicas 1")
    assert alone.code == 0, alone.err
    whole = format.verify(next(folder for folder in format.checkpoints_in(Path("r")) if folder.name.endswith("_3")))
    assert whole.format == 1
    assert whole.progress.epoch == 3
    assert "optimizer.safetensors" in whole.files


MISTAKES = {
    "--offload-optimizer --optimizer sgd_combined": "--offload-optimizer: does not work with --optimizer sgd_combined",
    "--optimizer lars --enable-optimizer-rts --precision 16.16 --weight-decay-exclude nothing": "expected norms or",
    "--offload-optimizer --optimizer lars --enable-optimizer-rts": "does not work with --enable-optimizer-rts and",
}


@pytest.mark.parametrize(("extra", "message"), MISTAKES.items())
def test_an_optimizer_that_cannot_be_offloaded_is_refused_in_one_line(falconet, extra, message):
    answer = falconet(f"train {TINY} {extra} --plan")
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1


def test_the_plan_notes_that_offloading_has_no_effect_on_a_cpu(falconet):
    answer = falconet(f"train {TINY} --offload-optimizer --device cpu --plan")
    assert answer.code == 0, answer.err
    assert "as always on a CPU: --offload-optimizer has no effect" in answer.out


def test_offloading_an_optimizer_without_state_has_no_effect_and_a_note(falconet):
    answer = falconet(f"train {TINY} --offload-optimizer --momentum 0 --plan")
    assert "note: --offload-optimizer has no effect without an optimizer with state" in answer.out


ONE_REPLICA = {
    "": "note: --enable-optimizer-rts has no effect without --replicas\n",
    "--replicas 5": "note: --enable-optimizer-rts has no effect: only one replica runs, and holds the whole state\n",
}


@pytest.mark.parametrize(("extra", "said"), ONE_REPLICA.items())
def test_one_replica_cannot_divide_its_state_and_gets_one_note(falconet, extra, said):
    out = falconet(f"train {TINY} --enable-optimizer-rts {extra} --plan").out
    assert said in out
    assert out.count("--enable-optimizer-rts has no effect") == 1
    assert "state sharded" not in out
