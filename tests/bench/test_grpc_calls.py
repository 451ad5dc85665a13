"""Messages of the gRPC service against protobuf's own reading and writing of Triton's published schema."""

import numpy as np
import pytest
from google.protobuf import unknown_fields
from tritonclient.grpc import service_pb2 as schema

from falconet.bench import grpc_calls

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3, 300, 5), dtype=np.uint8)


def test_a_request_is_what_protobuf_reads():
    message = grpc_calls.request("résumé", PIXELS, input="input_0", output="output_0")
    found = schema.ModelInferRequest.FromString(message)
    (tensor,), (output,), (raw,) = found.inputs, found.outputs, found.raw_input_contents
    assert (found.model_name, tensor.name, tensor.datatype, output.name) == ("résumé", "input_0", "UINT8", "output_0")
    assert list(tensor.shape) == [2, 3, 300, 5]
    assert raw == PIXELS.tobytes()
    assert len(unknown_fields.UnknownFieldSet(found)) == 0


def test_an_answer_is_read_as_protobuf_wrote_it():
    """With fields of every kind beside those that are read."""
    written = schema.ModelInferResponse(model_name="m", model_version="1", id="x")
    written.parameters["fast"].bool_param = True
    written.parameters["share"].double_param = 0.5
    tensor = written.outputs.add(name="logits", datatype="FP16", shape=[2, 1000])
    tensor.parameters["n"].int64_param = -1
    raw = np.arange(2000, dtype=np.float16).tobytes()
    written.raw_output_contents.append(raw)
    described, found = grpc_calls.output(written.SerializeToString())
    assert described == {"name": "logits", "datatype": "FP16", "shape": [2, 1000]}
    assert found == raw


class Answering:
    """A model whose server's answers are given."""

    def __init__(self, monkeypatch, answer):
        self.asked = []

        def call(model, method, message, *, seconds):
            self.asked.append((method, message))
            return answer.SerializeToString()

        monkeypatch.setattr(grpc_calls.Model, "_call", call)
        self.model = grpc_calls.Model("127.0.0.1", 1, "m")


def test_metadata_has_the_shape_of_the_answer_over_http(monkeypatch):
    answer = schema.ModelMetadataResponse(name="m", versions=["1", "2"], platform="p")
    answer.inputs.add(name="images", datatype="UINT8", shape=[-1, 224, 224, 3])
    answer.outputs.add(name="logits", datatype="FP32", shape=[-1, 1000])
    answering = Answering(monkeypatch, answer)
    assert answering.model.metadata(seconds=1) == {
        "inputs": [{"name": "images", "datatype": "UINT8", "shape": [-1, 224, 224, 3]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 1000]}],
    }
    ((method, message),) = answering.asked
    assert (method, schema.ModelMetadataRequest.FromString(message).name) == ("ModelMetadata", "m")
    answering.model.close()


def test_statistics_have_the_shape_of_the_answer_over_http(monkeypatch):
    answer = schema.ModelStatisticsResponse()
    answer.model_stats.add(name="m", version="1", last_inference=1 << 40, inference_count=300, execution_count=7)
    answering = Answering(monkeypatch, answer)
    expected = {"model_stats": [{"inference_count": 300, "execution_count": 7}]}
    assert answering.model.statistics(seconds=1) == expected
    ((method, message),) = answering.asked
    assert (method, schema.ModelStatisticsRequest.FromString(message).name) == ("ModelStatistics", "m")
    answering.model.close()


def test_numbers_that_are_not_packed_are_read_too():
    """Both encodings of repeated numbers are valid."""
    one_by_one = b"".join(grpc_calls.varint(3 << 3) + grpc_calls.varint(size) for size in (2, 1000))
    answer = grpc_calls.field(5, grpc_calls.field(1, b"y") + one_by_one) + grpc_calls.field(6, b"")
    assert grpc_calls.output(answer)[0]["shape"] == [2, 1000]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"\x2a\x05ab", "cut off"),
        (b"\x2a\x80", "cut off"),
        (b"\x33", "field 6 of a gRPC message has encoding 3"),
        (b"", "not enough values"),
    ],
)
def test_a_broken_answer_is_an_error(message, words):
    with pytest.raises(ValueError, match=words):
        grpc_calls.output(message)
