"""Every format computes the scores of the model it came from, for every family, in its own runtime."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from exported import CPU, NAMES, PREPROCESSING, SIDE, exported, graph_of
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.errors import CheckpointError, DeviceError
from falconet.export import checks, photos
from falconet.export.formats import FORMATS, torch_engine

SMALL = {"efficientnet_depth": 0.1, "efficientnet_top_width": 64}  # one block per stage
FAMILIES = {
    "resnet10": {},
    "resnet14": {"padding": "same", "input_image_padding": True},
    "resnet18": {"norm_type": "group", "norm_grouping": "strided", "norm_num_groups": 8},
    "resnext14": {"norm_type": "none", "conv_bias": True},
    "efficientnet-b0": SMALL,
    "efficientnet-cifar": {**SMALL, "norm_type": "group", "norm_num_groups": 4, "proxy_norm": True},
    "mobilenet": {},
    "mobilenet-v3-small": {"mobilenet_wide_head": True},
    "mobilenet-v3-large": {},
    "resnet8-cifar": {"norm_type": "group", "norm_num_groups": 4, "enable_fast_groupnorm": True},
    "resnet11-cifar": {"disable_stable_batchnorm": True},
    "resnext11-cifar": {},
    "squeezenet-cifar": {"squeezenet_bypass": True},
    "speednet8-cifar": {"speednet_widths": (24, 32, 32)},
    "speednet11-cifar": {"speednet_widths": (24, 32, 32), "speednet_activation": "silu"},
    "timm:convnext_atto": {},
}


@pytest.mark.run
@pytest.mark.parametrize("takes_pixels", [False, True], ids=["values", "pixels"])
@pytest.mark.parametrize("kind", ["onnx", "pt2", "openvino"])
def test_scores_are_those_of_the_model_for_any_batch(kind, takes_pixels, tmp_path):
    parity = exported(graph_of(takes_pixels=takes_pixels), kind, tmp_path)
    assert parity.passed, parity.line()
    assert (parity.images, parity.same_top_1) == (8, 8)


@pytest.mark.run
@pytest.mark.parametrize("kind", ["onnx", "pt2", "openvino"])
def test_half_precision_is_close_and_smaller(kind, tmp_path):
    sizes = {}
    for half in (False, True):
        folder = tmp_path / str(half)
        folder.mkdir()
        parity = exported(graph_of(half=half), kind, folder)
        sizes[half] = sum(path.stat().st_size for path in folder.iterdir())
    assert 0 < parity.relative_difference < checks.HALF_TOLERANCE
    assert sizes[True] < 0.7 * sizes[False]


@pytest.mark.run
@pytest.mark.parametrize("how", [{"standardised": True}, {"mean": (0.0, 0.0, 0.0), "std": (1 / 255,) * 3}])
def test_every_kind_of_normalisation_goes_inside(how, tmp_path):
    graph = graph_of(preprocessing=replace(PREPROCESSING, **how), takes_pixels=True)
    assert exported(graph, "pt2", tmp_path).passed


@pytest.mark.run
def test_onnx_names_its_tensors_and_carries_class_names(tmp_path):
    graph = graph_of(takes_pixels=True)
    exported(graph, "onnx", tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    (given,), (made,) = model.graph.input, model.graph.output

    def shape(tensor):
        return [each.dim_param or each.dim_value for each in tensor.type.tensor_type.shape.dim]

    assert (given.name, given.type.tensor_type.elem_type) == ("images", onnx.TensorProto.UINT8)
    assert (shape(given), made.name, shape(made)) == (["batch", SIDE, SIDE, 3], "logits", ["batch", len(NAMES)])
    stored = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(stored["class_names"]) == list(NAMES)
    assert Preprocessing.from_json(json.loads(stored["preprocessing"])) == PREPROCESSING


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["onnx", "pt2", "openvino"])
def test_every_family_exports(name, kind, tmp_path):
    parity = exported(graph_of(name, **FAMILIES[name]), kind, tmp_path)
    assert parity.passed, parity.line()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet8-cifar", "efficientnet-cifar"])
def test_compiled_package_has_the_scores_of_the_model(name, tmp_path):
    parity = exported(graph_of(name, takes_pixels=True, **FAMILIES[name]), "aoti", tmp_path)
    assert parity.passed, parity.line()


LINEAR = """
import sys, torch
from torch._inductor import aoti_compile_and_package, aoti_load_package
images = torch.ones(2, 3, device="cuda")
program = torch.export.export(torch.nn.Linear(3, 1).cuda().requires_grad_(False), (images,))
aoti_load_package(aoti_compile_and_package(program, package_path=sys.argv[1]))(images)
"""


@cache
def torch_crashes():
    """Whether torch crashes when it loads a compiled package: asked once, for the answer takes a compilation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", LINEAR, str(Path(folder, "linear.pt2"))]
        return subprocess.run(command, capture_output=True).returncode < 0


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["resnet8-cifar", "efficientnet-cifar"])
def test_package_compiled_for_a_gpu_has_the_scores_of_the_model(name, half, tmp_path):
    if torch_crashes():  # seen with torch 2.11 and CUDA 13.0
        pytest.skip("torch crashes on this machine when it loads any compiled package, even of one linear layer")
    device, graph = torch.device("cuda"), graph_of(name, takes_pixels=True, half=half, **FAMILIES[name])
    FORMATS["aoti"].write(graph, tmp_path, device)
    engine, ours = FORMATS["aoti"].open(graph, tmp_path, device), torch_engine(graph.module().to(device), device)
    tolerance = checks.HALF_TOLERANCE if half else 2e-3  # TensorFloat-32 convolutions
    parity = checks.compare(graph, ours, engine, photos.noise(graph), tolerance=tolerance, batch=8)
    assert parity.passed, parity.line()


