"""`bench infer --weights`: published weights out of a cache, and random ones with a reason."""

import pytest
import safetensors.torch
import torch

import hub
from falconet.commands import bench_infer
from falconet.models import zoo

LINE = "bench infer --model resnet18 --data generated --micro-batch-size 1 --iterations 6 --image-size 32 --threads 1"
MEASURED = "resnet18, batches of 1, data generated, torch.float32\n"
ABSENT = "the weights timm/resnet18.tv_in1k are not in the Hugging Face cache, and HF_HUB_OFFLINE is set"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hugging Face cache that holds weights for resnet18, as its library lays them out."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return hub.fill(tmp_path / "hub", "resnet18")


@pytest.fixture
def built(monkeypatch):
    """The models that were built."""
    models, build = [], bench_infer.build_model
    monkeypatch.setattr(bench_infer, "build_model", lambda *of, **more: models.append(build(*of, **more)) or models[-1])
    return models


@pytest.mark.parametrize("asked", ["pretrained", "auto"])
def test_published_weights_equal_those_of_the_file(falconet, cache, built, asked):
    answer = falconet(f"{LINE} --weights {asked}")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(f"weights timm/resnet18.tv_in1k\n{MEASURED}")
    found = built[0].state_dict()
    assert all(torch.equal(found[name].contiguous(), tensor) for name, tensor in cache.items())


def test_classifier_stays_random_for_other_classes(falconet, cache, built):
    answer = falconet(f"{LINE} --weights pretrained --classes 7")
    assert answer.out.startswith(f"weights timm/resnet18.tv_in1k, except the classifier's: 7 classes here\n{MEASURED}")
    found = built[0].state_dict()
    assert found["fc.weight"].shape == (7, 512)
    assert torch.equal(found["conv1.weight"].contiguous(), cache["conv1.weight"])


@pytest.mark.usefixtures("cache")
def test_unfit_weights_stay_random_with_a_reason(falconet, built):
    answer = falconet(f"{LINE} --weights auto --norm-type group")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("note: random weights, because timm/resnet18.tv_in1k does not fit this resnet18: ")
    assert len(built) == 1


def test_auto_is_random_where_weights_are_unavailable(falconet, built):
    answer = falconet(f"{LINE} --weights auto")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"note: random weights, because {ABSENT}\n{MEASURED}")
    found = built[0].state_dict()
    assert torch.equal(found["fc.weight"], zoo.build("resnet18", classes=1000, seed=0).state_dict()["fc.weight"])


def test_pretrained_is_refused_where_weights_are_unavailable(falconet):
    answer = falconet(f"{LINE} --weights pretrained")
    expected = f"{ABSENT}; expected --weights random, or a file with --checkpoint-input-path"
    assert (answer.code, answer.err) == (2, f"falconet bench infer: --weights pretrained: {expected}\n")


def test_random_weights_and_plans_download_nothing(falconet, built, monkeypatch):
    monkeypatch.setattr("falconet.models.pretrained.fetch", lambda _: pytest.fail("fetched"))
    assert falconet(LINE).out.startswith(MEASURED)
    assert len(built) == 1
    assert "would measure resnet18" in falconet(f"{LINE} --weights pretrained --plan").out


def test_weights_option_has_no_effect_with_a_checkpoint(falconet):
    weights = zoo.build("resnet18", classes=1000, seed=3).state_dict()
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in weights.items()}, "w.safetensors")
    answer = falconet(f"{LINE} --checkpoint-input-path w.safetensors --weights pretrained")
    assert answer.code == 0, answer.err
    assert "note: --weights has no effect with --checkpoint-input-path\n" in answer.out
