"""Triton's backend `onnxruntime` in Python, for a server that has only the Python backend, such as PyPI's.

`triton_server` puts this file into the server's backend folder, and the server's own interpreter runs it, which has
neither Falconet nor torch. A model repository made for the compiled backend loads unchanged.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton  # type: ignore[import-not-found]  # the server has it

TYPES = {
    "TYPE_UINT8": "tensor(uint8)",
    "TYPE_INT64": "tensor(int64)",
    "TYPE_FP16": "tensor(float16)",
    "TYPE_FP32": "tensor(float)",
}
FILE = "model.onnx"


class TritonPythonModel:
    """One instance of a model; the server calls its methods by name."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        return config  # a repository of ours is complete

    def initialize(self, args: Mapping[str, str]) -> None:
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
            # This server was compiled for numpy 1: with numpy 2, tensors have other numbers, without an error.
            raise triton.TritonModelException(f"numpy {np.__version__} in the server's environment, expected numpy<2")
        config = json.loads(args["model_config"])
        name = config.get("default_model_filename") or FILE
        path = Path(args["model_repository"], args["model_version"], name)
        self._session = onnxruntime.InferenceSession(
            str(path), _session_options(config), providers=["CPUExecutionProvider"]
        )
        batched = config.get("max_batch_size", 0) > 0
        for kind, nodes in (("input", self._session.get_inputs()), ("output", self._session.get_outputs())):
            _check(kind, config[kind], nodes, batched=batched)
        self._inputs = [each["name"] for each in config["input"]]
        self._outputs = [each["name"] for each in config["output"]]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer the requests that the server has batched, in one run."""
        given = {
            name: [triton.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self._inputs
        }
        feeds = {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in given.items()}
        computed = self._session.run(self._outputs, feeds)
        ends = np.cumsum([len(part) for part in given[self._inputs[0]]])[:-1]
        answers = zip(*(np.split(values, ends) for values in computed), strict=True)
        return [
            triton.InferenceResponse([triton.Tensor(*pair) for pair in zip(self._outputs, answer, strict=True)])
            for answer in answers
        ]


def _session_options(config: Mapping[str, Any]) -> Any:
    """Session options with the compiled backend's thread parameter and without spinning, because cores are shared."""
    options = onnxruntime.SessionOptions()
    threads = config.get("parameters", {}).get("intra_op_thread_count", {}).get("string_value", "0")
    options.intra_op_num_threads = int(threads)  # 0: one per core
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors
    return options


def _check(kind: str, declared: Sequence[Mapping[str, Any]], nodes: Sequence[Any], *, batched: bool) -> None:
    """Require that the configuration matches the model, which the server does not check for Python backends."""
    known = {node.name: node for node in nodes}
    for each in declared:
        name, dims = each["name"], [int(size) for size in each["dims"]]
        if name not in known:
            raise triton.TritonModelException(f"{FILE} has no {kind} '{name}', expected one of {sorted(known)}")
        node = known[name]
        shape = node.shape[1:] if batched else node.shape
        fits = len(shape) == len(dims) and all(
            size == real or not isinstance(real, int) for size, real in zip(dims, shape, strict=True)
        )
        if TYPES.get(each["data_type"]) != node.type or not fits:
            raise triton.TritonModelException(
                f"{kind} '{name}': the configuration has {each['data_type']} {dims}, {FILE} has {node.type} {shape}"
            )
        if batched and isinstance(node.shape[0], int):
            raise triton.TritonModelException(f"{kind} '{name}': {FILE} takes batches of {node.shape[0]} only")
