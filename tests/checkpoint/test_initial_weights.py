"""Weights to start with: what is known of a file, which of its tensors a model takes, and how photos look to it."""

import json

import pytest
import safetensors.torch
import timm
import timm.data
import torch
import torchvision

from falconet.checkpoint import format, initial_weights
from falconet.checkpoint.initial_weights import find, pretrained_model
from falconet.config.options import Data, Model
from falconet.config.values import BOUND_TO_WEIGHTS
from falconet.data.preprocessing import Preprocessing
from falconet.errors import CheckpointError
from falconet.models import pretrained, zoo


def saved(model, path, *, prefix=""):
    weights = {prefix + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(weights, path)
    else:
        torch.save({"state_dict": weights}, path)
    return path


def spread(model):
    """Running statistics that are not those of a new model, so that epsilon matters."""
    generator = torch.Generator().manual_seed(0)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.5 + 0.05)
    return model.eval()


TORCHVISION = {
    "resnet18": "resnet18",
    "mobilenet": "mobilenet_v2",
    "mobilenet-v3-small": "mobilenet_v3_small",
    "efficientnet-b0": "efficientnet_b0",
    "squeezenet": "squeezenet1_0",
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_a_file_of_torchvisions_computes_what_its_model_computes(tmp_path, name):
    torch.manual_seed(0)
    theirs = spread(torchvision.models.get_model(TORCHVISION[name], weights=None, num_classes=5))
    path = saved(theirs, tmp_path / "weights.pth", prefix="module.")
    found = find(name, path)
    options = {key.replace("-", "_"): float(entry["value"]) for key, entry in found.options.items()}
    ours = zoo.build_model(Model(model=name, **options), classes=5, seed=0).eval()
    found.load(ours, name=name, class_names=tuple("abcde"))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)
    assert (found.classes, found.class_names) == (5, ())


def test_a_published_file_of_torchvisions_brings_its_own_preparation():
    newer = initial_weights._inputs(pretrained.torchvision_config("resnet50-11ad3fa6.pth"), where="")
    older = initial_weights._inputs(pretrained.torchvision_config("resnet50-0676ba61.pth"), where="")
    assert [each.preprocessing.resize for each in (newer, older)] == [232, 256]
    assert pretrained.torchvision_config("mine.pth") is None
    for name in torchvision.models.list_models(module=torchvision.models):
        for weights in torchvision.models.get_model_weights(name):
            made, config = weights.transforms(), pretrained.torchvision_config(weights.url.rpartition("/")[2])
            stated = initial_weights._inputs(config, where="").preprocessing
            assert [stated.image_size, stated.resize] == [*made.crop_size, *made.resize_size]
            assert stated.interpolation == made.interpolation.value


CENTRED = [name for name in pretrained.TAGS if name != "efficientnet-b5"]  # whose photos timm squeezes into a square


@pytest.mark.parametrize("name", [*CENTRED, "timm:tf_efficientnet_lite1"])
def test_published_weights_bring_the_preparation_that_timm_uses(name):
    config = timm.data.resolve_data_config(timm.get_pretrained_cfg(pretrained.published(name).tag).to_dict())
    (resize, crop, *_) = timm.data.create_transform(**config).transforms
    found = find(name, "published", fetched=False).inputs.preprocessing
    assert (found.resize, found.image_size, found.image_size) == (resize.size, *crop.size)
    assert (found.interpolation, found.mean, found.std) == (config["interpolation"], config["mean"], config["std"])


def beside(path, **changes):
    """What timm writes beside the weights in a repository of the hub."""
    config = timm.get_pretrained_cfg("resnet18.a1_in1k").to_dict() | {"num_classes": 3} | changes
    names = ["cat", "dog", "owl"]
    stored = {"architecture": "resnet18", "num_classes": 3, "label_names": names, "pretrained_cfg": config}
    (path.parent / "config.json").write_text(json.dumps(stored))


