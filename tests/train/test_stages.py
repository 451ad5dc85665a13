"""Pipeline stages: planned, folded, refused, restored onto another number."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from falconet.checkpoint import format
from falconet.parallel import world
from tiny import TINY

pytestmark = pytest.mark.usefixtures("two_cores")

SPLIT = "--pipeline-splits layer2/0 --gradient-accumulation 2"


def test_a_plan_is_printed_without_starting_the_stages(falconet):
    answer = falconet(f"train {TINY} {SPLIT} --replicas 2 --pipeline-schedule interleaved --plan")
    assert answer.code == 0, answer.err
    assert "global batch 32 = micro-batch 8 x accumulation 2 x replicas 2" in answer.out
    assert (
        "pipeline of 2 stages, interleaved: 2 micro-batches per update; each stage recomputes its blocks" in answer.out
    )
    assert "\nstage 0: conv1 to layer1/0/relu2, 5,136 parameters, 2 micro-batches in flight, 0." in answer.out
    assert "\nstage 1: layer2/0/conv1 to fc, 70,154 parameters, 1 micro-batch in flight, 0." in answer.out
    assert "pipeline-splits:" in answer.out


def test_measured_splits_are_planned_too(falconet):
    answer = falconet(f"train {TINY} --pipeline-splits auto:3 --plan")
    assert answer.code == 0, answer.err
    assert "pipeline of 3 stages, grouped: 1 micro-batch per update" in answer.out
    assert [f"\nstage {number}: " in answer.out for number in range(4)] == [True, True, True, False]


FOLDED = {
    "--replicas 4 --pipeline-splits layer2/0": (
        "global batch 32 = micro-batch 8 x accumulation 2 x replicas 2",
        "4 replicas of 2 stages requested, 2 cores are available, enough for 4 processes: 2 run, with 2 times the",
        "pipeline of 2 stages",
    ),
    "--replicas 2 --pipeline-splits auto:5": (
        "global batch 16 = micro-batch 8 x accumulation 1 x replicas 2",
        "5 stages requested, 2 cores are available, enough for 4 processes: all stages of a replica run in one process",
        "recomputes 4 blocks",
    ),
}


@pytest.mark.parametrize(("asked", "plan"), FOLDED.items())
def test_what_has_no_device_is_folded_with_a_note(falconet, asked, plan):
    answer = falconet(f"train {TINY} {asked} --plan")
    batch, note, model = plan
    assert answer.code == 0, answer.err
    assert batch in answer.out
    assert model in answer.out
    assert f"note: {note}" in answer.out


def test_the_memory_of_a_divided_state_is_predicted_for_the_replicas_that_run(falconet):
    """Of 8 replicas requested, 2 run, and each holds half of the state."""
    line = f"train {TINY} --model resnet18 --image-size 32 --optimizer adamw --enable-optimizer-rts --plan"
    line += " --pipeline-splits layer4/0 --micro-batch-size 2"
    folded = falconet(f"{line} --replicas 8").out
    asked = falconet(f"{line} --replicas 2 --gradient-accumulation 4").out
    assert "global batch 16 = micro-batch 2 x accumulation 4 x replicas 2" in folded
    predicted = [[text for text in out.splitlines() if text.startswith("stage ")] for out in (folded, asked)]
    assert predicted[0] == predicted[1]
    # 4 bytes x 8,906,728 x (weight, gradient, and one of adamw's two) = 0.0995 GiB, and some activations.
    assert "8,906,728 parameters, 3 micro-batches in flight, 0.100 GiB predicted" in predicted[0][1]


def test_stages_that_share_a_process_make_the_updates_of_a_whole_model(falconet, monkeypatch):
    monkeypatch.setattr(world, "cores", lambda processes=1: 1)
    line = f"train {TINY} --gradient-accumulation 2 --epoch 1"
    assert falconet(f"{line} --run-dir whole").code == 0
    answer = falconet(f"{line} --pipeline-splits layer1/0/conv2 layer2/0 layer3/0 --run-dir stages")
    assert answer.code == 0, answer.err
    assert "note: 4 stages requested, 1 core is available" in answer.out
    assert "recomputes 4 blocks" in answer.out
    one, other = (load_file(next(Path(run).glob("checkpoints/*/model.safetensors"))) for run in ("whole", "stages"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    refused = falconet(f"{line} --pipeline-splits layer1/0/conv2 layer9/0 layer3/0 --run-dir refused")
    assert refused.code == 2
    assert "'layer9/0' is not a layer" in refused.err


MISTAKES = {
    "--pipeline-splits layer5/0": "--pipeline-splits: 'layer5/0' is not a layer; the nearest are 'layer",
    "--pipeline-splits b2/0/relu": "--pipeline-splits: 'b2/0/relu' is not a layer; the nearest are 'layer2/0/relu",
    "--pipeline-splits auto:200": "--pipeline-splits: got auto:200, expected at most auto:",
    "--pipeline-splits layer3/0 layer2/0": "--pipeline-splits: 'layer2/0' runs before 'layer3/0' does",
    "--pipeline-splits auto:1": "--pipeline-splits: got 'auto:1', expected layers, such as layer2/0 layer3/0, or",
    "--pipeline-splits auto": "--pipeline-splits: got 'auto', expected layers",
    "--pipeline-splits auto:2 layer2/0": "--pipeline-splits: got 'auto:2 layer2/0', expected layers",
    "--pipeline-splits auto:40 --strict-devices": "1 replica of 40 stages requested, which takes 40 devices; 2 cores",
    "--pipeline-splits layer2/0 --pipeline-schedule interleaved": "--gradient-accumulation: got 1, expected at least 2,"
    " the number of stages, for --pipeline-schedule interleaved; --pipeline-schedule grouped takes any number",
    "--pipeline-splits layer2/0 --memory-budget 1": "--memory-budget: does not work with --pipeline-splits",
    "--pipeline-splits layer2/0 --pipeline-schedule diagonal": "--pipeline-schedule: got 'diagonal', expected",
    "--pipeline-splits layer2/0 --replicas 2 --batchnorm-span 4": "--batchnorm-span: got 4, expected a divisor of the "
    "number of replicas that run, 2",
    "--pipeline-splits layer2/0 --model timm:vit_tiny_patch16_224 --image-size 224": "--pipeline-splits: "
    "VisionTransformer takes more than images; expected another model",
}


@pytest.mark.parametrize(("extra", "message"), MISTAKES.items())
def test_every_mistake_is_refused_in_one_line(falconet, extra, message):
    answer = falconet(f"train {TINY} {extra} --plan")
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1


def test_more_replicas_than_micro_batches_for_interleaving_are_refused_in_one_line(falconet, monkeypatch):
    line = f"train {TINY} --pipeline-splits layer2/0 layer3/0 --pipeline-schedule interleaved --gradient-accumulation 4"
    monkeypatch.setattr(world, "cores", lambda processes=1: 1)  # all in one process
    assert falconet(f"{line} --epoch 1 --run-dir r").code == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "12")
    answer = falconet("restore --checkpoint-input-path r --epoch 2")
    assert answer.code == 2
    assert "3 stages need at least 3 micro-batches per update, but each replica has 1; expected fewer" in answer.err
    assert answer.err.count("\n") == 1


def test_a_schedule_without_stages_has_no_effect_and_a_note(falconet):
    answer = falconet(f"train {TINY} --pipeline-schedule sequential --plan")
    assert "note: --pipeline-schedule has no effect without --pipeline-splits" in answer.out


@pytest.mark.dist
@pytest.mark.usefixtures("forked_workers")
def test_a_run_in_stages_is_saved_whole_and_restored_onto_other_layouts(falconet):
    line = f"{TINY} --gradient-accumulation 2 --logs-per-epoch 4 --weight-avg-strategy mean"
    assert falconet(f"train {line} --run-dir one").code == 0
    line = f"train {line} --pipeline-splits auto:2 --run-dir two --epoch 1 --lr-schedule step"
    answer = falconet(line, "pytorch")  # which prints the model's layers
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.count("\nstage 1: ") == 1
    assert "averaged 1 checkpoint " in answer.out
    summary = json.loads(Path("two/summary.json").read_text())
    held, peaks = summary["memory_bytes"], [stage["peak_memory_bytes"] for stage in summary["stages"]]
    assert held["optimizer_state"]["host"] < held["whole_state"], "that of both stages"
    assert summary["peak_memory_bytes"] == max(peaks)
    shown = "; ".join(f"stage {number}: {peak / 2**30:.2f} GiB" for number, peak in enumerate(peaks))
    assert f"\npeak memory          {shown}\n" in answer.out
    assert answer.out.count("(fc): Linear(") == 1, "the layers of both stages are printed"
    assert "def forward" not in answer.out, "and no generated code"
    manifest = format.verify(format.checkpoints_in(Path("two"))[-1])
    assert len(manifest.runtime["splits"]) == 1
    assert manifest.files.keys() == format.verify(format.checkpoints_in(Path("one"))[-1]).files.keys()
    validated = falconet("validate --checkpoint-input-path two")
    assert validated.code == 0, validated.err
    restore = "restore --checkpoint-input-path two --epoch 2 --plan"
    assert f"stage 1: {manifest.runtime['splits'][0]}" in falconet(restore).out  # not measured again
    whole = falconet(f"{restore} --pipeline-splits")
    assert whole.code == 0, whole.err
    assert "pipeline of" not in whole.out
    assert "pipeline of 2 stages, grouped" in falconet(f"{restore} --replicas 2 --pipeline-splits layer3/0").out
    refused = falconet(f"{restore} --replicas 2 --pipeline-splits layer3/0 --pipeline-schedule interleaved")
    assert "2 stages need at least 2 micro-batches per update, but each replica has 1" in refused.err
