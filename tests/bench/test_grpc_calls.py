"""Messages of the gRPC service against protobuf's own reading and writing of Triton's published schema."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from google.protobuf import unknown_fields
from tritonclient.grpc import service_pb2 as schema

from falconet.bench import grpc_calls
from served import LIMIT

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


@pytest.fixture
def answering():
    """A model on a server that gives this answer, and the messages that the server got."""
    servers, asked = [], []

    def begun(method, answer):
        def respond(message, context):
            asked.append(message)
            return answer.SerializeToString()

        handler = grpc.unary_unary_rpc_method_handler(respond)
        service = grpc.method_handlers_generic_handler(grpc_calls.SERVICE.lstrip("/"), {method: handler})
        server = grpc.server(ThreadPoolExecutor(1), handlers=[service])
        model = grpc_calls.Model("127.0.0.1", server.add_insecure_port("127.0.0.1:0"), "m")
        server.start()
        servers.append((server, model))
        return model, asked

    yield begun
    for server, model in servers:
        model.close()
        server.stop(None).wait()


def test_metadata_has_the_shape_of_the_answer_over_http(answering):
    answer = schema.ModelMetadataResponse(name="m", versions=["1", "2"], platform="p")
    answer.inputs.add(name="images", datatype="UINT8", shape=[-1, 224, 224, 3])
    answer.outputs.add(name="logits", datatype="FP32", shape=[-1, 1000])
    model, asked = answering("ModelMetadata", answer)
    assert model.metadata(seconds=LIMIT) == {
        "inputs": [{"name": "images", "datatype": "UINT8", "shape": [-1, 224, 224, 3]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 1000]}],
    }
    (message,) = asked
    assert schema.ModelMetadataRequest.FromString(message).name == "m"


def test_statistics_have_the_shape_of_the_answer_over_http(answering):
    answer = schema.ModelStatisticsResponse()
    answer.model_stats.add(name="m", version="1", last_inference=1 << 40, inference_count=300, execution_count=7)
    model, asked = answering("ModelStatistics", answer)
    expected = {"model_stats": [{"inference_count": 300, "execution_count": 7}]}
    assert model.statistics(seconds=LIMIT) == expected
    (message,) = asked
    assert schema.ModelStatisticsRequest.FromString(message).name == "m"


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
