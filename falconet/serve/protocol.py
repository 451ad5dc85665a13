"""The Open Inference Protocol (v2), with Triton's binary tensors and classes: bytes to values and back, no network."""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

import falconet
from falconet.data.preprocessing import Preprocessing
from falconet.infer.prediction import Activation
from falconet.infer.predictor import Pixels, Scores
from falconet.serve import json_body
from falconet.serve.batching import Counts, Spent
from falconet.serve.refusals import RequestError

INPUT, OUTPUT = "input_0", "output_0"
HEADER = "Inference-Header-Content-Length"  # gives the bytes of JSON before the binary tensors
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
AT_ONCE = 4 << 10  # bytes of JSON, or scores to write as JSON, up to which no other thread is needed
REPEATED, MOST_REPEATED = 256, 1 << 10  # requests whose JSON is remembered, and the most bytes of each
MOST_JSON = 4 << 20  # bytes in a request whose images are text
MOST_MICROSECONDS = (1 << 64) - 1  # in a timeout: the largest that Triton reads
SHOWN = 40  # characters of a client's value in an error
_DATATYPES = {"float16": "FP16", "float32": "FP32"}


@dataclass(frozen=True, kw_only=True)
class Served:
    """What clients can learn about the model."""

    name: str
    version: str = "1"  # a number: the epoch of a run's checkpoint
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    output: str  # numpy's name for the dtype of the scores
    max_batch: int
    activation: Activation = "softmax"  # turns scores into probabilities

    def __hash__(self) -> int:
        return hash((self.name, self.version))  # 1,000 class names take longer, and these tell models apart as well

    @property
    def image_shape(self) -> tuple[int, int, int]:
        side = self.preprocessing.image_size
        return (3, side, side)

    @property
    def most_binary(self) -> int:
        """The longest request body with a binary tensor, in bytes."""
        return json_body.MOST_REST + self.max_batch * prod(self.image_shape)

    @property
    def most_bytes(self) -> int:
        """The longest request body of any kind."""
        return max(MOST_JSON, self.most_binary)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A valid inference request."""

    images: Pixels  # a view of the body if it is binary
    id: str | None
    binary: bool  # whether to answer with a binary tensor
    classes: int = 0  # how many of the best classes to name; 0: answer with all scores
    seconds: float | None = None  # until the request is late


class Tensor(NamedTuple):
    """The tensor in an answer: scores, or the best classes in words."""

    datatype: str
    shape: tuple[int, ...]
    values: Scores | list[bytes]

    def raw(self) -> bytes:
        """The values as little-endian numbers, or as texts, each after its length."""
        if isinstance(self.values, list):
            return b"".join(len(text).to_bytes(4, "little") + text for text in self.values)
        return self.values.astype(self.values.dtype.newbyteorder("<"), copy=False).tobytes()

    def data(self) -> str:
        """The values as one JSON list."""
        if isinstance(self.values, list):
            return json.dumps([text.decode() for text in self.values])
        return _numbers(self.values)


def output_tensor(scores: Scores, asked: Asked, served: Served) -> Tensor:
    """The tensor that a request asked for."""
    if not asked.classes:
        return Tensor(_DATATYPES[served.output], scores.shape, scores)
    best = np.argsort(-scores, axis=1, kind="stable")[:, : asked.classes]  # nan last; ties in order
    texts = [
        f"{row[number]:f}:{number}:{served.class_names[number]}".encode()
        for row, numbers in zip(scores, best.tolist(), strict=True)
        for number in numbers
    ]
    return Tensor("BYTES", best.shape, texts)


class _Head(NamedTuple):
    """The JSON of a request."""

    tensor: Mapping[str, Any]  # the only input
    shape: tuple[int, ...]  # the input's
    id: str | None
    binary: bool
    classes: int
    seconds: float | None


def read_request(body: memoryview, header: str | None, served: Served) -> Asked:
    """Parse a request body; `header` is the value, if sent, of the header that gives the length of the JSON."""
    length = _json_length(header, body)
    text = body[:length]
    head = _repeated_head(bytes(text), served) if length <= MOST_REPEATED else _read_head(text, served)
    return Asked(
        images=_pixels(head.tensor, head.shape, body[length:]),
        id=head.id,
        binary=head.binary,
        classes=head.classes,
        seconds=head.seconds,
    )


def _read_head(text: memoryview | bytes, served: Served) -> _Head:
    content = _object(_json(memoryview(text)), "the request")
    inputs = _list(content, "inputs")
    if len(inputs) != 1:
        raise RequestError(f"inputs: got {len(inputs)}, expected only {INPUT}")
    tensor = _object(inputs[0], "inputs[0]")
    shape = read_shape(tensor.get("name"), tensor.get("datatype"), tensor.get("shape"), served)
    named = content.get("id")
    if named is not None and not isinstance(named, str):
        raise RequestError(f"id: got {_shown(named)}, expected a string")
    parameters = _object(content.get("parameters", {}), "parameters")
    everything = parameters.get("binary_data_output", False)
    wished: Mapping[str, Any] = {}
    outputs = _list(content, "outputs") if "outputs" in content else []
    if outputs:
        named_outputs = [_object(output, f"outputs[{number}]") for number, output in enumerate(outputs)]
        require_output([output.get("name") for output in named_outputs])
        wished = _object(named_outputs[0].get("parameters", {}), f"{OUTPUT}.parameters")
    at = f"{OUTPUT}.parameters.binary_data" if "binary_data" in wished else "parameters.binary_data_output"
    return _Head(
        tensor,
        shape,
        id=named,
        binary=_switch(wished.get("binary_data", everything), at),
        classes=read_classes(wished, known=("binary_data",)),
        seconds=read_seconds(parameters),
    )


# A client's requests mostly differ only in their pixels: this saves 20 microseconds for each but the first.
_repeated_head = functools.lru_cache(REPEATED)(_read_head)


def write_answer(scores: Scores, asked: Asked, served: Served) -> tuple[bytes, dict[str, str]]:
    """Encode an answer: its body and its headers."""
    tensor = output_tensor(scores, asked, served)
    if not asked.binary:
        before = _head(served, asked.id, tensor.datatype, tensor.shape).removesuffix("}]}")  # output, outputs, answer
        return f'{before}, "data": {tensor.data()}}}]}}'.encode(), {"Content-Type": "application/json"}
    raw = tensor.raw()
    head = _head(served, asked.id, tensor.datatype, tensor.shape, len(raw)).encode()
    return head + raw, {"Content-Type": "application/octet-stream", HEADER: str(len(head))}


@functools.lru_cache(REPEATED)
def _head(
    served: Served, named: str | None, datatype: str, shape: tuple[int, ...], binary_size: int | None = None
) -> str:
    """The JSON of an answer, without its data."""
    output: dict[str, object] = {"name": OUTPUT, "datatype": datatype, "shape": list(shape)}
    if binary_size is not None:
        output["parameters"] = {"binary_data_size": binary_size}
    content = {"model_name": served.name, "model_version": served.version, "outputs": [output]}
    return json.dumps(content if named is None else {"id": named, **content})


def _numbers(scores: Scores) -> str:
    """All scores as one list, with null for nan and inf: JSON has neither, and Python's spelling breaks strict parsers.

    They are encoded row by row: the encoder holds the GIL, and other threads run between rows.
    """
    rows = (
        [value if is_number else None for value, is_number in zip(row.tolist(), np.isfinite(row).tolist(), strict=True)]
        for row in scores
    )
    return f"[{', '.join(json.dumps(row, allow_nan=False)[1:-1] for row in rows)}]"


def server_metadata() -> dict[str, object]:
    """The answer to GET /v2."""
    return {"name": "falconet", "version": falconet.__version__, "extensions": list(EXTENSIONS)}


def metadata(served: Served) -> dict[str, object]:
    """The answer to GET /v2/models/NAME; `parameters` has the class names and the preprocessing."""
    shape = [-1, *served.image_shape]
    return {
        "name": served.name,
        "versions": [served.version],
        "platform": "falconet_pytorch",
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": shape}],
        "outputs": [{"name": OUTPUT, "datatype": _DATATYPES[served.output], "shape": [-1, len(served.class_names)]}],
        "parameters": {
            "max_batch_size": served.max_batch,
            "class_names": list(served.class_names),
            "probabilities": served.activation,
            "preprocessing": served.preprocessing.to_json(),
        },
    }


def configuration(served: Served, *, max_delay: float) -> dict[str, object]:
    """A model's Triton configuration, which Triton's load generator reads. `max_delay` is in seconds."""
    output = f"TYPE_{_DATATYPES[served.output]}"
    return {
        "name": served.name,
        "platform": "falconet_pytorch",
        "backend": "falconet",
        "max_batch_size": served.max_batch,
        "input": [{"name": INPUT, "data_type": "TYPE_UINT8", "dims": list(served.image_shape)}],
        "output": [{"name": OUTPUT, "data_type": output, "dims": [len(served.class_names)]}],
        "dynamic_batching": {"max_queue_delay_microseconds": round(max_delay * 1e6)},
    }


def statistics(served: Served, counts: Counts, spent: Spent) -> dict[str, object]:
    """A model's statistics, as Triton counts and as we do."""

    def duration(count: int, seconds: float = 0.0) -> dict[str, int]:
        return {"count": count, "ns": round(seconds * 1e9)}

    return {
        "name": served.name,
        "version": served.version,
        "last_inference": round(spent.last * 1000),
        "inference_count": counts.images,
        "execution_count": counts.executions,
        "inference_stats": {
            "success": duration(counts.requests, spent.queued + spent.computed),
            "fail": duration(counts.failed + counts.late + counts.refused, spent.failed),
            "queue": duration(counts.requests, spent.queued),
            "compute_input": duration(counts.requests),  # copying is part of the computation here
            "compute_infer": duration(counts.requests, spent.computed),
            "compute_output": duration(counts.requests),
            "cache_hit": duration(0),
            "cache_miss": duration(0),
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": duration(batches.count),
                "compute_infer": duration(batches.count, batches.seconds),
                "compute_output": duration(batches.count),
            }
            for size, batches in sorted(spent.by_size.items())
        ],
        "falconet": asdict(counts),
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
        raise RequestError(f"{HEADER}: got '{header[:SHOWN]}', expected 1 to {len(body):,}, the length of the body")
    return length