def test_compiling_without_a_compiler_is_one_line(monkeypatch, tmp_path):
    from torch._inductor import cpp_builder, exc

    def none():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(DeviceError, match=r"needs a C\+\+ compiler.*apt-get install g\+\+"):
        FORMATS["aoti"].write(graph_of(), tmp_path, CPU)


class Undecided(nn.Module):
    """A model that looks at its values, which no graph can express."""

    def forward(self, images):
        return images.mean((2, 3)) if images.sum() > 0 else images.amax((2, 3))


def test_a_model_that_cannot_be_traced_is_one_line(tmp_path):
    graph = replace(graph_of(), model=Undecided())
    with pytest.raises(CheckpointError, match=r"resnet8-cifar cannot be traced by torch\.export: ") as caught:
        FORMATS["pt2"].write(graph, tmp_path, CPU)
    assert "\n" not in str(caught.value)


def test_openvino_is_imported_without_its_telemetry():
    """In a new process: the import itself would report to Intel."""
    program = (
        "import sys; from falconet.infer.engines import import_openvino; import_openvino();"
        " from openvino.tools.ovc import telemetry_utils as used; print(used.tm.__name__)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert found.stdout.strip() == "openvino.tools.ovc.telemetry_stub", found.stderr


def test_input_is_described_exactly():
    values, pixels = graph_of(), graph_of(takes_pixels=True)
    assert values.describe_input() == (
        "images, float32 [N, 3, 32, 32]: RGB photos, short side resized to 36, centre crop of 32,"
        " (pixel / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]"
    )
    assert pixels.describe_input() == (
        "images, uint8 [N, 32, 32, 3]: RGB photos, short side resized to 36, centre crop of 32, values from 0 to 255;"
        " normalised inside"
    )
    photo = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3), np.uint8)
    expected = (photo[0] / 255 - IMAGENET_MEAN) / np.array(IMAGENET_STD)
    np.testing.assert_allclose(values.feed(photo)[0].transpose(1, 2, 0), expected, atol=1e-5)
    assert pixels.feed(photo) is photo
