"""The Open Inference Protocol (v2) with Triton's binary tensors: bytes to values and back, no network."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from falconet.data.preprocessing import Preprocessing
from falconet.infer.predictor import Pixels, Scores

INPUT, OUTPUT, VERSION = "input_0", "output_0", "1"
HEADER = "Inference-Header-Content-Length"  # bytes of JSON before the binary tensors
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")
MOST_JSON = 16 << 20  # bytes of images as text, which are slow to parse
MOST_HEADER = 64 << 10  # bytes of JSON beside binary tensors
_DATATYPES = {"float16": "FP16", "float32": "FP32"}


class RequestError(Exception):
    """A malformed request, in one line; answered with status 400."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What clients can learn about the model."""

    name: str
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    output: str  # numpy's name for the dtype of the scores
    max_batch: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        side = self.preprocessing.image_size
        return (3, side, side)

    @property
    def most_bytes(self) -> int:
        """The longest request body that is accepted."""
        return max(MOST_JSON, MOST_HEADER + self.max_batch * prod(self.image_shape))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A valid inference request."""

    images: Pixels  # a view of the body if that was binary
    id: str | None
    binary: bool  # whether to answer with a binary tensor


def read_request(body: memoryview, header: str | None, served: Served) -> Asked:
    """Parse a request body; `header` is the value of the header that gives the length of the JSON, if sent."""
    length = _json_length(header, body)
    content = _object(_json(body[:length]), "the request")
    inputs = _list(content, "inputs")
    if len(inputs) != 1:
        raise RequestError(f"inputs: got {len(inputs)}, expected only {INPUT}")
    tensor = _object(inputs[0], "inputs[0]")
    if tensor.get("name") != INPUT:
        raise RequestError(f"inputs[0].name: got {_shown(tensor.get('name'))}, expected '{INPUT}'")
    if tensor.get("datatype") != "UINT8":
        raise RequestError(f"{INPUT}.datatype: got {_shown(tensor.get('datatype'))}, expected 'UINT8'")
    shape = _shape(tensor.get("shape"), served)
    images = _pixels(tensor, shape, body[length:])
    named = content.get("id")
    if named is not None and not isinstance(named, str):
        raise RequestError(f"id: got {_shown(named)}, expected a string")
    return Asked(images=images, id=named, binary=_wants_binary(content))


def write_answer(scores: Scores, asked: Asked, served: Served) -> tuple[bytes, dict[str, str]]:
    """Encode an answer: its body and its headers."""
    output: dict[str, object] = {"name": OUTPUT, "datatype": _DATATYPES[served.output], "shape": list(scores.shape)}
    raw = b""
    if asked.binary:
        raw = scores.astype(scores.dtype.newbyteorder("<"), copy=False).tobytes()
        output["parameters"] = {"binary_data_size": len(raw)}
    else:
        output["data"] = _numbers(scores)
    content = {"model_name": served.name, "model_version": VERSION, "outputs": [output]}
    text = json.dumps(content if asked.id is None else {"id": asked.id, **content}, allow_nan=False).encode()
    if not asked.binary:
        return text, {"Content-Type": "application/json"}
    return text + raw, {"Content-Type": "application/octet-stream", HEADER: str(len(text))}


def _numbers(scores: Scores) -> list[float | None]:
    """Flatten, with null for nan and inf: JSON has neither, and Python's spelling breaks strict parsers."""
    flat = scores.ravel()
    finite = np.isfinite(flat)
    return [value if is_number else None for value, is_number in zip(flat.tolist(), finite.tolist(), strict=True)]


def metadata(served: Served) -> dict[str, object]:
    """The answer to GET /v2/models/NAME; `parameters` has the class names and the preprocessing."""
    shape = [-1, *served.image_shape]
    return {
        "name": served.name,
        "versions": [VERSION],
        "platform": "falconet_pytorch",
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": shape}],
        "outputs": [{"name": OUTPUT, "datatype": _DATATYPES[served.output], "shape": [-1, len(served.class_names)]}],
        "parameters": {
            "max_batch_size": served.max_batch,
            "class_names": list(served.class_names),
            "preprocessing": served.preprocessing.to_json(),
        },
    }


def configuration(served: Served, *, max_delay: float) -> dict[str, object]:
    """The same as a Triton model configuration, which its load generator reads. `max_delay` is in seconds."""
    output = f"TYPE_{_DATATYPES[served.output]}"
    return {
        "name": served.name,
        "platform": "falconet_pytorch",
        "max_batch_size": served.max_batch,
        "input": [{"name": INPUT, "data_type": "TYPE_UINT8", "dims": list(served.image_shape)}],
        "output": [{"name": OUTPUT, "data_type": output, "dims": [len(served.class_names)]}],
        "dynamic_batching": {"max_queue_delay_microseconds": round(max_delay * 1e6)},
    }