def test_a_repository_of_timms_names_its_classes_and_preparation(tmp_path):
    path = saved(timm.create_model("resnet18", num_classes=3), tmp_path / "model.safetensors")
    beside(path, crop_pct=0.95, mean=[0.5, 0.4, 0.3])
    found = find("resnet18", path)
    assert found.class_names == ("cat", "dog", "owl")
    assert (found.inputs.crop_ratio, found.inputs.mean, found.inputs.interpolation) == (
        0.95,
        (0.5, 0.4, 0.3),
        "bicubic",
    )


WRONG = {
    "its input size is [3, 224, 192]; expected 3, N, N for square images": {"input_size": [3, 224, 192]},
    "its crop_pct is 'all'; expected a number from 0.1 to 1": {"crop_pct": "all"},
    "preprocessing: interpolation: got 'nearest', expected 'bilinear' or 'bicubic'": {"interpolation": "nearest"},
    "preprocessing: std: got [0, 1, 1], expected three numbers, 1e-06 to 1e+06": {"std": [0, 1, 1]},
}


@pytest.mark.parametrize(("message", "changes"), WRONG.items())
def test_a_preparation_that_makes_no_sense_is_refused(tmp_path, message, changes):
    path = saved(timm.create_model("resnet18", num_classes=3), tmp_path / "model.safetensors")
    beside(path, **changes)
    with pytest.raises(CheckpointError) as caught:
        find("resnet18", path)
    assert str(caught.value) == f"{path}: {message}"


def test_a_file_for_another_model_is_refused_by_name(tmp_path):
    path = saved(timm.create_model("resnet34", num_classes=3), tmp_path / "model.safetensors")
    model = zoo.build("resnet18", classes=3, seed=0)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors does not fit resnet18: .*; these weights fit resnet34"
    ):
        find("resnet18", path).load(model, name="resnet18", class_names=tuple("abc"))


def classifier_of(tmp_path, weights, class_names):
    path = saved(zoo.build("resnet18", classes=weights, seed=5), tmp_path / f"{weights}.pth")
    model = zoo.build("resnet18", classes=len(class_names), seed=9)
    found = find("resnet18", path)
    found.load(model, name="resnet18", class_names=class_names)
    stored, new = torch.load(path)["state_dict"], zoo.build("resnet18", classes=len(class_names), seed=9).state_dict()
    state = model.state_dict()
    assert torch.equal(state["conv1.weight"], stored["conv1.weight"])
    if torch.allclose(state["fc.weight"], new["fc.weight"] * (0.01 / new["fc.weight"].std())):
        assert not state["fc.bias"].any()
        return "new", found.describe(class_names)
    assert torch.equal(state["fc.weight"], stored["fc.weight"])
    return "kept", found.describe(class_names)


def test_the_classifier_is_kept_only_for_the_same_classes(tmp_path):
    synsets = pretrained.imagenet_classes(1000)
    assert classifier_of(tmp_path, 3, tuple("abc"))[0] == "kept"
    kind, words = classifier_of(tmp_path, 3, tuple("ab"))
    assert kind == "new"
    assert words.endswith("3.pth, except the classifier's: 3 classes there, 2 here")
    assert classifier_of(tmp_path, 1000, synsets)[0] == "kept"
    kind, words = classifier_of(tmp_path, 1000, tuple(f"mine {number:03}" for number in range(1000)))
    assert kind == "new"
    assert words.endswith("except the classifier's: 1,000 other classes there, 1,000 here")


def test_a_pretrained_model_names_imagenets_classes(tmp_path):
    path = saved(spread(torchvision.models.resnet18(weights=None)), tmp_path / "resnet18-f37072fd.pth")
    opened = pretrained_model(Model(model="resnet18"), path)
    assert opened.class_names[281] == "tabby, tabby cat"
    assert (opened.preprocessing.resize, opened.preprocessing.interpolation) == (256, "bilinear")
    assert opened.source == str(path)


def test_options_that_leave_no_room_are_not_changed():
    inputs = find("mobilenet-v3-small", "published", fetched=False).inputs
    every = {"image-size", "pixel-mean", "pixel-deviation", "interpolation", "validation-crop-ratio"}
    assert inputs.table(Data()).keys() == every
    assert inputs.table(Data(normalization="image")).keys() == every - {"pixel-mean", "pixel-deviation"}
    assert inputs.table(Data(antialias=False)).keys() == every - {"interpolation"}
    assert inputs.table(Data(validation_crop="whole")).keys() == every - {"validation-crop-ratio"}


