"""The calls of Triton's gRPC service that a load test makes; grpcio carries their messages as plain bytes.

A client sends the same few messages all the time. They are encoded once, by the few lines here, so that its core
works for the connection rather than copying pixels between objects. The numbers of the fields are those of
`inference.GRPCInferenceService`.
"""

import socket
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

SERVICE = "/inference.GRPCInferenceService"
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for each channel
)
CONNECT_SECONDS = 10.0  # until a client gives up
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # how a field is encoded


class Model:
    """A model on a server."""

    def __init__(self, host: str, port: int, name: str) -> None:
        self._host, self._port, self._name = host, port, name
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def connect(self) -> None:
        """Connect; OSError if no server answers."""
        # A channel would try again and again, and not say why.
        socket.create_connection((self._host, self._port), timeout=CONNECT_SECONDS).close()
        try:
            grpc.channel_ready_future(self._channel).result(CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            raise OSError(f"port {self._port} does not speak gRPC") from None

    def close(self) -> None:
        self._channel.close()

    def infer(self, message: bytes, *, seconds: float) -> bytes:
        return self._call("ModelInfer", message, seconds=seconds)

    def metadata(self, *, seconds: float) -> dict[str, Any]:
        """The fields that a load test reads from the answer to GET /v2/models/NAME over HTTP."""
        answer = list(fields(self._call("ModelMetadata", field(1, self._name.encode()), seconds=seconds)))
        return {
            name: [_tensor(value) for number, value in answer if number == field]
            for name, field in (("inputs", 4), ("outputs", 5))
        }

    def statistics(self, *, seconds: float) -> dict[str, Any]:
        """The fields that a load test reads from the answer to GET /v2/models/NAME/stats."""
        answer = fields(self._call("ModelStatistics", field(1, self._name.encode()), seconds=seconds))
        found = [dict(fields(value)) for number, value in answer if number == 1]
        return {"model_stats": [{"inference_count": one.get(4, 0), "execution_count": one.get(5, 0)} for one in found]}

    def _call(self, method: str, message: bytes, *, seconds: float) -> bytes:
        try:
            answer: bytes = self._channel.unary_unary(f"{SERVICE}/{method}")(message, timeout=seconds)
        except grpc.RpcError as error:
            raise OSError(f"status {error.code().name}: {error.details()}") from None
        return answer


def request(model: str, pixels: npt.NDArray[np.uint8], *, input: str, output: str) -> bytes:
    """A ModelInferRequest with one tensor; `input` and `output` are the model's tensor names."""
    tensor = field(1, input.encode()) + field(2, b"UINT8") + field(3, b"".join(map(varint, pixels.shape)))
    return (
        field(1, model.encode()) + field(5, tensor) + field(6, field(1, output.encode())) + field(7, pixels.tobytes())
    )


def output(answer: bytes) -> tuple[dict[str, Any], bytes]:
    """The only tensor of a ModelInferResponse: its name, datatype and shape, and its bytes."""
    found = list(fields(answer))
    (described,) = (_tensor(value) for number, value in found if number == 5)
    (raw,) = (value for number, value in found if number == 6)
    return described, raw


def _tensor(message: bytes) -> dict[str, Any]:
    """The name, datatype and shape of a tensor, whose fields have the same numbers in every message."""
    found = list(fields(message))
    named = {number: value.decode() for number, value in found if number in (1, 2)}
    shape = [size for number, value in found if number == 3 for size in _sizes(value)]
    return {"name": named.get(1, ""), "datatype": named.get(2, ""), "shape": shape}


def _sizes(value: bytes | int) -> Iterable[int]:
    """Repeated numbers, packed or one by one (both are valid); -1 is a large unsigned number."""
    numbers = [value] if isinstance(value, int) else _varints(value)
    return (number - (1 << 64) if number >> 63 else number for number in numbers)


def field(number: int, value: bytes) -> bytes:
    """A field of bytes, text, packed numbers or another message."""
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def varint(number: int) -> bytes:
    """A number as seven bits per byte, lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a message's fields: int or bytes."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"field {key >> 3} of a gRPC message has encoding {kind}, which is unknown")
        if at + length > len(message):
            raise ValueError("a gRPC message is cut off")
        yield key >> 3, message[at : at + length]
        at += length


def _varints(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        number, at = _read_varint(packed, at)
        yield number


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(message):
        byte, at = message[at], at + 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise ValueError("a gRPC message is cut off")