def _json_length(header: str | None, body: memoryview) -> int:
    if header is None:
        if len(body) > MOST_JSON:
            raise RequestError(
                f"the request has {len(body):,} bytes of JSON, expected at most {MOST_JSON:,}, or {HEADER}"
            )
        return len(body)
    length = int(header) if header.isascii() and header.isdigit() and len(header) < 20 else -1
    if not 0 < length <= len(body):
        raise RequestError(f"{HEADER}: got '{header[:40]}', expected 1 to {len(body):,}, the length of the body")
    if length > MOST_HEADER:
        raise RequestError(f"{HEADER}: got {length:,}, expected at most {MOST_HEADER:,}")
    return length


def _json(text: memoryview) -> Any:
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError too
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise RequestError(f"the request is not JSON: {reason}") from None


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{what}: got {_shown(value)}, expected an object")
    return value


def _list(content: Mapping[str, Any], name: str) -> list[Any]:
    value = content.get(name)
    if not isinstance(value, list):
        raise RequestError(f"{name}: got {_shown(value)}, expected a list")
    return value


def _shape(value: object, served: Served) -> tuple[int, ...]:
    expected = ", ".join(map(str, served.image_shape))
    numbers = value if isinstance(value, list) and all(type(length) is int for length in value) else []
    if tuple(numbers[1:]) != served.image_shape or not 1 <= numbers[0] <= served.max_batch:
        raise RequestError(
            f"{INPUT}.shape: got {_shown(value)}, expected [N, {expected}], N from 1 to {served.max_batch}"
        )
    return tuple(numbers)


def _pixels(tensor: Mapping[str, Any], shape: tuple[int, ...], rest: memoryview) -> Pixels:
    size = _object(tensor.get("parameters", {}), f"{INPUT}.parameters").get("binary_data_size")
    if size is None:
        if len(rest):
            raise RequestError(f"{len(rest):,} bytes follow the JSON, but {INPUT} has no binary_data_size")
        return _from_numbers(tensor.get("data"), shape)
    if "data" in tensor:
        raise RequestError(f"{INPUT}: got both data and binary_data_size, expected one of them")
    if type(size) is not int or size != prod(shape) or size != len(rest):
        raise RequestError(
            f"{INPUT}.parameters.binary_data_size: got {_shown(size)} and {len(rest):,} bytes after the JSON,"
            f" expected {prod(shape)} for its shape"
        )
    return np.frombuffer(rest, dtype=np.uint8).reshape(shape)


def _from_numbers(data: object, shape: tuple[int, ...]) -> Pixels:
    """Parse flat or nested lists of integers; the protocol allows both."""
    if not isinstance(data, list):
        raise RequestError(f"{INPUT}.data: got {_shown(data)}, expected a list of numbers, or binary_data_size")
    found = np.empty(0)
    # Check first: from strings numpy would make an array as wide as the longest, a thousand times the body's size.
    if _holds_integers(data, most=prod(shape)):
        with contextlib.suppress(ValueError, OverflowError):  # lists of unequal lengths, numbers over 64 bits
            found = np.array(data)
    if found.dtype.kind not in "iu" or found.size != prod(shape) or found.shape not in (shape, (prod(shape),)):
        raise RequestError(f"{INPUT}.data: expected {prod(shape)} integers, flat or nested like its shape")
    if found.min() < 0 or found.max() > 255:
        raise RequestError(f"{INPUT}.data: got {found.min()} to {found.max()}, expected 0 to 255")
    return found.astype(np.uint8).reshape(shape)


def _holds_integers(data: list[Any], *, most: int) -> bool:
    """Whether these lists, flat or nested like images, hold at most `most` integers and nothing else."""
    for _ in range(4):
        if len(data) > most or set(map(type, data)) != {list}:
            break
        data = list(chain.from_iterable(data))
    return len(data) <= most and set(map(type, data)) == {int}


def _wants_binary(content: Mapping[str, Any]) -> bool:
    everything = _object(content.get("parameters", {}), "parameters").get("binary_data_output", False)
    outputs = _list(content, "outputs") if "outputs" in content else []
    if not outputs:
        return _switch(everything, "parameters.binary_data_output")
    if len(outputs) != 1:
        raise RequestError(f"outputs: got {len(outputs)}, expected only {OUTPUT}")
    output = _object(outputs[0], "outputs[0]")
    if output.get("name") != OUTPUT:
        raise RequestError(f"outputs[0].name: got {_shown(output.get('name'))}, expected '{OUTPUT}'")
    parameters = _object(output.get("parameters", {}), f"{OUTPUT}.parameters")
    for name in parameters:
        if name != "binary_data":
            raise RequestError(f"{OUTPUT}.parameters: '{name[:40]}' is not supported; expected only binary_data")
    return _switch(parameters.get("binary_data", everything), f"{OUTPUT}.parameters.binary_data")


def _switch(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{what}: got {_shown(value)}, expected true or false")
    return value


def _shown(value: object) -> str:
    """A value in at most 40 characters."""
    if value is None:
        return "nothing"
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
