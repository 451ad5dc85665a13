"""int8 files: 8-bit inside, close to their model, and the same every time."""

from collections import Counter
from dataclasses import replace
from itertools import takewhile

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from exported import CPU, graph_of
from falconet.export import checks, photos
from falconet.export.checks import Agreement
from falconet.export.formats import FORMATS, ONNX, onnx_engine, quantise, torch_engine


def written(folder, graph, *, reduce_range=False):
    """The fp32 file and the int8 file of a graph."""
    FORMATS["onnx"].write(graph, folder, CPU)
    plain, target = folder / ONNX, folder / "int8.onnx"
    pixels = photos.noise(graph).pixels
    quantise(plain, target, (graph.feed(pixels[at : at + 8]) for at in range(0, 32, 8)), reduce_range=reduce_range)
    return plain, target


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return written(tmp_path_factory.mktemp("int8"), graph_of(takes_pixels=True))


def weights(model):
    """The stored values behind the second input of each convolution and matrix product."""
    made = {output: node for node in model.graph.node for output in node.output}
    stored = {each.name: each for each in model.graph.initializer}
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    assert all(made[node.input[1]].op_type == "DequantizeLinear" for node in layers)
    return [(stored[made[node.input[1]].input[0]], stored[made[node.input[1]].input[1]]) for node in layers]


@pytest.mark.run
def test_weights_are_8_bits_with_a_scale_per_channel(files):
    plain, target = files
    model = onnx.load(target)
    onnx.checker.check_model(model, full_check=True)
    found = weights(model)
    assert {each.data_type for each, _ in found} == {TensorProto.INT8}
    assert all(list(scales.dims) == [values.dims[0]] for values, scales in found if len(values.dims) == 4)
    assert target.stat().st_size < 0.4 * plain.stat().st_size
    assert {each.domain for each in model.opset_import} <= {"", "ai.onnx"}


@pytest.mark.run
def test_every_convolution_takes_and_gives_8_bits(files):
    model = onnx.load(files[1])
    made = {output: node for node in model.graph.node for output in node.output}
    users = Counter((name, node.op_type) for node in model.graph.node for name in node.input)
    layers = [node for node in model.graph.node if node.op_type == "Conv"]
    assert layers
    for node in layers:
        assert made[node.input[0]].op_type == "DequantizeLinear"
        assert users[node.output[0], "QuantizeLinear"] == 1
    assert not any(node.op_type == "Relu" for node in model.graph.node)  # rounding to unsigned numbers does it


@pytest.mark.run
def test_metadata_and_pixels_stay_as_they_are(files):
    plain, target = (onnx.load(path) for path in files)
    kept = {each.key: each.value for each in target.metadata_props}
    assert {each.key: each.value for each in plain.metadata_props}.items() <= kept.items()
    (given,), (taken,) = plain.graph.input, target.graph.input
    assert (taken.name, taken.type) == (given.name, given.type)
    before = [node.op_type for node in takewhile(lambda node: node.op_type != "QuantizeLinear", target.graph.node)]
    assert {"Cast", "Mul", "Add"} <= {*before}  # normalised in fp32


@pytest.mark.run
def test_scores_are_close_for_any_batch_and_equal_in_a_second_file(files, tmp_path):
    graph = graph_of(takes_pixels=True)
    _, again = written(tmp_path, graph)
    assert again.read_bytes() == files[1].read_bytes()
    pixels = photos.noise(graph).pixels
    ours, exported = torch_engine(graph.module(), CPU), onnx_engine(files[1], CPU)
    expected, found = ours(pixels), exported(pixels)
    assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    np.testing.assert_allclose(exported(pixels[:1]), found[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.run
def test_a_reduced_range_is_7_bits(files, tmp_path):
    _, target = written(tmp_path, graph_of(takes_pixels=True), reduce_range=True)
    largest = [
        max(int(np.abs(onnx.numpy_helper.to_array(values).astype(int)).max()) for values, _ in weights(onnx.load(path)))
        for path in (files[1], target)
    ]
    assert (largest[0] > 64, largest[1]) == (True, 64)


SMALL = {"efficientnet_depth": 0.1, "efficientnet_top_width": 64}
FAMILIES = {
    "resnet18": {},
    "resnet14": {"padding": "same", "input_image_padding": True},
    "resnext14": {"norm_type": "none", "conv_bias": True},
    "efficientnet-b0": SMALL,
    "efficientnet-cifar": {**SMALL, "norm_type": "group", "norm_num_groups": 4, "proxy_norm": True},
    "mobilenet": {},
    "mobilenet-v3-small": {},
    "squeezenet-cifar": {},
    "timm:convnext_atto": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_quantised(name, tmp_path):
    graph = graph_of(name, **FAMILIES[name])
    _, target = written(tmp_path, graph)
    assert {values.data_type for values, _ in weights(onnx.load(target))} == {TensorProto.INT8}
    images = graph.feed(photos.noise(graph).pixels)
    expected, found = torch_engine(graph.module(), CPU)(images), onnx_engine(target, CPU)(images)
    assert np.isfinite(found).all()
    assert np.corrcoef(expected.ravel(), found.ravel())[0, 1] > 0.9


def agreement(**changes):
    usual = {"images": 200, "photos": "200 photos", "answer": "best class", "right": 150, "right_in_fp32": 152}
    more = {"same": 190, "largest_difference": 0.5, "mean_difference": 0.1, "tolerance": 0.01}
    return Agreement(**{**usual, **more, **changes})


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        ({}, True),
        ({"right": 149}, False),
        ({"right": 160}, True),
        ({"tolerance": 0.02, "right": 148}, True),
        ({"images": 10, "right": 5, "right_in_fp32": 6}, True),  # one photo is no evidence
        ({"images": 10, "right": 5, "right_in_fp32": 7}, False),
        ({"right": None, "right_in_fp32": None, "tolerance": 0.05}, True),
        ({"right": None, "right_in_fp32": None, "tolerance": 0.04}, False),
        ({"largest_difference": float("nan")}, False),
    ],
)
def test_what_passes_is_right_answers_or_unchanged_ones(found, passed):
    assert agreement(**found).passed is passed


def test_lines_state_both_accuracies_or_that_there_are_none():
    assert agreement().line() == (
        "int8 on 200 photos: 75.00 % right, in fp32 76.00 % (tolerance 1 % of the images); same best class for"
        " 95.00 %; logits differ by at most 0.5, by 0.1 on average"
    )
    assert agreement(right=None, right_in_fp32=None, tolerance=0.1).line() == (
        "int8 on 200 photos: same best class for 95.00 % (tolerance 10 % others); logits differ by at most 0.5, by 0.1"
        " on average"
    )


def test_several_labels_are_right_only_together(image_folder):
    graph = graph_of()
    found = photos.divided_folder(image_folder, graph, lambda _: None, share=0.2, calibration=4)
    several = replace(graph, activation="sigmoid")
    sets = np.array([[1, 1, 0]] * 4 + [[0, 1, 0]] * 4)
    labelled = replace(found, right=sets)
    ours = lambda images: np.tile(np.array([[1.0, 2.0, -1.0]], np.float32), (len(images), 1))  # noqa: E731
    other = lambda images: ours(images) * np.array([[-1, 1, 1]], np.float32)  # noqa: E731
    measured = checks.measure(several, ours, other, labelled, tolerance=None, batch=3)
    assert (measured.images, measured.right_in_fp32, measured.right, measured.same) == (8, 4, 4, 0)
    assert measured.answer == "labels"
