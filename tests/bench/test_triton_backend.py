"""The backend that Triton's server runs, here with a stand-in for the module that the server provides."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exported import NAMES, SIDE, graph_of
from falconet.bench.triton_server import BACKEND
from falconet.export.formats import FORMATS


class TritonModelException(Exception):  # noqa: N818, the server's name
    pass


class Tensor:
    def __init__(self, name, values):
        self.name, self.values = name, values

    def as_numpy(self):
        return self.values


@pytest.fixture
def backend(monkeypatch):
    """The module as the server sees it, where numpy pretends to be old."""
    stand_in = SimpleNamespace(
        TritonModelException=TritonModelException,
        Tensor=Tensor,
        InferenceResponse=list,
        get_input_tensor_by_name=lambda request, name: request[name],
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
    spec = importlib.util.spec_from_file_location("model", BACKEND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported model's folder."""
    home = tmp_path_factory.mktemp("exported")
    graph = graph_of(takes_pixels=True)
    FORMATS["triton"].write(graph, home, torch.device("cpu"))
    return home / "models" / graph.name


CONFIG = {
    "max_batch_size": 64,
    "input": [{"name": "images", "data_type": "TYPE_UINT8", "dims": [str(SIDE), str(SIDE), "3"]}],
    "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": [str(len(NAMES))]}],
    "parameters": {"intra_op_thread_count": {"string_value": "1"}},
}


def loaded(backend, folder, monkeypatch, **changed):
    monkeypatch.setattr(np, "__version__", "1.26.4")
    model = backend.TritonPythonModel()
    config = json.dumps(CONFIG | changed)
    model.initialize({"model_config": config, "model_repository": str(folder), "model_version": "1"})
    return model


@pytest.mark.run
def test_requests_are_computed_together_and_answered_apart(backend, folder, monkeypatch):
    model = loaded(backend, folder, monkeypatch)
    pixels = np.random.default_rng(0).integers(0, 256, (6, SIDE, SIDE, 3), dtype=np.uint8)
    runs, plain = [], model._session
    model._session = SimpleNamespace(run=lambda *args: runs.append(1) or plain.run(*args))
    answers = model.execute([{"images": Tensor("images", part)} for part in np.split(pixels, [1, 3])])
    assert len(runs) == 1
    with torch.inference_mode():
        expected = graph_of(takes_pixels=True).module()(torch.from_numpy(pixels)).numpy()
    assert [(tensor.name, len(tensor.values)) for (tensor,) in answers] == [("logits", 1), ("logits", 2), ("logits", 3)]
    np.testing.assert_allclose(np.concatenate([tensor.values for (tensor,) in answers]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.run
def test_threads_are_the_configurations_and_do_not_spin(backend, folder, monkeypatch):
    options = loaded(backend, folder, monkeypatch)._session.get_session_options()
    assert options.intra_op_num_threads == 1
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.run
def test_numpy_2_is_refused(backend, folder, monkeypatch):
    """With it, the server of PyPI would compute with wrong pixels."""
    model = backend.TritonPythonModel()
    monkeypatch.setattr(np, "__version__", "2.0.0")
    with pytest.raises(TritonModelException, match=r"numpy 2\.0\.0 in the server's environment, expected numpy<2"):
        model.initialize({})


MISFITS = {
    "name": (
        {"input": [{**CONFIG["input"][0], "name": "x"}]},
        r"model.onnx has no input 'x', expected one of \['images'\]",
    ),
    "type": (
        {"input": [{**CONFIG["input"][0], "data_type": "TYPE_FP32"}]},
        r"input 'images': the configuration has TYPE_FP32 \[32, 32, 3\], model.onnx has tensor\(uint8\) \[32, 32, 3\]",
    ),
    "shape": (
        {"output": [{**CONFIG["output"][0], "dims": ["4"]}]},
        r"output 'logits': the configuration has TYPE_FP32 \[4\], model.onnx has tensor\(float\) \[3\]",
    ),
    "rank": (
        {"max_batch_size": 0},
        r"input 'images': the configuration has .*, model.onnx has .* \['\w+', 32, 32, 3\]",
    ),
}


@pytest.mark.run
@pytest.mark.parametrize("what", MISFITS)
def test_a_configuration_of_another_model_is_refused(backend, folder, monkeypatch, what):
    changed, message = MISFITS[what]
    with pytest.raises(TritonModelException, match=message):
        loaded(backend, folder, monkeypatch, **changed)
