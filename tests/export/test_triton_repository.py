"""Triton repositories: what Triton's own schema accepts, an ensemble that fits together, the DALI program."""

import ast
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from google.protobuf import text_format

from exported import NAMES, PREPROCESSING, SIDE, exported, graph_of
from falconet.data.crops import evaluation_box
from falconet.export import triton_repository
from falconet.export.triton_repository import MODELS, MOST, Scheduling


@pytest.fixture
def schema():
    return pytest.importorskip("tritonclient.grpc.model_config_pb2")


def configurations(folder, schema):
    """Every config.pbtxt by its model; a field that Triton does not know is an error."""
    return {
        path.parent.name: text_format.Parse(path.read_text(), schema.ModelConfig())
        for path in (folder / MODELS).glob("*/config.pbtxt")
    }


def test_tritons_own_schema_reads_the_configurations(schema, tmp_path):
    triton_repository.write(graph_of(takes_pixels=True), tmp_path)
    found = configurations(tmp_path, schema)
    assert found.keys() == {"resnet8-cifar", "resnet8-cifar_decode", "resnet8-cifar_photo"}
    for name, each in found.items():
        assert (each.name, each.max_batch_size) == (name, MOST)
        assert (tmp_path / MODELS / name / "1").is_dir()
    model = found["resnet8-cifar"]
    assert model.backend == "onnxruntime"
    assert [(each.name, list(each.dims)) for each in model.input] == [("images", [SIDE, SIDE, 3])]
    assert [(each.name, list(each.dims)) for each in model.output] == [("logits", [len(NAMES)])]
    assert model.dynamic_batching.max_queue_delay_microseconds == 2000
    warm = {each.batch_size: each.inputs["images"] for each in model.model_warmup}
    assert {size: (list(each.dims), each.random_data) for size, each in warm.items()} == {
        size: ([SIDE, SIDE, 3], True) for size in (1, MOST)
    }


def test_a_measured_server_has_the_limits_and_threads_that_ours_has(schema, tmp_path):
    scheduling = Scheduling(max_batch=5, delay=700, threads=3)
    triton_repository.write(graph_of(takes_pixels=True), tmp_path, scheduling)
    model = configurations(tmp_path, schema)["resnet8-cifar"]
    assert model.max_batch_size == 5
    assert model.dynamic_batching.max_queue_delay_microseconds == 700
    assert [(each.kind, each.count) for each in model.instance_group] == [(schema.ModelInstanceGroup.KIND_CPU, 1)]
    assert model.parameters["intra_op_thread_count"].string_value == "3"
    assert sorted(each.batch_size for each in model.model_warmup) == [1, 5]


def test_ensemble_leads_from_a_photo_to_scores(schema, tmp_path):
    """Each step takes what was given or made before, with the type and shape that its model declares."""
    triton_repository.write(graph_of(takes_pixels=True), tmp_path)
    found = configurations(tmp_path, schema)
    ensemble = found["resnet8-cifar_photo"]
    assert ensemble.platform == "ensemble"
    known = {each.name: (each.data_type, list(each.dims)) for each in ensemble.input}
    assert known == {"encoded": (schema.TYPE_UINT8, [-1])}
    for step in ensemble.ensemble_scheduling.step:
        model = found[step.model_name]
        for each in model.input:
            assert known[step.input_map[each.name]] == (each.data_type, list(each.dims))
        known |= {step.output_map[each.name]: (each.data_type, list(each.dims)) for each in model.output}
    for each in ensemble.output:
        assert known[each.name] == (each.data_type, list(each.dims))
    decoder = found["resnet8-cifar_decode"]
    assert decoder.input[0].allow_ragged_batch  # photos have as many bytes as they have
    assert decoder.instance_group[0].kind == schema.ModelInstanceGroup.KIND_CPU


def test_labels_have_one_line_per_class(schema, tmp_path):
    names = ("ant", "two\nlines", "", "bär", os.fsdecode(b"caf\xe9"))
    graph = replace(graph_of(takes_pixels=True), class_names=names)
    triton_repository.write(graph, tmp_path)
    for name, each in configurations(tmp_path, schema).items():
        files = [output.label_filename for output in each.output if output.label_filename]
        lines = [(tmp_path / MODELS / name / file).read_text(encoding="utf-8").splitlines() for file in files]
        assert lines == ([] if name.endswith("_decode") else [["ant", "two lines", "-", "bär", r"caf\udce9"]])


@pytest.mark.run
def test_the_model_in_the_repository_has_the_scores(tmp_path):
    parity = exported(graph_of(takes_pixels=True), "triton", tmp_path)
    assert parity.passed, parity.line()


def test_decoding_program_names_the_sizes():
    tree = ast.parse(triton_repository.decoding_program(PREPROCESSING))
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == ["span", "decode"]
    (sizes,) = [node for node in tree.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(sizes.value) == (PREPROCESSING.image_size, PREPROCESSING.resize)


@pytest.mark.parametrize(("kind", "name"), [("bilinear", "INTERP_LINEAR"), ("bicubic", "INTERP_CUBIC")])
def test_decoding_program_interpolates_as_validation_does(kind, name):
    program = triton_repository.decoding_program(replace(PREPROCESSING, interpolation=kind))
    assert f"interp_type=types.{name}," in program


@pytest.mark.parametrize(("width", "height"), [(640, 427), (427, 640), (61, 60), (32, 32), (1155, 1659), (4000, 3001)])
def test_decoding_program_crops_what_validation_crops(width, height):
    """The arithmetic of its sides, run with numbers; docs/using/export.md has its agreement on photos."""
    tree = ast.parse(triton_repository.decoding_program(PREPROCESSING))
    kept = [node for node in tree.body if isinstance(node, ast.Assign) or getattr(node, "name", "") == "span"]
    program = {"fn": SimpleNamespace(cast=lambda value, dtype: value), "types": SimpleNamespace(FLOAT=None)}
    exec(compile(ast.Module(kept, []), "dali.py", "exec"), program)
    short = min(width, height)
    (top, bottom), (left, right) = program["span"](height, short), program["span"](width, short)
    expected = evaluation_box(width, height, resize=PREPROCESSING.resize, crop=SIDE)
    assert (left, top, right, bottom) == pytest.approx(expected)


def test_photos_are_not_decoded_where_dali_would_resize_differently(schema, tmp_path):
    graph = graph_of(takes_pixels=True, preprocessing=replace(PREPROCESSING, antialias=False))
    triton_repository.write(graph, tmp_path)
    assert configurations(tmp_path, schema).keys() == {"resnet8-cifar"}
