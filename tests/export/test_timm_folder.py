"""Folders that timm opens: the same scores, the same preprocessing, and one line for what timm does not have."""

import json
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from exported import NAMES, PREPROCESSING, exported, graph_of
from falconet.config.options import Model
from falconet.data.crops import evaluation_box
from falconet.data.readers import resized
from falconet.errors import ConfigError
from falconet.export import timm_folder
from falconet.models.zoo import build_model


@pytest.mark.run
@pytest.mark.parametrize("name", ["resnet10", "mobilenet-v3-small"])
def test_timm_opens_the_folder_with_the_same_scores(name, tmp_path):
    parity = exported(graph_of(name), "timm", tmp_path)
    assert parity.passed, parity.line()
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["num_classes"], stored["label_names"]) == (len(NAMES), list(NAMES))
    assert not {"license", "origin_url", "hf_hub_id", "url"} & {k for k, v in stored["pretrained_cfg"].items() if v}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*timm_folder.NAMES, "timm:convnext_atto"])
def test_every_mapped_model_has_the_same_scores(name, tmp_path):
    parity = exported(graph_of(name), "timm", tmp_path)
    assert parity.passed, parity.line()


@pytest.mark.parametrize("name", timm_folder.NAMES)
def test_every_mapped_model_has_the_weights_of_timms(name):
    architecture, arguments = timm_folder.architecture(Model(model=name))
    with torch.device("meta"):
        ours = build_model(Model(model=name), classes=3, seed=0).state_dict()
        theirs = timm.create_model(architecture, num_classes=3, **arguments).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}


@pytest.mark.run
@pytest.mark.parametrize(
    ("resize", "interpolation"), [(32, "bilinear"), (36, "bicubic"), (40, "bilinear"), (57, "bilinear")]
)
def test_timms_transform_sees_the_pixels_of_validation(resize, interpolation, tmp_path):
    """The centre crop of the resized photo, to the rounding of two resizings."""
    about = replace(PREPROCESSING, resize=resize, interpolation=interpolation)
    timm_folder.write(graph_of("resnet10", preprocessing=about), tmp_path)
    transform = create_transform(**resolve_data_config({}, model=timm_folder.create_model(tmp_path)))
    smooth = np.linspace(0, 255, 60 * 80 * 3).reshape(60, 80, 3).astype(np.uint8)
    photo = Image.fromarray(smooth)
    box = evaluation_box(80, 60, resize=resize, crop=32)
    ours = resized(photo, box, about, flip=False) / 255
    expected = (ours - about.mean) / np.array(about.std)
    np.testing.assert_allclose(transform(photo).permute(1, 2, 0), expected, atol=0.1)


REFUSED = {
    "resnet8-cifar": ({}, "timm has no model like resnet8-cifar"),
    "squeezenet": ({}, "timm has no model like squeezenet"),
    "resnet18": ({"norm_type": "group"}, "timm's model has no --norm-type, with which resnet18 was trained"),
    "resnet50": ({"padding": "same"}, "timm's model has no --padding"),
    "efficientnet-b0": ({"efficientnet_expand_ratio": 4}, "timm's model has no --efficientnet-expand-ratio"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_timm_does_not_have_are_one_line(name):
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        timm_folder.architecture(Model(model=name, **options))


def test_images_standardised_by_themselves_are_refused(tmp_path):
    graph = graph_of("resnet10", preprocessing=replace(PREPROCESSING, standardised=True))
    with pytest.raises(ConfigError, match="timm cannot standardise each image"):
        timm_folder.write(graph, tmp_path)
    assert not any(tmp_path.iterdir())


def test_training_options_do_not_stand_in_the_way():
    options = Model(model="efficientnet-b0", efficientnet_dropout=0.5, weight_init="he", input_image_padding=True)
    assert timm_folder.architecture(options) == ("efficientnet_b0", {})


def test_groups_of_a_resnext_are_passed_on():
    options = Model(model="resnext26", resnext_groups=8, resnext_group_dim=16)
    assert timm_folder.architecture(options) == (
        "resnext50_32x4d",
        {"layers": [2, 2, 2, 2], "cardinality": 8, "base_width": 16},
    )
