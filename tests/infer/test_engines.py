"""Engines have the model's scores, are chosen with a reason, and are timed without waiting long."""

import hashlib
import json
import sys
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch

from exported import NAMES, PREPROCESSING, SIDE, graph_of
from falconet.config.commands import ServeOptions
from falconet.config.load import load_options, read_line
from falconet.errors import CheckpointError, ConfigError
from falconet.export.formats import FORMATS
from falconet.infer import conversion, engines
from falconet.infer.classifier import Classifier
from falconet.infer.conversion import ConversionError, Exported
from falconet.infer.engines import Engine, Latency, divided, exported_engine, open_engine
from falconet.infer.predictor import Lanes, Predictor, open_served
from falconet.numerics.precision import REGIMES

CPU = torch.device("cpu")
SMALL = "--model resnet8-cifar --image-size 8 --classes 5 --threads 1 --device cpu"


def photos(count, seed=0, side=SIDE):
    """Photos as they are decoded: channels last in memory."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8).transpose(0, 3, 1, 2)


def written(graph, kind, folder, precision="fp32"):
    """A graph in memory, as in a folder that `falconet export` wrote."""
    folder.mkdir(exist_ok=True)
    FORMATS[kind].write(graph, folder, CPU)
    return Exported(
        kind=kind,
        model=graph.name,
        precision=precision,
        preprocessing=graph.preprocessing,
        class_names=graph.class_names,
        activation=graph.activation,
        files={name: (folder / name).read_bytes() for name in conversion.FILES[kind]},
        record={},
    )


def torch_lane(graph, max_batch=8):
    """A lane of the torch engine, which `falconet predict` and validation use."""
    classifier = Classifier(
        name=graph.name,
        model=graph.model,
        preprocessing=graph.preprocessing,
        class_names=graph.class_names,
        regime=REGIMES["32.32"],
        device=CPU,
    )
    return Predictor(classifier, max_batch=max_batch).lanes()[0]


NETWORKS = {
    "resnet": ("resnet8-cifar", {}),
    "mobilenet": ("mobilenet-v3-small", {}),
    "efficientnet": ("efficientnet-b0", {}),
    "group norm": ("resnet18", {"norm_type": "group", "norm_num_groups": 4}),
}


@pytest.mark.run
@pytest.mark.parametrize(("network", "kind"), [*((name, "onnx") for name in NETWORKS), ("group norm", "openvino")])
def test_scores_are_those_of_torch(network, kind, tmp_path):
    name, options = NETWORKS[network]
    graph = graph_of(name, takes_pixels=True, **options)
    lane = exported_engine(written(graph, kind, tmp_path), max_batch=8).lanes.each[0]
    portions = [photos(1, 1), np.ascontiguousarray(photos(3, 2)), photos(4, 3)]  # a photo, a tensor, photos
    found, expected = lane(portions), torch_lane(graph)(portions)
    assert [len(each) for each in found] == [1, 3, 4]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.float32
        assert (one.argmax(axis=1) == other.argmax(axis=1)).all()
        assert ((one > 0) == (other > 0)).all()  # the labels of a model for several
        assert (np.abs(one - other).max(axis=1) <= 1e-4 * np.abs(other).max(axis=1)).all()


@pytest.mark.run
def test_each_thread_is_a_lane_and_all_together_another_with_the_same_scores(small, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    monkeypatch.setattr("falconet.infer.engines.GAIN", np.inf)  # else time decides whether all gain
    lanes = exported_engine(small, max_batch=8).lanes
    assert (len(lanes.each), lanes.share, lanes.least_whole) == (3, True, 1)
    (expected,) = lanes.each[0]([photos(5)])
    for lane in (*lanes.each, lanes.whole):
        np.testing.assert_allclose(lane([photos(5)])[0], expected, rtol=1e-4, atol=1e-5)


def test_all_cores_together_are_used_only_where_that_is_faster():
    lanes, whole = (print, print), max  # what they do does not matter
    both = [[Latency(images=1, ms=one, other_ms=2.0), Latency(images=8, ms=eight, other_ms=16.0)] for one, eight in (
        (1.0, 8.0), (2.0, 8.0), (2.0, 16.0)
    )]  # fmt: skip
    found = [divided(lanes, whole, each) for each in both]
    assert [(each.whole, each.least_whole) for each in found] == [(whole, 1), (whole, 2), (None, 2)]
    slow, fast = ([Latency(images=1, ms=9.0, other_ms=ms)] for ms in (5.0, 0.1))
    assert [divided(lanes, whole, each).least_more for each in (slow, fast)] == [1, 20]


@pytest.mark.run
def test_scores_are_not_overwritten_by_the_next_batch(tmp_path):
    """OpenVINO writes scores to memory that it reuses."""
    (lane,) = exported_engine(written(graph_of(takes_pixels=True), "openvino", tmp_path), max_batch=4).lanes.each
    (first,) = lane([photos(3, seed=1)])
    before = first.copy()
    lane([photos(3, seed=2)])
    assert np.array_equal(first, before)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small network in ONNX."""
    return written(graph_of(takes_pixels=True), "onnx", tmp_path_factory.mktemp("small"))


