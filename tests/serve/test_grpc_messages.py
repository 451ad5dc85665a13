"""gRPC's messages without a network: requests, answers, and one line for every mistake."""

import contextlib

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as published

from falconet.serve import grpc_messages
from falconet.serve.grpc_messages import (
    MOST_FIELDS,
    MOST_TYPED,
    parsed,
    read_message,
    read_request,
    split,
    write_answer,
)
from falconet.serve.json_body import MOST_REST
from falconet.serve.protocol import Asked
from falconet.serve.refusals import RefusedError, RequestError, TooLargeError
from grpc_requests import IMAGE, REQUESTS, parameter, request
from served import CLASSES, NAME, SIDE, about, pixels

SERVED = about(max_batch=4)


def read(message):
    sent = split(message.SerializeToString())
    return read_request(read_message(sent), sent.raw, SERVED)


def test_a_raw_tensor_is_a_view_of_the_message():
    images = pixels(3)
    asked = read(request(tensor={"shape": [3, 3, SIDE, SIDE]}, raw=[images.tobytes()], id="x"))
    assert np.array_equal(asked.images, images)
    assert not asked.images.flags.owndata
    assert (asked.id, asked.binary, asked.classes, asked.seconds) == ("x", True, 0, None)


def test_numbers_are_read():
    images = pixels(2)
    contents = {"uint_contents": images.ravel().tolist()}
    asked = read(request(raw=[], tensor={"shape": [2, 3, SIDE, SIDE], "contents": contents}))
    assert np.array_equal(asked.images, images)


def test_classes_and_time_are_read():
    outputs = [{"name": "output_0", "parameters": {"classification": parameter(3)}}]
    unsigned = published.InferParameter(uint64_param=2_000_000)
    for timeout in (parameter(2_000_000), unsigned):
        asked = read(request(outputs=outputs, parameters={"timeout": timeout, "priority": parameter(1)}))
        assert (asked.classes, asked.seconds) == (3, 2.0)


def test_fields_that_are_not_known_are_skipped():
    body = request().SerializeToString()
    later = b"\x98\x06\x05" + b"\xa2\x06\x03abc" + b"\xad\x06\x01\x02\x03\x04" + b"\xb1\x06" + b"12345678"
    sent = split(later + body + later)
    assert read_request(read_message(sent), sent.raw, SERVED).images.shape == (1, 3, SIDE, SIDE)