def _json(text: memoryview) -> Any:
    try:
        return json_body.loads(text)
    except ValueError as error:
        raise RequestError(f"the request's JSON: {' '.join(str(error).split())}") from None


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{what}: got {_shown(value)}, expected an object")
    return value


def _list(content: Mapping[str, Any], name: str) -> list[Any]:
    value = content.get(name)
    if not isinstance(value, list):
        raise RequestError(f"{name}: got {_shown(value)}, expected a list")
    return value


def read_shape(name: object, datatype: object, value: object, served: Served) -> tuple[int, ...]:
    """The shape of the only input."""
    if name != INPUT:
        raise RequestError(f"inputs[0].name: got {_shown(name)}, expected '{INPUT}'")
    if datatype != "UINT8":
        raise RequestError(f"{INPUT}.datatype: got {_shown(datatype)}, expected 'UINT8'")
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
    """Read a flat or nested list of integers; the protocol allows both."""
    if data is None:
        raise RequestError(f"{INPUT}.data: got nothing, expected a list of numbers, or binary_data_size")
    found = data.pixels(shape) if isinstance(data, json_body.Numbers) else None
    if found is None or found.max() > 255:
        raise RequestError(
            f"{INPUT}.data: expected {prod(shape)} integers from 0 to 255, flat or nested like its shape"
        )
    return found.astype(np.uint8).reshape(shape)


