"""The gRPC messages of the Open Inference Protocol: bytes to values and back, no network."""

import functools
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import DecodeError

from falconet.infer.predictor import Pixels, Scores
from falconet.serve import json_body, protocol
from falconet.serve.interface import descriptors
from falconet.serve.protocol import INPUT, OUTPUT, Asked, Served
from falconet.serve.refusals import RefusedError, RequestError, TooLargeError

SERVICE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
MOST_FIELDS = 100  # per request: a message of empty inputs takes 43 times its size when it is read
MOST_TYPED = protocol.MOST_JSON  # bytes in a request whose images are a list of numbers
RAW = 7  # the number of ModelInferRequest.raw_input_contents
VARINT, EIGHT, COUNTED, FOUR = 0, 1, 2, 5  # how a field is written
_CONTENTS = "uint_contents"  # the field for a tensor of bytes


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    """A descriptor pool of our own: the official client has the same names in the process's pool."""
    pool = descriptor_pool.DescriptorPool()
    for file in FileDescriptorSet.FromString(descriptors.read()).file:
        pool.Add(file)
    return pool


@functools.cache
def message(name: str, package: str = "inference") -> Any:
    """The class of a message; NotBuiltError if the interface is not compiled."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{package}.{name}"))


@functools.cache
def request_of(service: str, method: str) -> Any:
    """The class of the message that a method takes."""
    return message_factory.GetMessageClass(_pool().FindServiceByName(service).methods_by_name[method].input_type)


def parsed(kind: Any, body: bytes, *, most: int = json_body.MOST_REST) -> Any:
    """Parse a message."""
    if len(body) > most:
        raise TooLargeError(f"the request has {len(body):,} bytes without raw tensors, expected at most {most:,}")
    try:
        return kind.FromString(body)
    except DecodeError:
        raise RequestError(f"the request is not a {kind.DESCRIPTOR.name}") from None


class Split(NamedTuple):
    """A ModelInferRequest in two parts."""

    rest: bytes  # without raw tensors
    raw: list[memoryview]  # the raw tensors, as views: protobuf would copy them twice


def split(body: bytes) -> Split:
    """Find the raw tensors of a request."""
    whole, rest, raw = memoryview(body), bytearray(), list[memoryview]()
    for number, begin, value, end in _fields(body):
        if number == RAW:
            raw.append(whole[value:end])
        else:
            rest += whole[begin:end]
    return Split(bytes(rest), raw)


def read_message(sent: Split) -> Any:
    """The ModelInferRequest without raw tensors."""
    most = json_body.MOST_REST if sent.raw else MOST_TYPED
    return parsed(message("ModelInferRequest"), sent.rest, most=most)


def id_of(body: bytes) -> str:
    """The id of a refused request, if it can be read."""
    try:
        return str(read_message(split(body)).id)
    except RefusedError:
        return ""


def _fields(body: bytes) -> Iterator[tuple[int, int, int, int]]:
    """The number of each field in a message, and where the field, its value and its end are."""
    at = 0
    for _ in range(MOST_FIELDS):
        if at == len(body):
            return
        begin = at
        tag, at = _varint(body, at)
        kind, value = tag & 7, at
        if kind == COUNTED:
            length, value = _varint(body, at)
            at = value + length
        elif kind == VARINT:
            _, at = _varint(body, at)
        elif kind in (EIGHT, FOUR):
            at += 8 if kind == EIGHT else 4
        else:
            raise RequestError("the request is not a ModelInferRequest: it has groups, or other kinds of fields")
        if at > len(body):
            raise RequestError("the request is not a ModelInferRequest: it ends too early")
        yield (tag >> 3 if kind == COUNTED else 0), begin, value, at
    if at < len(body):
        raise RequestError(f"the request has more than {MOST_FIELDS} fields")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """A varint, with 7 bits per byte, and where it ends."""
    found = 0
    for shift in range(0, 70, 7):
        if at == len(body):
            break
        byte, at = body[at], at + 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
    raise RequestError("the request is not a ModelInferRequest")


def read_request(request: Any, raw: list[memoryview], served: Served) -> Asked:
    """Read what a request asks for."""
    if len(request.inputs) != 1:
        raise RequestError(f"inputs: got {len(request.inputs)}, expected only {INPUT}")
    (tensor,) = request.inputs
    shape = protocol.read_shape(tensor.name, tensor.datatype, list(tensor.shape), served)
    for name in tensor.parameters:
        if name.startswith("shared_memory"):
            raise RequestError(f"{INPUT}.parameters: shared memory is not supported; send the tensor")
    images = _from_raw(tensor, raw, shape) if raw else _from_numbers(tensor, shape)
    return Asked(
        images=images,
        id=request.id,
        binary=True,
        classes=_classes(request.outputs),
        seconds=protocol.read_seconds(_values(request.parameters)),
    )


def _from_raw(tensor: Any, raw: list[memoryview], shape: tuple[int, ...]) -> Pixels:
    if tensor.HasField("contents"):
        raise RequestError(f"{INPUT}: got both contents and raw_input_contents, expected one of them")
    if len(raw) != 1:
        raise RequestError(f"raw_input_contents: got {len(raw)}, expected one, of {INPUT}")
    if len(raw[0]) != prod(shape):
        raise RequestError(f"raw_input_contents: got {len(raw[0]):,} bytes, expected {prod(shape)} for its shape")
    return np.frombuffer(raw[0], dtype=np.uint8).reshape(shape)


def _from_numbers(tensor: Any, shape: tuple[int, ...]) -> Pixels:
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    if not filled:
        raise RequestError(f"{INPUT}.contents: got nothing, expected {_CONTENTS}, or raw_input_contents")
    if filled != [_CONTENTS]:
        raise RequestError(f"{INPUT}.contents: got {', '.join(filled)}, expected {_CONTENTS}")
    numbers = tensor.contents.uint_contents
    if len(numbers) == prod(shape):
        found = np.fromiter(numbers, dtype=np.uint32, count=len(numbers))
        if found.max() <= 255:
            return found.astype(np.uint8).reshape(shape)
    raise RequestError(f"{INPUT}.contents.{_CONTENTS}: expected {prod(shape)} integers from 0 to 255")


def _classes(outputs: Any) -> int:
    if not outputs:
        return 0
    protocol.require_output([output.name for output in outputs])
    return protocol.read_classes(_values(outputs[0].parameters))


def _values(parameters: Mapping[str, Any]) -> dict[str, object]:
    """The parameters' values, of any type."""
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], choice) if choice else None for name, choice in chosen.items()}


def write_answer(scores: Scores, asked: Asked, served: Served) -> Any:
    """The answer as a ModelInferResponse."""
    answer = message("ModelInferResponse")(model_name=served.name, model_version=served.version, id=asked.id or "")
    tensor = protocol.output_tensor(scores, asked, served)
    answer.outputs.add(name=OUTPUT, datatype=tensor.datatype, shape=tensor.shape)
    answer.raw_output_contents.append(tensor.raw())
    return answer
