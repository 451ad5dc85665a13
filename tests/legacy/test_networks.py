"""What a line of an original builds: initial weights, padding, crops and pixels (inventory sections 2 and 4.2)."""

import math

import pytest
from torch import nn

from falconet.config import rules
from falconet.config.commands import InferOptions, TrainOptions
from falconet.config.load import parse
from falconet.data.dataset import prepared, published
from falconet.legacy.table import Place
from falconet.legacy.translate import translate
from falconet.models.padding import SameConv2d
from falconet.models.zoo import build_model

TF, PT, POPART = "tf1:train.py", "pytorch:train.py", "popart:resnet_main.py"
IMAGENET = "--dataset imagenet --data-dir imagenet"
CIFAR = "--dataset cifar-10 --data-dir cifar"


def options_of(program, line, *, schema=TrainOptions):
    translation = translate(program, line.split(), place=Place())
    options = parse(schema, translation.settings).options
    rules.check(options)
    return options, translation


NETWORKS = {  # weight init, zero init, padding
    (TF, f"{IMAGENET} --model-size 50"): ("lecun", "identity", "same"),
    (TF, f"{IMAGENET} --model-size 18"): ("lecun", "none", "same"),
    (TF, f"{IMAGENET} --model resnext --model-size 101"): ("lecun", "identity", "same"),
    (TF, f"{IMAGENET} --model efficientnet --model-size B0"): ("he", "auto", "same"),
    (TF, f"{IMAGENET} --model squeezenet"): ("auto", "auto", "symmetric"),
    (TF, f"{CIFAR} --model-size 20"): ("lecun", "none", "same"),
    (TF, f"{CIFAR} --model-size 56"): ("lecun", "identity", "same"),
    (TF, f"{CIFAR} --model resnext"): ("lecun", "identity", "same"),
    (PT, "--data generated --model resnet18"): ("auto", "none", "symmetric"),
    (PT, "--data generated --model resnet50"): ("auto", "shortcut", "symmetric"),
    (PT, "--data generated --model resnet50 --norm-type group"): ("auto", "none", "symmetric"),
    (PT, "--data generated --model resnet101"): ("auto", "none", "symmetric"),
    (PT, "--data generated --model efficientnet-b0"): ("auto", "auto", "symmetric"),
    (PT, "--data generated --model mobilenet"): ("normal", "auto", "symmetric"),
    (PT, "--data generated --model mobilenet-v3-small"): ("uniform", "auto", "symmetric"),
    (POPART, "--data-dir d"): ("channels", "none", "symmetric"),
    (POPART, "--data-dir d --dataset IMAGENET --size x50"): ("channels", "none", "symmetric"),
    ("popart:resnet_synthetic_benchmark.py", "--mode train --size 50"): ("channels", "none", "symmetric"),
}


def test_networks_start_and_pad_as_in_each_program():
    models = {line: options_of(*line)[0].model for line in NETWORKS}
    assert {line: (one.weight_init, one.zero_init, one.padding) for line, one in models.items()} == NETWORKS
    wide = {one.model for one in models.values() if one.mobilenet_wide_head}
    assert wide == {one.model for one in models.values() if one.model.startswith("mobilenet-v3")}


def test_initial_weights_are_not_set_where_weights_are_read():
    """Neither typed nor of any effect: no setting, and so no note of it."""
    for line in (
        f"{IMAGENET} --model-size 50 --init-path weights.pt",
        f"{IMAGENET} --model-size 50 --restore-path run",
    ):
        names = [setting.option for setting in translate(TF, line.split()).settings]
        assert "weight-init" not in names
        assert "zero-init" not in names


@pytest.mark.parametrize("program", ["tf1:validation.py", "tf1:inference_embedded.py"])
def test_a_model_that_predicts_is_padded_the_same_without_initial_weights(program):
    options, translation = options_of(
        program, "--dataset imagenet --generated-data --model-size 50", schema=InferOptions
    )
    assert options.model.padding == "same"
    assert "weight-init" not in [setting.option for setting in translation.settings]