@pytest.mark.run
def test_an_engine_with_other_scores_is_refused(small):
    found, other = small, graph_of(takes_pixels=True)
    with torch.no_grad():
        next(other.model.parameters()).mul_(1.01)
    with pytest.raises(ConversionError, match=r"its scores differ from torch's by .* of an image's largest"):
        exported_engine(found, max_batch=4, reference=torch_lane(other))
    rough = exported_engine(replace(found, precision="int8"), max_batch=4, reference=torch_lane(other))
    assert rough.name.endswith(" in int8")
    assert all(each.other_ms for each in rough.latencies)


@pytest.mark.run
def test_there_are_as_many_threads_as_torchs_and_they_do_not_spin(small, monkeypatch):
    seen, plain = [], onnxruntime.InferenceSession

    def session(content, options, **rest):
        seen.append((options.intra_op_num_threads, options.get_session_config_entry("session.intra_op.allow_spinning")))
        return plain(content, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    exported_engine(small, max_batch=1)
    assert seen == [(3, "0"), (1, "0")]  # of all threads, and of each lane


TIMES = {  # milliseconds of one image, the largest batch -> images timed
    (1, 64): 64,
    (8, 64): 32,  # half a second is 62 images
    (100, 64): 4,
    (400, 64): 1,
    (900, 64): 1,
    (100, 5): 5,
}


@pytest.mark.parametrize(("ms", "most"), TIMES)
def test_batches_that_take_long_are_not_timed(ms, most):
    assert engines._soon(ms, most) == TIMES[ms, most]


def test_the_first_line_has_the_latencies_and_torchs():
    both = (Latency(images=1, ms=12.34, other_ms=18.91), Latency(images=16, ms=142.4, other_ms=160.2))
    engine = Engine(
        name="ONNX Runtime 1.31.1", where="2 threads", dtype=np.dtype("float32"), lanes=Lanes(each=()), latencies=both
    )
    line = "engine: ONNX Runtime 1.31.1, 2 threads: 12.3 ms for one image, 142 ms for 16 (torch 18.9 and 160)"
    assert engine.lines() == [line]
    alone = replace(engine, latencies=(Latency(images=1, ms=812.0),), accuracy="int8: as it was")
    assert alone.lines() == ["engine: ONNX Runtime 1.31.1, 2 threads: 812 ms for one image", "int8: as it was"]


def test_each_engine_times_one_image_and_a_batch():
    calls = []

    def lane(portions):
        calls.append([portion.shape for portion in portions])
        return [np.ones((len(portion), 2), np.float32) for portion in portions]

    found = engines._latencies(lane, side=8, max_batch=6, reference=lane)
    assert [each.images for each in found] == [1, 6]
    assert {shape for shapes in calls for shape in shapes} == {(1, 3, 8, 8), (6, 3, 8, 8)}
    assert len(engines._latencies(lane, side=8, max_batch=1)) == 1


# Which engine computes.


def opened(line, notes):
    settings = read_line(ServeOptions, line.split())
    classifier, options = open_served(settings, notes.append)
    notes.clear()
    return classifier, options, settings


def engine_of(line, *, max_batch=4, change=lambda classifier: classifier):
    notes = []
    classifier, options, settings = opened(line, notes)
    return open_engine(change(classifier), options, settings, notes.append, max_batch=max_batch), notes


@pytest.fixture
def no_conversion(monkeypatch):
    def fail(*_):
        raise AssertionError("nothing is converted here")

    monkeypatch.setattr(engines, "converted", fail)


REASONS = {
    "--precision bf16.32": "computes in fp32, and the precision is bf16.32; --precision 32.32 allows it",
    "--precision 16.32": "computes in fp32, and the precision is 16.32; --precision 32.32 allows it",
    "--tta flip": "computes one view, and the scores are the mean of 2 views, the image and its mirror image;"
    " --tta none allows it",
}


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize("option", REASONS)
def test_torch_computes_where_onnx_runtime_cannot(option):
    engine, notes = engine_of(f"{SMALL} {option}")
    assert engine.name == f"torch {torch.__version__}".partition("+")[0]
    assert notes == [f"note: torch computes, because ONNX Runtime {REASONS[option]}", *engine.lines()]
    (answer,) = engine.lanes.each[0]([photos(3, side=8)])
    assert answer.shape == (3, 5)
    for asked in ("--engine onnxruntime", "--engine openvino", "--int8"):
        with pytest.raises(ConversionError) as error:
            engine_of(f"{SMALL} {option} {asked}")
        assert str(error.value).startswith(f"{asked}: {REASONS[option]}")


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize(("asked", "package"), [("onnxruntime", "onnxscript"), ("openvino", "openvino")])
def test_a_missing_package_is_named(asked, package, monkeypatch):
    there = conversion.find_spec
    monkeypatch.setattr(conversion, "find_spec", lambda name: None if name == package else there(name))
    with pytest.raises(ConversionError) as error:
        engine_of(f"{SMALL} --engine {asked}")
    assert str(error.value).startswith(f"--engine {asked}: needs {package}, which is not installed: pip install ")
    if asked == "onnxruntime":
        assert engine_of(SMALL)[1][0].startswith("note: torch computes, because ONNX Runtime needs onnxscript, which")


@pytest.mark.usefixtures("no_conversion")
def test_a_server_on_cuda_computes_with_torch(monkeypatch):
    monkeypatch.setattr(
        engines,
        "torch_engine",
        lambda classifier, **_: Engine(name="torch", where="", dtype=np.dtype("float16"), lanes=Lanes(each=())),
    )
    on_cuda = lambda classifier: replace(classifier, device=torch.device("cuda", 0))  # noqa: E731
    assert engine_of(SMALL, change=on_cuda)[0].name == "torch"
    for asked in ("--engine onnxruntime", "--engine openvino", "--int8"):
        with pytest.raises(
            ConversionError, match=f"{asked}: computes on a CPU, and the device is cuda:0; expected --dev"
        ):
            engine_of(f"{SMALL} {asked}", change=on_cuda)


@pytest.mark.usefixtures("no_conversion")
def test_torch_is_used_without_a_note_where_it_is_asked_for():
    engine, notes = engine_of(f"{SMALL} --engine torch")
    assert notes == engine.lines()
    assert notes[0].startswith("engine: torch ")


@pytest.mark.usefixtures("no_conversion")
def test_int8_needs_the_images_of_a_run():
    with pytest.raises(ConversionError) as error:
        engine_of(f"{SMALL} --int8")
    assert str(error.value) == f"--int8: needs the images of a run, to measure ranges on; {engines.BY_HAND}"


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_int8_is_computed_by_onnx_runtime(engine):
    with pytest.raises(ConfigError, match=f"--int8: contradicts --engine {engine}; expected onnxruntime"):
        load_options(ServeOptions, read_line(ServeOptions, [*SMALL.split(), "--int8", "--engine", engine]))


def test_telemetry_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "openvino_telemetry", raising=False)
    engines.import_openvino()
    assert sys.modules["openvino_telemetry"] is None