SHAPE = f"expected [N, 3, {SIDE}, {SIDE}], N from 1 to 4"
TYPED = {"raw": []}
MISTAKES = {
    "no inputs": ({"inputs": []}, "inputs: got 0, expected only input_0"),
    "two inputs": ({"inputs": [{}, {}]}, "inputs: got 2, expected only input_0"),
    "another name": ({"tensor": {"name": "x"}}, "inputs[0].name: got \"x\", expected 'input_0'"),
    "another type": ({"tensor": {"datatype": "FP32"}}, "input_0.datatype: got \"FP32\", expected 'UINT8'"),
    "no shape": ({"tensor": {"shape": []}}, f"input_0.shape: got [], {SHAPE}"),
    "a negative shape": ({"tensor": {"shape": [-1, 3, SIDE, SIDE]}}, SHAPE),
    "too many images": ({"tensor": {"shape": [5, 3, SIDE, SIDE]}}, SHAPE),
    "a huge shape": ({"tensor": {"shape": [1 << 60] * 4}}, SHAPE),
    "a long shape": ({"tensor": {"shape": [1] * 1000}}, SHAPE),
    "too few bytes": ({"raw": [b"x"]}, f"raw_input_contents: got 1 bytes, expected {IMAGE} for its shape"),
    "no bytes": ({"raw": [b""]}, f"raw_input_contents: got 0 bytes, expected {IMAGE} for its shape"),
    "two raw tensors": ({"raw": [bytes(IMAGE)] * 2}, "raw_input_contents: got 2, expected one, of input_0"),
    "two kinds of contents": (
        {"tensor": {"contents": {"uint_contents": [1]}}},
        "input_0: got both contents and raw_input_contents, expected one of them",
    ),
    "no contents": (TYPED, "input_0.contents: got nothing, expected uint_contents, or raw_input_contents"),
    "contents of another type": (
        TYPED | {"tensor": {"contents": {"int_contents": [1] * IMAGE}}},
        "input_0.contents: got int_contents, expected uint_contents",
    ),
    "contents of two types": (
        TYPED | {"tensor": {"contents": {"uint_contents": [1] * IMAGE, "bytes_contents": [b"x"]}}},
        "input_0.contents: got uint_contents, bytes_contents, expected uint_contents",
    ),
    "too few numbers": (
        TYPED | {"tensor": {"contents": {"uint_contents": [1]}}},
        f"input_0.contents.uint_contents: expected {IMAGE} integers from 0 to 255",
    ),
    "a number above 255": (
        TYPED | {"tensor": {"contents": {"uint_contents": [1] * (IMAGE - 1) + [256]}}},
        f"input_0.contents.uint_contents: expected {IMAGE} integers from 0 to 255",
    ),
    "shared memory": (
        {"tensor": {"parameters": {"shared_memory_region": parameter("x")}}},
        "input_0.parameters: shared memory is not supported",
    ),
    "another output": ({"outputs": [{"name": "x"}]}, "outputs[0].name: got \"x\", expected 'output_0'"),
    "two outputs": ({"outputs": [{}, {}]}, "outputs: got 2, expected only output_0"),
    "another parameter of the output": (
        {"outputs": [{"name": "output_0", "parameters": {"binary_data": parameter(True)}}]},
        'output_0.parameters: "binary_data" is not supported; expected only classification',
    ),
    "classes in words": (
        {"outputs": [{"name": "output_0", "parameters": {"classification": parameter("3")}}]},
        'output_0.parameters.classification: got "3", expected a whole number, at least 0',
    ),
    "classes that are not set": (
        {"outputs": [{"name": "output_0", "parameters": {"classification": {}}}]},
        "output_0.parameters.classification: got nothing, expected a whole number",
    ),
    "a fraction of a microsecond": (
        {"parameters": {"timeout": parameter(0.5)}},
        "parameters.timeout: got 0.5, expected a whole number, at least 0",
    ),
    "a negative time": ({"parameters": {"timeout": parameter(-1)}}, "parameters.timeout: got -1, expected"),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_is_refused_in_one_line(changes, message):
    with pytest.raises(RequestError) as error:
        read(request(**changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


BROKEN = {
    "a length beyond the end": b"\x3a\x7f",
    "no length": b"\x3a",
    "an endless number": b"\xff" * 20,
    "a group": b"\x0b\x0c",
    "a kind that does not exist": b"\x0f",
    "four bytes that are three": b"\x0d\x01\x02\x03",
    "text that is not UTF-8": b"\x0a\x02\xff\xfe",
    "an input that is cut": b"\x2a\x02\x0a\x05",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_what_is_not_a_message_is_refused(body):
    with pytest.raises(RequestError, match="the request is not a ModelInferRequest"):
        read_message(split(body))


def test_a_message_with_very_many_fields_is_refused_before_it_is_parsed():
    """2 million empty inputs in 4 MB take 172 MB when protobuf reads them."""
    with pytest.raises(RequestError, match=f"the request has more than {MOST_FIELDS} fields"):
        split(b"\x2a\x00" * (MOST_FIELDS + 1))
    assert len(read_message(split(b"\x2a\x00" * MOST_FIELDS)).inputs) == MOST_FIELDS


def test_a_message_without_its_tensors_is_limited():
    with pytest.raises(TooLargeError, match=f"bytes without raw tensors, expected at most {MOST_REST:,}"):
        read(request(id="x" * MOST_REST))
    with pytest.raises(TooLargeError, match=f"bytes without raw tensors, expected at most {MOST_TYPED:,}"):
        read(request(raw=[], id="x" * MOST_TYPED))
    with pytest.raises(TooLargeError):
        parsed(grpc_messages.message("ServerLiveRequest"), bytes(MOST_REST + 1))


@settings(max_examples=300, deadline=None)
@given(message=REQUESTS)
def test_any_request_is_accepted_or_refused(message):
    with contextlib.suppress(RefusedError):
        asked = read(message)
        assert asked.images.shape[1:] == (3, SIDE, SIDE)
        assert asked.images.tobytes() in (*message.raw_input_contents, bytes([7] * IMAGE), bytes([7] * 2 * IMAGE))


@settings(max_examples=300, deadline=None)
@given(message=REQUESTS, at=st.integers(0, 60), cut=st.integers(0, 5), new=st.binary(max_size=4))
def test_a_request_is_split_exactly_when_it_is_one(message, at, cut, new):
    """It is compared with protobuf's own parser."""
    body = message.SerializeToString()
    body = body[:at] + new + body[at + cut :]
    try:
        expected = published.ModelInferRequest.FromString(body)
    except DecodeError:
        expected = None
    refused = ""
    try:
        sent = split(body)
        found = read_message(sent)
    except RefusedError as error:
        refused = str(error)
    if refused:
        assert expected is None or "groups" in refused  # which protobuf would skip
        return
    assert expected is not None
    assert [bytes(each) for each in sent.raw] == list(expected.raw_input_contents)
    del expected.raw_input_contents[:]
    assert found.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=80))
def test_random_bytes_are_refused(body):
    with contextlib.suppress(RefusedError):
        sent = split(body)
        read_request(read_message(sent), sent.raw, SERVED)
        raise AssertionError("accepted")


def test_an_answer_contains_the_scores():
    scores = np.arange(2 * CLASSES).reshape(2, CLASSES).astype(np.float32) / 3
    made = write_answer(scores, Asked(images=pixels(2), id="x", binary=True), SERVED)
    found = published.ModelInferResponse.FromString(made.SerializeToString())
    assert (found.model_name, found.model_version, found.id) == (NAME, "1", "x")
    (output,) = found.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("output_0", "FP32", [2, CLASSES])
    assert not output.HasField("contents")
    assert found.raw_output_contents == [scores.tobytes()]
