"""Runs with frozen weights: what moves, what a restored run continues, and what is refused."""

from pathlib import Path

import pytest
import torch

import gloo
import pipeline_scenarios
from falconet.checkpoint import format
from runs import assert_bitwise, state, stop_at
from tiny import TINY

LINE = f"train {TINY} --epoch 4 --freeze backbone --unfreeze-after 2"
# The updates of LINE that are interrupted: frozen, at the change, trained.
STOPS = (3, 8, 11)
KINDS = {
    "sgd": "",
    "adamw by depth": "--optimizer adamw --layer-decay 0.5 --ema-half-life 0.5",
    "half": "--precision 16.16 --loss-scaling 64 --enable-stochastic-rounding --optimizer adamw",
    "combined": "--optimizer sgd_combined",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_restored_on_either_side_of_the_change_equals_the_straight_one(falconet, monkeypatch, kind):
    assert falconet(f"{LINE} {KINDS[kind]} --run-dir straight").code == 0
    for update in STOPS:
        with monkeypatch.context() as patch:
            stop_at(patch, update)
            assert falconet(f"{LINE} {KINDS[kind]} --run-dir r{update}").code == 130
        answer = falconet(f"restore r{update}")
        assert answer.code == 0, answer.err
        assert_bitwise(Path("straight"), Path(f"r{update}"))


def tensors(run, epoch, stem="model"):
    folder = next(each for each in format.checkpoints_in(Path(run)) if each.name.endswith(f"_{epoch}"))
    return format.read_tensors(folder, stem, verified=format.verify(folder))


def test_only_the_classifier_moves_until_the_rest_is_unfrozen(falconet):
    answer = falconet(f"{LINE} --initial-checkpoint --checkpoints-kept all --optimizer adamw --run-dir r")
    assert "trains 650 of 75,290 parameters: --freeze backbone for 2 epochs, then all" in answer.out
    begun, frozen, trained = (tensors("r", epoch) for epoch in (0, 2, 4))
    moved = {name for name, tensor in begun.items() if not torch.equal(tensor, frozen[name])}
    assert moved == {"fc.weight", "fc.bias"}  # not the statistics of batch norm either
    assert not [name for name, tensor in frozen.items() if torch.equal(tensor, trained[name])]
    counts = {name: int(tensor) for name, tensor in tensors("r", 4, "optimizer").items() if name.startswith("step/")}
    assert counts.pop("step/fc.weight") == counts.pop("step/fc.bias") == 16
    assert set(counts.values()) == {8}  # whose state started with the change


def test_weights_that_the_model_keeps_fixed_are_not_unfrozen(falconet):
    line = f"{LINE} --model speednet8-cifar --initial-checkpoint --checkpoints-kept all --run-dir r"
    answer = falconet(line)
    assert answer.code == 0, answer.err
    begun, frozen, trained = (tensors("r", epoch) for epoch in (0, 2, 4))
    weights = {name for name in begun if name.endswith((".weight", ".bias"))}
    fixed = {"conv1.weight", *(f"layer{stage}.bn{norm}.weight" for stage in (1, 2, 3) for norm in (1, 2))}
    assert {name for name in weights if not torch.equal(begun[name], frozen[name])} == {"fc.weight"}
    assert {name for name in weights if torch.equal(frozen[name], trained[name])} == fixed
    of_all = sum(begun[name].numel() for name in weights)
    assert f"trains {begun['fc.weight'].numel():,} of {of_all:,} parameters: --freeze backbone" in answer.out


def test_a_rate_decays_with_every_block_before_the_classifier(falconet):
    """One update of plain sgd moves a weight in proportion to its rate."""
    line = f"train {TINY} --updates 1 --momentum 0 --weight-decay 0 --initial-checkpoint --checkpoints-kept all"
    assert falconet(f"{line} --run-dir plain").code == 0
    assert falconet(f"{line} --layer-decay 0.5 --run-dir decayed").code == 0
    begun, plain, decayed = tensors("plain", 0), state(Path("plain")), state(Path("decayed"))
    for name, share in {"conv1.weight": 1 / 16, "layer2.0.conv1.weight": 1 / 4, "fc.weight": 1.0}.items():
        moves = [run[f"model:{name}"] - begun[name] for run in (plain, decayed)]
        torch.testing.assert_close(moves[1], moves[0] * share, rtol=1e-3, atol=1e-8)


REFUSED = {
    "--freeze backbone --trainable fc": "--freeze: contradicts --trainable",
    "--unfreeze-after 2": "--unfreeze-after: needs --freeze",
    "--freeze 7": "--freeze: got 7, expected 1 to 4: the model has 4 stages before its classifier",
    "--freeze lyer1": "--freeze: 'lyer1' matches no layer and no weight; the nearest are 'layer1'",
    "--freeze 1 --unfreeze-after 1 --pipeline-splits layer2/0": "--unfreeze-after: does not work with --pipeline",
    "--layer-decay 0.5 --optimizer lars --enable-optimizer-rts --replicas 2": "--layer-decay: does not work with",
    "--layer-decay 0": "--layer-decay: got '0', expected a number",
    "--model speednet8-cifar --trainable conv1/weight .*/bn1/weight": (
        "--trainable: 'conv1/weight .*/bn1/weight' matches only what the model keeps fixed; expected weights to train"
    ),
    "--model speednet8-cifar --freeze .*conv./(bias|weight)|conv1|.*/bias|fc": "leaves no weights to train",
}


@pytest.mark.parametrize(("extra", "message"), REFUSED.items())
def test_contradictions_are_refused_in_one_line(falconet, extra, message):
    answer = falconet(f"train {TINY} {extra}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err


def test_a_checkpoint_with_other_frozen_weights_is_refused(falconet):
    assert falconet(f"train {TINY} --freeze 2 --run-dir r").code == 0
    for extra, message in {
        "--freeze 3": "--freeze: got '3', expected '2', whose state",
        "--unfreeze-after 1": "--unfreeze-after: expected none, because",
    }.items():
        answer = falconet(f"restore r --epoch 4 {extra}")
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert message in answer.err


def test_frozen_batchnorm_has_no_effect_without_frozen_weights(falconet):
    answer = falconet(f"train {TINY} --frozen-batchnorm batch --plan")
    assert "note: --frozen-batchnorm has no effect without --freeze or --trainable" in answer.out


REPLICAS = (
    "--data generated --classes 10 --image-size 8 --iterations 3 --micro-batch-size 4 --epoch 2 --warmup-epoch 0"
    " --threads 1 --dataloader-workers 0 --device cpu --norm-type group --norm-num-groups 4 --lr 0.01"
    " --freeze backbone --unfreeze-after 1"
)
SHARED = {
    "averaged": "--bucket-size 0.01",
    "divided": "--bucket-size 0.01 --enable-optimizer-rts",
    "adamw": "--bucket-size 0.01 --optimizer adamw --enable-optimizer-rts",
    "the classifier is in one process": "--enable-optimizer-rts --loss-scaling 64",
}


@pytest.mark.dist
def test_replicas_unfreeze_together_and_match_one_process():
    lines = [f"{REPLICAS} {extra} --replicas 2" for extra in SHARED.values()]
    found = gloo.in_world(2, pipeline_scenarios.several, lines)
    for number, extra in enumerate(SHARED.values()):
        alone = pipeline_scenarios.alone(f"{REPLICAS} {extra} --gradient-accumulation 2")["tensors"]
        for name, values in alone.items():
            torch.testing.assert_close(
                torch.from_numpy(found[0][number]["tensors"][name]),
                torch.from_numpy(values),
                rtol=0,
                atol=1e-4 if "adamw" in extra else 2e-6,
                msg=lambda text, name=name: f"{name}: {text}",
            )


LATER = f"train {TINY} --epoch 4 --freeze layer1 --freeze-after 1.5"
LATER_KINDS = {"muon": "--optimizer muon --lr 0.02 --ema-half-life 0.5", "half": KINDS["half"], "sgd": ""}


@pytest.mark.parametrize("kind", LATER_KINDS)
def test_a_run_restored_before_or_after_weights_are_frozen_equals_the_straight_one(falconet, monkeypatch, kind):
    line = f"{LATER} {LATER_KINDS[kind]} --checkpoint-save-freq 0.5 --checkpoints-kept all"
    assert falconet(f"{line} --run-dir straight").code == 0
    for update in (5, 6, 11):
        with monkeypatch.context() as patch:
            stop_at(patch, update)
            assert falconet(f"{line} --run-dir r{update}").code == 130
        answer = falconet(f"restore r{update}")
        assert answer.code == 0, answer.err
        assert_bitwise(Path("straight"), Path(f"r{update}"))
    saved = {name: tensors("straight", name) for name in ("1", "2", "4")}
    moved = {name for name, values in saved["2"].items() if not torch.equal(saved["1"][name], values)}
    assert any(name.startswith("layer1.") for name in moved)
    later = {name for name, values in saved["4"].items() if not torch.equal(saved["2"][name], values)}
    assert not any(name.startswith("layer1.") for name in later)
    assert any(name.startswith("layer2.") for name in later)


@pytest.mark.parametrize("size", [8, 4])  # half the global batch shifts the update at which weights are frozen to 0
def test_weights_that_are_frozen_stay_so_with_another_global_batch(falconet, image_folder, size):
    photos = "--data folder --data-dir photos --model resnet8-cifar --pretrained none"
    line = f"train {TINY} {photos} --epoch 3 --checkpoints-kept all --freeze backbone --freeze-after 1"
    assert falconet(f"{line} --run-dir r").code == 0
    assert falconet(f"restore r/checkpoints/resnet8-cifar_folder_2 --run-dir s --micro-batch-size {size}").code == 0
    before, after = tensors("r", 2), tensors("s", 3)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--freeze-after 1", "--freeze-after: needs --freeze"),
        ("--freeze fc --freeze-after 1 --unfreeze-after 1", "--freeze-after: contradicts --unfreeze-after"),
        (
            "--freeze fc --freeze-after 1 --pipeline-splits layer2",
            "--freeze-after: does not work with --pipeline-splits",
        ),
    ],
)
def test_what_cannot_freeze_later_is_refused(falconet, words, message):
    answer = falconet(f"train {TINY} {words} --plan")
    assert answer.code == 2
    assert message in answer.err
