"""`--trainable` and `--lars-skip`: what moves, what keeps its bits, and what is decayed."""

import pytest
import torch

import pipeline_scenarios
from falconet.checkpoint import format
from falconet.models import zoo
from falconet.parallel.world import World
from falconet.train.phase import begin
from runs import assert_bitwise
from tiny import TINY

HARSH = "--weight-decay 0.1 --momentum 0.9 --lr 0.1"  # what would move a weight that is only left without a gradient


def tensors(run, stem="model"):
    folder = format.checkpoints_in(run)[-1]
    return format.read_tensors(folder, stem, verified=format.verify(folder))


LINES = {
    "sgd": HARSH,
    "combined": f"{HARSH} --optimizer sgd_combined",
    "adamw": f"{HARSH} --optimizer adamw",
    "lars": f"{HARSH} --optimizer lars",
    "recomputed": f"{HARSH} --enable-recompute",
    "accumulated": f"{HARSH} --gradient-accumulation 2 --ema-half-life 1",
    "half": f"{HARSH} --precision 16.16 --enable-stochastic-rounding --loss-scaling 64",
    "one pass": f"{HARSH} --disable-stable-batchnorm",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_frozen_weights_keep_their_bits(falconet, tmp_path, line):
    answer = falconet(f"train {TINY} --epoch 1 --run-dir a --trainable fc layer3/0/conv2 {line}")
    assert answer.code == 0, answer.err
    assert "trains 37,514 of 75,290 parameters: those that match fc layer3/0/conv2\n" in answer.out
    before, after = zoo.build("resnet8-cifar", classes=10, seed=0).state_dict(), tensors(tmp_path / "a")
    moved = {name for name, values in before.items() if not torch.equal(values.to(after[name].dtype), after[name])}
    assert moved == {"fc.weight", "fc.bias", "layer3.0.conv2.weight"}
    state = {name.partition("/")[2] for name in tensors(tmp_path / "a", "optimizer")}
    assert state == moved


def test_recomputing_changes_nothing(falconet, tmp_path):
    for name, more in {
        "a": "",
        "b": "--enable-recompute",
        "c": "--recompute-checkpoints .*conv.* --enable-recompute",
    }.items():
        assert falconet(f"train {TINY} --epoch 1 --run-dir {name} --trainable layer2 fc {more}").code == 0
    for name in "bc":
        assert_bitwise(tmp_path / "a", tmp_path / name)


def test_restored_run_trains_the_same_weights_bit_for_bit(falconet, tmp_path):
    line = f"train {TINY} {HARSH} --trainable .*bias --lr-schedule step"
    assert falconet(f"{line} --run-dir a --checkpoints-kept all").code == 0
    first = format.checkpoints_in(tmp_path / "a")[0]
    assert falconet(f"restore --checkpoint-input-path {first} --run-dir b").code == 0
    one, other = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one)
    refused = falconet(f"restore --checkpoint-input-path {first} --run-dir c --trainable fc")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert (
        f"--trainable: got 'fc', expected '.*bias', whose state {first} holds; `falconet train --init-path`"
        in refused.err
    )


WRONG = {
    "--trainable layer9": "--trainable: 'layer9' matches no layer and no weight; the nearest are 'layer3', 'layer2'",
    "--trainable fc [": "--trainable: '[' is not a regular expression: unterminated character set at position 0",
    "--optimizer lars --lars-skip gamma": "--lars-skip: 'gamma' matches no layer and no weight; the nearest are ",
    "--optimizer lars --trainable fc --lars-skip gamma": "--lars-skip: 'gamma' matches no layer and no weight; the",
}


@pytest.mark.parametrize(("line", "message"), WRONG.items())
def test_pattern_that_matches_nothing_is_refused_in_one_line(falconet, line, message):
    answer = falconet(f"train {TINY} --run-dir a {line}")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert message in answer.err


FROZEN = {
    "--lars-skip layer1": set(),
    "--lars-skip layer1 .*bias": {"fc.bias"},
}


@pytest.mark.parametrize(("line", "skipped"), FROZEN.items())
def test_skip_list_may_name_frozen_weights(line, skipped):
    run = pipeline_scenarios.run_of(World(device=torch.device("cpu")), f"{TINY} --optimizer lars --trainable fc {line}")
    state = begin(run)
    names = {weight: name for name, weight in state.model.named_parameters()}
    found = {
        names[weight] for group in state.optimizer.param_groups for weight in group["params"] if not group["adapts"]
    }
    assert found == skipped


def test_skip_list_without_lars_is_noted(falconet):
    assert (
        "note: --lars-skip has no effect without --optimizer lars"
        in falconet(f"train {TINY} --plan --lars-skip fc").out
    )


SKIPPED = {
    "": lambda name, weight: weight.ndim == 1,
    "--weight-decay-exclude norms": lambda name, _: "bn" in name,
    "--lars-skip fc .*bn2": lambda name, _: name.startswith("fc") or ".bn2." in name,
    "--weight-decay-exclude nothing --lars-skip .*bias": lambda name, _: name.endswith("bias"),
}


@pytest.mark.parametrize("line", SKIPPED)
@pytest.mark.parametrize("precision", ["32.32", "16.16"])
def test_weights_that_lars_skips_are_neither_scaled_nor_decayed(line, precision):
    run = pipeline_scenarios.run_of(
        World(device=torch.device("cpu")), f"{TINY} --optimizer lars --precision {precision} {line}"
    )
    state = begin(run)
    names = {weight: name for name, weight in state.model.named_parameters()}
    found = {
        names[weight]: (group["adapts"], group["weight_decay"])
        for group in state.optimizer.param_groups
        for weight in group["params"]
    }
    skipped = {name for weight, name in names.items() if SKIPPED[line](name, weight)}
    assert found == {name: (False, 0.0) if name in skipped else (True, 5e-4) for name in names.values()}
