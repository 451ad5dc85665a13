"""Regimes, scales and recomputation, from the command line to the weights."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from falconet.numerics.precision import REGIMES
from phases import built
from runs import state
from tiny import TINY

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REGIMES)
def test_every_tensor_of_a_running_step_has_the_format_of_the_table(name, device):
    run = built(f"{TINY} --device {device} --precision {name} --optimizer adamw --lr 0.001 --no-capture")
    expected = run.regime.formats(run.site.world.device)
    state = run.new_state()
    step = run.step(state)
    seen = {}

    def note_activations(layer, inputs, output):
        seen.setdefault("activations", set()).add(output.dtype)

    def note_loss(loss, *given, **named):
        score = real_loss.scored(*given, **named)  # on CUDA by kernels, without the functions that it uses elsewhere
        seen.setdefault("loss", set()).update((score.loss.dtype, score.smoothing.dtype))
        return score

    real_loss = step.loss
    step.loss = type("Noted", (type(real_loss),), {"scored": note_loss})(real_loss.classes)
    convolutions = [layer for layer in state.model.modules() if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in state.model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in convolutions:
        layer.register_forward_hook(note_activations)
    loader = run.placement.loader()
    micro_batches = next(loader.updates(0))
    step(micro_batches, update=0, lr=0.001)
    loader.close()

    assert seen["activations"] == {expected["activations"]}
    assert seen["loss"] == {expected["loss"]}
    assert {layer.weight.dtype for layer in convolutions} == {expected["weights"]}
    assert {layer.weight.grad.dtype for layer in convolutions} == {expected["gradients"]}
    moments = {state.optimizer.state[layer.weight]["exp_avg"].dtype for layer in convolutions}
    assert moments == {expected["optimizer state"]}
    assert {layer.weight.dtype for layer in norms} == {expected["norm weights"]}
    assert {layer.running_var.dtype for layer in norms} == {expected["norm statistics"]}


RECOMPUTED = [
    ("resnet8-cifar", "--enable-recompute"),
    ("resnet8-cifar", "--enable-recompute --recompute-checkpoints layer1/.* .*conv2"),
    ("mobilenet-v3-small --image-size 32 --micro-batch-size 4", "--recompute-mode auto"),
    (
        "mobilenet-v3-small --image-size 32 --micro-batch-size 4",
        "--recompute-mode manual --recompute-checkpoints blocks/[024]/0",
    ),
    ("squeezenet-cifar --squeezenet-bypass --micro-batch-size 4", "--enable-recompute"),
]


@pytest.mark.parametrize(("model", "extra"), RECOMPUTED)
def test_recomputation_changes_no_bit(falconet, extra, model):
    line = f"train {TINY} --model {model} --epoch 1"
    assert falconet(f"{line} --run-dir plain").code == 0
    answer = falconet(f"{line} --run-dir again {extra}")
    assert answer.code == 0, answer.err
    assert "recomputes" in answer.out
    plain, again = state(Path("plain")), state(Path("again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in plain.items())


def test_memory_budget_recomputes_no_more_than_necessary(falconet):
    line = f"train {TINY} --micro-batch-size 64 --plan --recompute-mode auto"
    everything = falconet(line).out
    predicted, without = map(
        float, re.search(r"predicted activations of (\S+) GiB instead of (\S+) GiB", everything).groups()
    )
    assert predicted < without
    assert "recomputes nothing" in falconet(f"{line} --memory-budget 100").out
    refused = falconet(f"{line} --memory-budget 0.001")
    assert refused.code == 2
    assert "--memory-budget: got 0.001 GiB, expected at least 0.00" in refused.err


def test_overflow_skips_updates_names_the_layer_and_keeps_the_weights(falconet):
    # A scale that no half-precision gradient survives: every update is skipped.
    answer = falconet(f"train {TINY} --precision 16.16 --loss-scaling 1e38 --epoch 1 --run-dir r --logs-per-epoch 4")
    assert answer.code == 0, answer.err
    assert re.search(
        r"note: skipped 1 of 1 update because gradients were not finite, first in \S+; the loss scale is now 1e\+38",
        answer.out,
    )
    lines = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("train/skipped", 0) for line in lines) == 4
    fresh = built(f"{TINY} --precision 16.16").model.state_dict()
    trained = state(Path("r"))
    for name, tensor in fresh.items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(trained[f"model:{name}"], tensor), name


def test_automatic_scale_grows_and_is_logged(falconet):
    falconet(
        f"train {TINY} --precision 16.16 --auto-loss-scaling --loss-scaling 2 --epoch 2 --logs-per-epoch 4 --run-dir r"
    )
    lines = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss_scale"] for line in lines if "train/loss_scale" in line] == [
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
    ]


def test_stepped_scale_doubles_where_the_formula_says(falconet):
    out = falconet(f"train {TINY} --epoch 100 --initial-loss-scaling 16 --loss-scaling 128 --plan").out
    assert "loss scale 16 from epoch 1, 32 from epoch 26, 64 from epoch 51, 128 from epoch 76" in out


def test_loss_scale_does_not_change_an_fp32_run(falconet):
    falconet(f"train {TINY} --run-dir one --loss-scaling 1.0000001")
    falconet(f"train {TINY} --run-dir two --loss-scaling 1024")
    one, two = state(Path("one")), state(Path("two"))
    for name in one:
        if name.startswith("model"):
            torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)


MISTAKES = {
    "--recompute-mode manual": "--recompute-mode manual: needs --recompute-checkpoints",
    "--enable-recompute --recompute-mode none": "--recompute-mode none: contradicts --enable-recompute",
    "--recompute-mode manual --recompute-checkpoints layr1": (
        "--recompute-checkpoints: 'layr1' matches no layer; the nearest are 'layer1'"
    ),
    "--recompute-mode manual --recompute-checkpoints (": "--recompute-checkpoints: '(' is not a regular expression",
    "--auto-loss-scaling --initial-loss-scaling 4 --loss-scaling 8": "--auto-loss-scaling: contradicts",
    "--initial-loss-scaling 3 --loss-scaling 8": "--initial-loss-scaling: got 3, which doubling does not bring to",
    "--precision 16": "got '16', expected auto, 16.16, 16.32, 32.32, bf16.bf16 or bf16.32; did you mean '16.32'?",
}


@pytest.mark.parametrize(("extra", "message"), MISTAKES.items())
def test_mistake_is_one_line(falconet, extra, message):
    answer = falconet(f"train {TINY} {extra} --plan")
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1


def test_restore_refuses_another_update_format(falconet):
    falconet(f"train {TINY} --run-dir r --epoch 1")
    answer = falconet("restore --checkpoint-input-path r --epoch 2 --precision 16.16")
    assert answer.code == 2
    assert "--precision: got '16.16', expected one that updates in the same format as '32.32'" in answer.err


def test_half_partials_have_no_effect_on_a_cpu_and_are_noted(falconet):
    assert "half partials: no effect on cpu" in falconet(f"train {TINY} --half-partial --plan").out


def test_half_precision_checkpoint_validates_as_in_training(falconet):
    falconet(f"train {TINY} --precision 16.16 --run-dir r --loss-scaling 64")
    lines = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    logged = [f"{line['validation/accuracy']:.2f}" for line in lines if "validation/accuracy" in line]
    falconet("validate r --checkpoint all")
    rows = csv.DictReader(Path("r/validation.csv").read_text().splitlines())
    assert [row["top1"] for row in rows] == logged