# Export folders.


@pytest.fixture
def exported(small, tmp_path):
    """An export folder, made by hand."""
    (tmp_path / "model.onnx").write_bytes(small.files["model.onnx"])
    record = {
        "format": "onnx",
        "model": "resnet8-cifar",
        "precision": "fp32",
        "input": {"type": "uint8"},
        "preprocessing": PREPROCESSING.to_json(),
        "class_names": list(NAMES),
        "probabilities": "sigmoid",
        "files": {"model.onnx": stated(small.files["model.onnx"])},
    }
    (tmp_path / "export.json").write_text(json.dumps(record))
    return tmp_path


def stated(content):
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def changed(folder, **entries):
    path = folder / "export.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.run
def test_an_export_folder_is_served_without_the_run(exported):
    found, engine = engines.opened_export(exported, max_batch=4)
    assert (found.model, found.class_names, found.activation) == ("resnet8-cifar", NAMES, "sigmoid")
    assert found.preprocessing == PREPROCESSING
    expected = torch_lane(graph_of(takes_pixels=True))([photos(4)])
    np.testing.assert_allclose(engine.lanes.each[0]([photos(4)])[0], expected[0], rtol=1e-4, atol=1e-5)
    assert engine.lines()[0].startswith(f"engine: ONNX Runtime {onnxruntime.__version__}, ")
    assert "torch" not in engine.lines()[0]


