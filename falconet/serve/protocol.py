"""The Open Inference Protocol (v2) over HTTP: JSON, and Triton's binary tensors; bytes in, values out, no network."""

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

INPUT, OUTPUT, VERSION = "input_0", "output_0", "1"  # the originals' names
HEADER = "Inference-Header-Content-Length"  # bytes of JSON before the binary tensors
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")
MOST_JSON = 16 << 20  # bytes of numbers as text: a slow way to send images, and parsing holds up everybody
MOST_HEADER = 64 << 10  # bytes of JSON beside binary tensors
_DATATYPES = {"float16": "FP16", "float32": "FP32"}


class RequestError(Exception):
    """A request that is not one, in one line; answered with status 400."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What clients may know about the model."""

    name: str
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    output: str  # numpy's name of the format of the scores
    max_batch: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        side = self.preprocessing.image_size
        return (3, side, side)

    @property
    def most_bytes(self) -> int:
        """Of a request's body."""
        return max(MOST_JSON, MOST_HEADER + self.max_batch * prod(self.image_shape))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """An inference request that is in order."""

    images: Pixels  # a view of the body where that was binary
    id: str | None
    binary: bool  # how the answer is wanted


def read_request(body: memoryview, header: str | None, served: Served) -> Asked:
    """A request's body; `header` is the text of the header that says where JSON ends, if there was one."""
    length = _json_length(header, body)
    content = _object(_json(body[:length]), "the request")
    inputs = _list(content, "inputs")
    if len(inputs) != 1:
        raise RequestError(f"inputs: got {len(inputs)}, wanted {INPUT} alone")
    tensor = _object(inputs[0], "inputs[0]")
    if tensor.get("name") != INPUT:
        raise RequestError(f"inputs[0].name: got {_shown(tensor.get('name'))}, wanted '{INPUT}'")
    if tensor.get("datatype") != "UINT8":
        raise RequestError(f"{INPUT}.datatype: got {_shown(tensor.get('datatype'))}, wanted 'UINT8'")
    shape = _shape(tensor.get("shape"), served)
    images = _pixels(tensor, shape, body[length:])
    named = content.get("id")
    if named is not None and not isinstance(named, str):
        raise RequestError(f"id: got {_shown(named)}, wanted text")
    return Asked(images=images, id=named, binary=_wants_binary(content))


def write_answer(scores: Scores, asked: Asked, served: Served) -> tuple[bytes, dict[str, str]]:
    """The body of an answer, and its headers."""
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
    """Flat; JSON has neither nan nor inf, and Python's own spelling of them breaks every strict parser."""
    flat = scores.ravel()
    finite = np.isfinite(flat)
    return [value if is_number else None for value, is_number in zip(flat.tolist(), finite.tolist(), strict=True)]


def metadata(served: Served) -> dict[str, object]:
    """What GET /v2/models/NAME answers; class names and preprocessing are in `parameters`."""
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
    """The same in the words of Triton's model configuration, which its load generator reads. `max_delay`: seconds."""
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
                f"the request has {len(body):,} bytes of JSON, wanted at most {MOST_JSON:,}, or {HEADER}"
            )
        return len(body)
    length = int(header) if header.isascii() and header.isdigit() and len(header) < 20 else -1
    if not 0 < length <= len(body):
        raise RequestError(f"{HEADER}: got '{header[:40]}', wanted 1 to the body's {len(body):,} bytes")
    if length > MOST_HEADER:
        raise RequestError(f"{HEADER}: got {length:,}, wanted at most {MOST_HEADER:,}")
    return length


def _json(text: memoryview) -> Any:
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are ValueErrors too
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise RequestError(f"the request is not JSON: {reason}") from None


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{what}: got {_shown(value)}, wanted an object")
    return value


def _list(content: Mapping[str, Any], name: str) -> list[Any]:
    value = content.get(name)
    if not isinstance(value, list):
        raise RequestError(f"{name}: got {_shown(value)}, wanted a list")
    return value


def _shape(value: object, served: Served) -> tuple[int, ...]:
    wanted = ", ".join(map(str, served.image_shape))
    numbers = value if isinstance(value, list) and all(type(length) is int for length in value) else []
    if tuple(numbers[1:]) != served.image_shape or not 1 <= numbers[0] <= served.max_batch:
        raise RequestError(f"{INPUT}.shape: got {_shown(value)}, wanted [N, {wanted}], N from 1 to {served.max_batch}")
    return tuple(numbers)


def _pixels(tensor: Mapping[str, Any], shape: tuple[int, ...], rest: memoryview) -> Pixels:
    size = _object(tensor.get("parameters", {}), f"{INPUT}.parameters").get("binary_data_size")
    if size is None:
        if len(rest):
            raise RequestError(f"{len(rest):,} bytes follow the JSON, and {INPUT} has no binary_data_size")
        return _from_numbers(tensor.get("data"), shape)
    if "data" in tensor:
        raise RequestError(f"{INPUT}: got data and binary_data_size, wanted one of them")
    if type(size) is not int or size != prod(shape) or size != len(rest):
        raise RequestError(
            f"{INPUT}.parameters.binary_data_size: got {_shown(size)} and {len(rest):,} bytes behind the JSON, wanted"
            f" {prod(shape)} for its shape"
        )
    return np.frombuffer(rest, dtype=np.uint8).reshape(shape)


def _from_numbers(data: object, shape: tuple[int, ...]) -> Pixels:
    """Flat or nested lists of whole numbers, as the protocol allows both."""
    if not isinstance(data, list):
        raise RequestError(f"{INPUT}.data: got {_shown(data)}, wanted a list of numbers, or binary_data_size")
    found = np.empty(0)
    # One look first: of texts numpy would make an array as wide as the longest, a thousand times the body's size.
    if _holds_whole_numbers(data, most=prod(shape)):
        with contextlib.suppress(ValueError, OverflowError):  # lists of different lengths, numbers beyond 64 bits
            found = np.array(data)
    if found.dtype.kind not in "iu" or found.size != prod(shape) or found.shape not in (shape, (prod(shape),)):
        raise RequestError(f"{INPUT}.data: wanted {prod(shape)} whole numbers, flat or nested as its shape is")
    if found.min() < 0 or found.max() > 255:
        raise RequestError(f"{INPUT}.data: got {found.min()} to {found.max()}, wanted 0 to 255")
    return found.astype(np.uint8).reshape(shape)


def _holds_whole_numbers(data: list[Any], *, most: int) -> bool:
    """Whether there are, in lists as deep as an image's or flat, `most` whole numbers at the most and nothing else."""
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
        raise RequestError(f"outputs: got {len(outputs)}, wanted {OUTPUT} alone")
    output = _object(outputs[0], "outputs[0]")
    if output.get("name") != OUTPUT:
        raise RequestError(f"outputs[0].name: got {_shown(output.get('name'))}, wanted '{OUTPUT}'")
    parameters = _object(output.get("parameters", {}), f"{OUTPUT}.parameters")
    for name in parameters:
        if name != "binary_data":
            raise RequestError(f"{OUTPUT}.parameters: '{name[:40]}' is not served; wanted binary_data alone")
    return _switch(parameters.get("binary_data", everything), f"{OUTPUT}.parameters.binary_data")


def _switch(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{what}: got {_shown(value)}, wanted true or false")
    return value


def _shown(value: object) -> str:
    """A value in few characters of one line."""
    if value is None:
        return "nothing"
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
