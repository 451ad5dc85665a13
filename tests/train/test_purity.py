"""Describing a plan changes nothing; recomputation is installed when a phase is built, in every phase."""

import copy
import os

import pytest
import torch

from falconet.train import build, plan_text
from falconet.train.step import LocalStep
from half_resolution import HALF
from phases import built
from tiny import TINY

RECOMPUTE = "--enable-recompute --half-partial --available-memory-proportion 0.1"


def recomputed(model):
    """Layers of the model that the backward pass computes again."""
    segments = getattr(model, "_segments", ())
    pieces = [segment.piece for segment in segments if hasattr(segment, "piece") and not segment.single]
    return sum(node.op == "call_module" for piece in pieces for node in piece.graph.nodes)


@pytest.fixture
def trained(monkeypatch):
    """The models that make updates, in order, each once."""
    models, plain = [], LocalStep.__call__

    def step(own, *arguments, **more):
        if not any(own.moving.model is model for model in models):
            models.append(own.moving.model)
        return plain(own, *arguments, **more)

    monkeypatch.setattr(LocalStep, "__call__", step)
    return models


def test_both_phases_of_a_half_resolution_run_recompute(falconet, trained):
    answer = falconet(f"train {HALF} --enable-recompute --run-dir r")
    assert answer.code == 0, answer.err
    assert [recomputed(model) > 5 for model in trained] == [True, True]
    assert answer.out.count("\nrecomputes ") == 2, "a line for each phase"


def test_a_plan_installs_no_recomputation(falconet, monkeypatch):
    built, plain = [], build.BuiltPhase.__init__

    def note(own, *arguments, **more):
        plain(own, *arguments, **more)
        built.append(own)

    monkeypatch.setattr(build.BuiltPhase, "__init__", note)
    answer = falconet(f"train {HALF} --enable-recompute --plan")
    assert answer.code == 0, answer.err
    assert answer.out.count("recomputes 4 blocks, ending in ") == 2
    assert [recomputed(each.placement.network.model) for each in built] == [0, 0]
    assert [recomputed(each.model) > 5 for each in built] == [True, True]


def process_state():
    matmul = torch.backends.cuda.matmul
    return (
        dict(os.environ),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
    )


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("when", ["before the model is built", "after"])
def test_describing_a_plan_twice_changes_neither_model_nor_process(when, device):
    line = f"{TINY} --device {device} {RECOMPUTE}"
    phase = built(line)
    model = phase.model if when == "after" else phase.placement.network.model
    state, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    count, process = recomputed(model), process_state()
    assert plan_text.describe(phase) == plan_text.describe(phase)
    assert process_state() == process
    assert recomputed(model) == count
    assert set(vars(model)) == attributes
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in state.items())
    assert {tensor.device for tensor in after.values()} == {tensor.device for tensor in state.values()}