def test_the_originals_mobilenet_has_no_published_weights():
    program = "pytorch:inference/run_benchmark.py"
    for name, expected in {"mobilenet": "auto", "mobilenet-v3-large": "random"}.items():
        options, _ = options_of(program, f"--data generated --model {name}", schema=InferOptions)
        assert options.inference.weights == expected
        assert options.model.mobilenet_wide_head is (name != "mobilenet")


def built(program, line):
    return build_model(options_of(program, line)[0].model, classes=10, seed=0)


def test_a_line_of_tensorflow_builds_its_network():
    model = built(TF, f"{CIFAR} --model-size 20")
    assert isinstance(model.get_submodule("layer2.0.conv1"), SameConv2d)
    weight = model.get_parameter("layer3.2.conv2.weight")
    assert weight.std().item() == pytest.approx(math.sqrt(1 / (64 * 9)), rel=0.02)
    assert weight.abs().max().item() <= 2 / 0.87962566 * math.sqrt(1 / (64 * 9)) + 1e-6
    assert all(layer.weight.eq(1).all() for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
    assert not model.get_parameter("fc.bias").any()
    assert model.get_parameter("fc.weight").abs().max().item() <= math.sqrt(6 / 74)


def test_a_line_of_popart_builds_its_network():
    """Its running statistics began at 0 and 0; here the variance begins at 1, which no training sees."""
    model = built(POPART, "--data-dir d --norm-type BATCH")
    weight = model.get_parameter("layer3.2.conv2.weight")
    assert 0.99 * math.sqrt(6 / 128) < weight.abs().max().item() <= math.sqrt(6 / 128)
    assert model.get_buffer("layer3.2.bn2.running_var").eq(1).all()
    assert all(layer.weight.eq(1).all() for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))


CROPS = {
    (TF, IMAGENET): ("height", 0.05, "auto", "object"),
    (PT, "--data imagenet"): ("area", 0.08, "auto", "object"),
    (PT, "--data imagenet --use-bbox-info"): ("area", 0.08, "auto", "crop"),
    (POPART, "--data-dir d --dataset IMAGENET --size 50"): ("area", 0.08, "auto", "object"),
}


@pytest.mark.parametrize(("line", "expected"), CROPS.items(), ids=[" ".join(line) for line in CROPS])
def test_photos_are_cropped_as_each_program_did(line, expected):
    found = options_of(*line)[0].augmentation
    assert (found.crop_draw, found.crop_area, found.object_crop_area, found.object_overlap) == expected


@pytest.mark.parametrize("line", CROPS, ids=[" ".join(line) for line in CROPS])
def test_only_tensorflow_resized_without_antialiasing(line):
    assert options_of(*line)[0].data.antialias is (line[0] != TF)


@pytest.mark.parametrize(
    ("line", "resize"), [((PT, "--data imagenet"), 256), ((PT, "--data cifar10"), 256), ((TF, IMAGENET), 256)]
)
def test_validation_sees_the_centre_of_what_was_resized_to_256(line, resize):
    options, _ = options_of(*line)
    splits = published(options.data.data, None)
    assert splits is not None
    assert prepared(splits, options.data, size=224).preprocessing.resize == resize
    assert prepared(splits, options.data, size=224).at_reduced_size().training.resize == 160 * 256 // 224


IMAGENETS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TENSORFLOWS = (tuple(level / 255 for level in (123.68, 116.78, 103.94)), (1 / 255,) * 3)
PIXELS = {
    (TF, IMAGENET): TENSORFLOWS,
    (TF, f"{IMAGENET} --normalise-input"): IMAGENETS,
    (PT, "--data imagenet"): IMAGENETS,
    (PT, "--data cifar10"): IMAGENETS,
    (POPART, "--data-dir d --dataset IMAGENET --size 50"): IMAGENETS,
    (POPART, "--data-dir d"): ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
}


@pytest.mark.parametrize(("line", "expected"), PIXELS.items(), ids=[" ".join(line) for line in PIXELS])
def test_pixels_are_normalised_by_each_programs_numbers(line, expected):
    options, _ = options_of(*line)
    splits = published(options.data.data, None)
    assert splits is not None
    found = prepared(splits, options.data, size=32).preprocessing
    assert (*found.mean, *found.std) == pytest.approx((*expected[0], *expected[1]))
