"""Every named config builds its model, cuts it where it says, and does one update."""

from dataclasses import replace

import pytest
import torch

from falconet.checkpoint.writer import Writer
from falconet.commands import configs
from falconet.config import evidence
from falconet.config.commands import TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import parse
from falconet.config.recipes import all_configs, families, from_config
from falconet.models import splits
from falconet.models.zoo import build_model
from falconet.numerics.recompute import matching

OPTIONS = {
    name: parse(TrainOptions, from_config(name, options_of(TrainOptions))).options for name in all_configs("train")
}


def alike(what):
    """Names of configs by what they have in common; one stands for all that differ in nothing that `what` sees."""
    groups = {}
    for name, options in OPTIONS.items():
        groups.setdefault(repr(what(options)), []).append(name)
    return list(groups.values())


def one_update(options):
    """What an update does, once batch, devices, length and rate are small; numbers it multiplies with make no case."""
    optimizer, numerics = options.optimizer, options.numerics
    return (
        options.model,
        (optimizer.optimizer, optimizer.momentum > 0, optimizer.weight_decay_exclude),
        replace(numerics, recompute_checkpoints=numerics.recompute_checkpoints[:1]),
        replace(options.augmentation, mixup_alpha=0.0, use_bbox_info=False),
        options.machine.precision,
    )


def architecture(options):
    return options.model, options.parallel.pipeline_splits, options.numerics.recompute_checkpoints


REPRESENTATIVES = [names[0] for names in alike(one_update)]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for names in alike(one_update) for name in names[1:]]


@pytest.mark.parametrize("name", [*REPRESENTATIVES, *OTHERS])
def test_every_config_does_one_update_on_generated_data(falconet, monkeypatch, name):
    monkeypatch.setattr(Writer, "save", lambda *_, **__: None)  # a third of the time, and the same for all
    answer = falconet(
        f"train --config {name} --data generated --image-size 32 --classes 10 --iterations 1 --micro-batch-size 3"
        " --gradient-accumulation 1 --replicas 1 --batchnorm-span 1 --pipeline-splits --epoch 1 --warmup-epoch 0"
        " --validation-mode none --weight-avg-strategy none --device cpu --threads 1 --dataloader-workers 0"
        " --pretrained none"
    )
    assert answer.code == 0, answer.err
    assert "1 update = 1 epoch x 1 update; 3 images" in answer.out


@pytest.mark.run
@pytest.mark.parametrize("names", alike(architecture), ids=lambda names: names[0])
def test_layers_that_a_config_names_exist(names):
    options = OPTIONS[names[0]]
    with torch.device("meta"):
        model = build_model(options.model, classes=1000, seed=0)
    cuts, kept = options.parallel.pipeline_splits, options.numerics.recompute_checkpoints
    if cuts:
        assert len(splits.split(model, cuts)) == len(cuts) + 1
    if kept:
        assert len(matching(model, kept)) == len(kept)


@pytest.mark.parametrize("name", all_configs("bench infer"))
def test_every_inference_config_predicts(falconet, name):
    small = "--image-size 32 --classes 10 --micro-batch-size 2 --iterations 3 --device cpu --threads 1"
    answer = falconet(f"bench infer --config {name} {small}")
    assert answer.code == 0, answer.err
    assert "images/s" in answer.out


def test_training_config_is_refused_by_bench_infer(falconet):
    answer = falconet("bench infer --config resnet50-pod4")
    assert answer.code == 2
    assert answer.err.startswith("falconet bench infer: --config: 'resnet50-pod4' is a config for `falconet train`")


def test_list_has_a_line_per_config_by_family(falconet):
    lines = falconet("configs").out.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert names == [name for entries in families().values() for name in entries]
    assert [line.split(",")[0] for line in lines[:-1] if not line.startswith("  ")] == list(families())


def test_list_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = list(configs.for_people())
    assert max(map(len, shown)) <= 80
    words = " ".join(" ".join(shown).split())
    assert all(text in words for text in (" ".join(line.split()) for line in configs.for_programs()))


def test_list_of_evidence_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = list(configs.evidence_for_people())
    assert max(map(len, shown)) <= 80
    words = " ".join(" ".join(shown).split())
    for each in evidence.all_evidence().values():
        assert f"{each.recipe} {each.reached()} {len(each.runs)} {each.took}" in words
        assert f"{each.device}, {each.date}, " in words