@pytest.mark.run
def test_an_export_that_cannot_be_served_is_refused_with_its_reason(exported):
    model, record = exported / "model.onnx", (exported / "export.json").read_text()
    content = model.read_bytes()

    def refused(reason):
        with pytest.raises(CheckpointError, match=reason):
            engines.opened_export(exported, max_batch=4)
        (exported / "export.json").write_text(record)
        model.write_bytes(content)

    changed(exported, input={"type": "float32"})
    refused("takes normalised images; expected an export with --preprocessing")
    changed(exported, format="pt2")
    refused("is an export as pt2; expected onnx or openvino")
    changed(exported, files={})
    refused("the record does not state its size and digest")
    changed(exported, class_names=["a", 1])
    refused("not the record of an export")
    changed(exported, preprocessing=PREPROCESSING.to_json() | {"std": [0, 0, 0]})
    refused("preprocessing: std: got")
    (exported / "export.json").write_text(record[:50])
    refused("not JSON; expected the record of an export")
    model.write_bytes(content[:-1])
    refused("contents changed since it was written")
    model.write_bytes(content + b"more")
    refused("not a file of at most")
    model.unlink()
    refused("model.onnx: missing")
    model.write_bytes(b"no protobuf")
    changed(exported, files={"model.onnx": stated(b"no protobuf")})
    refused("ONNX Runtime cannot compute model.onnx: ")
    changed(exported, class_names=["only", "two"])
    refused(r"its scores have shape \(1, 3\), expected \(1, 2\)")
    model.write_bytes(b"")
    changed(exported, files={"model.onnx": stated(b"")})
    refused("ONNX Runtime cannot compute model.onnx: ")
    changed(exported, preprocessing=PREPROCESSING.to_json() | {"image_size": 33})
    refused("ONNX Runtime cannot compute model.onnx: .*nvalid dimensions")