def require_output(names: list[Any]) -> None:
    """Refuse a request for any output but the only one."""
    if len(names) != 1:
        raise RequestError(f"outputs: got {len(names)}, expected only {OUTPUT}")
    if names != [OUTPUT]:
        raise RequestError(f"outputs[0].name: got {_shown(names[0])}, expected '{OUTPUT}'")


def read_classes(parameters: Mapping[str, Any], *, known: tuple[str, ...] = ()) -> int:
    """How many classes the output's parameters ask for; `known`: other parameters that they may have."""
    for name in parameters:
        if name not in ("classification", *known):
            expected = " and ".join(("classification", *known))
            raise RequestError(f"{OUTPUT}.parameters: {_shown(name)} is not supported; expected only {expected}")
    return _whole(parameters.get("classification", 0), f"{OUTPUT}.parameters.classification")


def read_seconds(parameters: Mapping[str, Any]) -> float | None:
    """The time limit that a request sets itself, in seconds; `timeout` is in microseconds, and 0 means none."""
    microseconds = _whole(parameters.get("timeout", 0), "parameters.timeout")
    if microseconds > MOST_MICROSECONDS:
        raise RequestError(f"parameters.timeout: got {_shown(microseconds)}, expected at most {MOST_MICROSECONDS:,}")
    return microseconds / 1e6 or None


def _whole(value: object, what: str) -> int:
    if type(value) is not int or value < 0:
        raise RequestError(f"{what}: got {_shown(value)}, expected a whole number, at least 0")
    return value


def _switch(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{what}: got {_shown(value)}, expected true or false")
    return value


def _shown(value: object) -> str:
    """A value as JSON, which has no control characters, shortened."""
    if value is None:
        return "nothing"
    text = json.dumps(value, default=lambda _: "a list of numbers")
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