SAME_SHAPES = [  # a model, and an option of it that changes no weight's shape
    ("resnet18", {}, {"weight_init": "he"}),
    ("resnet18", {}, {"zero_init": "last"}),
    ("resnet18", {}, {"batchnorm_momentum": 0.5}),
    ("resnet18", {}, {"disable_stable_batchnorm": True}),
    ("resnet18", {}, {"norm_eps": 0.1}),
    ("resnet18", {}, {"padding": "same"}),
    ("resnet18", {"norm_type": "group"}, {"norm_num_groups": 16}),
    ("resnet18", {"norm_type": "group"}, {"norm_grouping": "strided"}),
    ("resnet18", {"norm_type": "group"}, {"enable_fast_groupnorm": True}),
    ("resnet50", {}, {"bottleneck_stride": "1x1"}),
    ("resnet14-cifar", {}, {"shortcut_padding": "both"}),
    ("efficientnet-b0", {}, {"efficientnet_activation": "relu"}),
    ("efficientnet-b0", {}, {"efficientnet_dropout": 0.9}),
    ("efficientnet-b0", {}, {"efficientnet_drop_path": 0.9}),
    ("efficientnet-b0", {"norm_type": "group", "norm_num_groups": 4, "proxy_norm": True}, {"proxy_epsilon": 0.5}),
    ("efficientnet-b0", {"norm_type": "group", "norm_num_groups": 4, "proxy_norm": True}, {"proxy_recompute": False}),
    ("speednet8-cifar", {}, {"speednet_activation": "silu"}),
]


@pytest.mark.parametrize(("name", "fixed", "changed"), SAME_SHAPES, ids=[next(iter(each[2])) for each in SAME_SHAPES])
def test_what_weights_compute_depends_on_the_options_that_are_bound_to_them(name, fixed, changed):
    plain = spread(zoo.build(name, classes=3, seed=1, zero_init="none" if "resnet" in name else "auto", **fixed))
    other = zoo.build(name, classes=3, seed=2, **fixed, **changed).eval()
    other.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        is_same = torch.allclose(plain(images), other(images), rtol=1e-4, atol=1e-6)
    (option,) = changed
    assert is_same == (option.replace("_", "-") not in BOUND_TO_WEIGHTS)


@pytest.mark.parametrize("better", ["model", "ema"])
def test_a_run_gives_its_best_checkpoint_and_the_better_of_its_weights(tmp_path, better):
    models = {number: zoo.build("resnet8-cifar", classes=2, seed=number) for number in range(4)}
    score = {"model": 80.0, "ema": 85.0}[better]
    for epoch, mark in ((1, score), (2, 70.0)):
        weights = {"model": models[epoch].state_dict()}
        weights["ema"] = {f"average/{name}": tensor for name, tensor in models[epoch + 1].state_dict().items()}
        content = {
            **{"model": "resnet8-cifar", "classes": 2, "class_names": ["a", "b"]},
            "progress": {"epoch": epoch, "images": 0, "update": epoch},
            "config": {
                "shortcut-padding": {"value": "both", "source": "line"},
                "norm-eps": {"value": "0.1", "source": "line"},
                "zero-init": {"value": "last", "source": "line"},
                "norm-type": {"value": "batch", "source": "default"},
            },
            "preprocessing": Preprocessing(image_size=16, resize=18, mean=(0, 0, 0), std=(1, 1, 1)).to_json(),
            "metrics": {"validation_accuracy": min(mark, 80.0), "score": mark},
        }
        format.write(tmp_path / f"r/checkpoints/{epoch}", weights, content)
    found = find("resnet8-cifar", tmp_path / "r")
    expected = models[1 if better == "model" else 2].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.read().items())
    assert {name: entry["value"] for name, entry in found.options.items()} == {
        **{"antialias": True, "shortcut-padding": "both", "norm-eps": "0.1"},
    }
    assert found.source.endswith("checkpoints/1" if better == "model" else "checkpoints/1 (moving average)")
