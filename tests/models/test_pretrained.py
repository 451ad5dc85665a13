"""Published weights fit our models by name and shape; a missing network is reported at once."""

import pytest
import timm
import torch

from falconet.errors import CheckpointError
from falconet.models import pretrained, zoo


@pytest.mark.run
@pytest.mark.parametrize("name", pretrained.TAGS)
def test_model_has_timms_weights_by_name_and_shape(name):
    weights = pretrained.published(name)
    with torch.device("meta"):
        ours = zoo.build(name, classes=1000, seed=0).state_dict()
        theirs = timm.create_model(weights.tag, pretrained=False).state_dict()
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: t.shape for key, t in theirs.items()}
    assert weights.repository == f"timm/{weights.tag}"
    assert ours[f"{weights.config['classifier']}.weight"].shape[0] == weights.classes == 1000


def test_model_of_timm_gets_timms_default_weights():
    assert pretrained.published("timm:resnet10t").tag == "resnet10t.c3_in1k"
    assert pretrained.published("timm:resnet50.a2_in1k").repository == "timm/resnet50.a2_in1k"


@pytest.mark.parametrize("name", ["resnet8-cifar", "efficientnet-b7", "resnet26", "timm:efficientnet_b6"])
def test_model_without_published_weights_is_refused(name):
    with pytest.raises(CheckpointError, match=f"there are no published weights for {name}"):
        pretrained.published(name)


def test_missing_network_is_reported_at_once(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # a closed port
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(CheckpointError, match=r"timm/resnet18.tv_in1k are not in .* and 127.0.0.1:9 cannot be"):
        pretrained.fetch(pretrained.published("resnet18"))
