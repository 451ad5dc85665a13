"""The protocol without a network: requests, answers, and one line for every mistake."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falconet.serve.batching import Batches, Counts, Spent
from falconet.serve.json_body import MOST_REST
from falconet.serve.protocol import (
    HEADER,
    Asked,
    configuration,
    metadata,
    read_request,
    statistics,
    write_answer,
)
from falconet.serve.refusals import RequestError
from served import CLASSES, SIDE, about, binary, pixels

SERVED = about(max_batch=4)
IMAGE = 3 * SIDE * SIDE


def read(content, rest=b"", header=None):
    text = (
        content
        if isinstance(content, bytes)
        else (content if isinstance(content, str) else json.dumps(content)).encode()
    )
    return read_request(memoryview(text + rest), header or (str(len(text)) if rest else None), SERVED)


def tensor(**changes):
    whole = {"name": "input_0", "shape": [1, 3, SIDE, SIDE], "datatype": "UINT8", "data": [7] * IMAGE} | changes
    return {key: value for key, value in whole.items() if value is not None}


def test_a_binary_tensor_is_a_view_of_the_body():
    images = pixels(3)
    body, headers = binary(images)
    asked = read_request(memoryview(body), headers[HEADER], SERVED)
    assert np.array_equal(asked.images, images)
    assert not asked.images.flags.owndata
    assert asked.binary
    assert asked.id is None


@pytest.mark.parametrize("nested", [False, True])
def test_numbers_are_read_flat_and_nested(nested):
    images = pixels(2)
    data = images.tolist() if nested else images.ravel().tolist()
    asked = read({"id": "x", "inputs": [tensor(shape=[2, 3, SIDE, SIDE], data=data)]})
    assert np.array_equal(asked.images, images)
    assert (asked.id, asked.binary) == ("x", False)


def image_of(**changes):
    return {"inputs": [tensor(**changes)]}


SPELLINGS = {
    "compact": lambda content: json.dumps(content, separators=(",", ":")),
    "spaced": json.dumps,
    "indented": lambda content: json.dumps(content, indent="\t"),
    "with data first": lambda content: json.dumps(content, sort_keys=True),
    "with other data before": lambda content: json.dumps({"parameters": {"data": [1, 2]}, **content}),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.integers(0, 255), min_size=IMAGE, max_size=IMAGE), nested=st.booleans())
def test_every_spelling_of_the_numbers_is_read(spelling, values, nested):
    images = np.array(values, dtype=np.uint8).reshape(1, 3, SIDE, SIDE)
    data = images.tolist() if nested else values
    assert np.array_equal(read(spelling({"inputs": [tensor(data=data)]})).images, images)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(1, 20), cut=st.integers(0, 3), new=st.text(alphabet="0123456789,[] -.e", max_size=3))
def test_numbers_are_accepted_exactly_when_they_are_json_of_the_shape(at, cut, new):
    """They are compared with the interpreter's own parser."""
    served = replace(SERVED, preprocessing=replace(SERVED.preprocessing, image_size=1, resize=1))
    text = "[[[[1]],[[20]],[[255]]]]" if at % 2 else "[1,20,255]"
    text = text[:at] + new + text[at + cut :]
    try:
        values = np.array(json.loads(text))
        fits = (
            values.shape in ((3,), (1, 3, 1, 1))
            and values.dtype.kind == "i"
            and 0 <= values.min() <= values.max() < 256
        )
    except ValueError:
        fits = False
    body = json.dumps(image_of(shape=[1, 3, 1, 1], data="HERE")).replace('"HERE"', text).encode()
    if fits:
        assert read_request(memoryview(body), None, served).images.ravel().tolist() == values.ravel().tolist()
    else:
        with pytest.raises(RequestError):
            read_request(memoryview(body), None, served)


OUTPUTS = {
    "none asked for": ({}, False),
    "an empty list": ({"outputs": []}, False),
    "all binary": ({"parameters": {"binary_data_output": True}}, True),
    "by name": ({"outputs": [{"name": "output_0"}]}, False),
    "by name, all binary": ({"outputs": [{"name": "output_0"}], "parameters": {"binary_data_output": True}}, True),
    "by name, binary": ({"outputs": [{"name": "output_0", "parameters": {"binary_data": True}}]}, True),
    "an output overrides the request": (
        {
            "outputs": [{"name": "output_0", "parameters": {"binary_data": False}}],
            "parameters": {"binary_data_output": True},
        },
        False,
    ),
}


@pytest.mark.parametrize(("more", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_request_chooses_json_or_binary_answers(more, expected):
    assert read({"inputs": [tensor()], **more}).binary is expected


def data_as(text):
    """A request whose data is this text."""
    return json.dumps(image_of(data="HERE")).replace('"HERE"', text).encode()


NESTED = json.dumps({"inputs": [tensor()], "parameters": "HERE"}).replace('"HERE"', "%s%s")
SIZE = f"expected {IMAGE} for its shape"
MISTAKES = {
    "not JSON": (b"{", "the request's JSON: Expecting property name"),
    "nothing": (b"", "the request's JSON: "),
    "not text": (b"\xff\xfe{", "the request's JSON: "),
    "deeply nested lists": (b"[" * 10_000, "the request's JSON: nested too deeply"),
    "a number of 5,000 digits": (b'{"inputs": ' + b"1" * 5000 + b"}", "the request's JSON: Exceeds the limit"),
    "a list": ([], "the request: got [], expected an object"),
    "no inputs": ({}, "inputs: got nothing, expected a list"),
    "two inputs": ({"inputs": [tensor(), tensor()]}, "inputs: got 2, expected only input_0"),
    "an input of text": ({"inputs": ["x"]}, 'inputs[0]: got "x", expected an object'),
    "another name": (image_of(name="x"), "inputs[0].name: got \"x\", expected 'input_0'"),
    "another type": (image_of(datatype="FP32"), "input_0.datatype: got \"FP32\", expected 'UINT8'"),
    "no shape": (image_of(shape=None), "input_0.shape: got nothing, expected [N, 3, 8, 8], N from 1 to 4"),
    "no image": (image_of(shape=[0, 3, 8, 8]), "input_0.shape: got [0, 3, 8, 8], expected"),
    "a negative number of images": (image_of(shape=[-1, 3, 8, 8]), "input_0.shape: got [-1, 3, 8, 8], expected"),
    "too many images": (image_of(shape=[5, 3, 8, 8]), "N from 1 to 4"),
    "a shape of booleans": (image_of(shape=[True, 3, 8, 8]), "input_0.shape: got [true, 3, 8, 8]"),
    "channels last": (image_of(shape=[1, 8, 8, 3]), "expected [N, 3, 8, 8]"),
    "a very long shape": (image_of(shape=[1] * 100), "input_0.shape: got [1, 1, 1"),
    "no data": (image_of(data=None), "input_0.data: got nothing, expected a list of numbers"),
    "too few numbers": (image_of(data=[1, 2]), f"input_0.data: expected {IMAGE} integers"),
    "ragged": (image_of(data=[[1], [2, 3]]), f"expected {IMAGE} integers"),
    "text": (image_of(data=["a"] * IMAGE), f"expected {IMAGE} integers"),
    "one long text among short ones": (image_of(data=["a" * 10_000, *["b"] * 100]), f"expected {IMAGE} integers"),
    "numbers and a text": (image_of(data=[7] * (IMAGE - 1) + ["a"]), f"expected {IMAGE} integers"),
    "lists in numbers": (image_of(data=[7] * (IMAGE - 1) + [[7]]), f"expected {IMAGE} integers"),
    "lists too deep": (image_of(data=[[[[[7]]]]] * IMAGE), f"expected {IMAGE} integers"),
    "fractions": (image_of(data=[0.5] * IMAGE), f"expected {IMAGE} integers"),
    "booleans": (image_of(data=[True] * IMAGE), f"expected {IMAGE} integers"),
    "huge": (image_of(data=[2**70] * IMAGE), f"expected {IMAGE} integers"),
    "below 0": (image_of(data=[-1] * IMAGE), f"input_0.data: expected {IMAGE} integers from 0 to 255"),
    "above 255": (image_of(data=[256] * IMAGE), f"expected {IMAGE} integers from 0 to 255"),
    "four digits": (image_of(data=[1000] * IMAGE), f"expected {IMAGE} integers from 0 to 255"),
    "a leading zero": (data_as("[" + "07," * (IMAGE - 1) + "7]"), f"expected {IMAGE} integers"),
    "white space in a number": (data_as("[" + "7," * (IMAGE - 2) + "7 7]"), f"expected {IMAGE} integers"),
    "a missing number": (data_as("[" + "7," * (IMAGE - 1) + "]"), f"expected {IMAGE} integers"),
    "a number outside": (data_as("7[" + "7," * (IMAGE - 1) + "]"), "the request's JSON: "),
    "a number after the list": (data_as("[" + "7," * (IMAGE - 1) + "]7"), "the request's JSON: "),
    "a number between rows": (
        data_as(str([[7] * 8] * 24).replace("[7, 7", "[7", 1).replace("], ", "]7, ", 1)),
        "integers",
    ),
    "an unclosed list": (data_as("[[" + "7," * (IMAGE - 1) + "7]"), "the request's JSON: "),
    "nan as data": (data_as("NaN"), "the request's JSON: NaN is not a number"),
    "nan beside the data": (data_as('[7], "x": NaN'), "the request's JSON: NaN is not a number"),
    "infinity": (data_as("Infinity"), "the request's JSON: Infinity is not a number"),
    "data elsewhere": (
        {"inputs": [tensor(data=None)], "data": [7] * IMAGE},
        "input_0.data: got nothing, expected a list of numbers",
    ),
    "much text": ({"id": "x" * MOST_REST, "inputs": [tensor()]}, "bytes besides the numbers of data, expected at most"),
    "deep parameters": (NESTED % ("[" * 900, "]" * 900), "the request's JSON: nested too deeply"),
    "objects in objects": (NESTED % ('{"a":' * 40, "1" + "}" * 40), "the request's JSON: nested too deeply"),
    "a name with control characters": (image_of(name="\x1b[31m\x00"), r'inputs[0].name: got "\u001b[31m\u0000"'),
    "a size without bytes": (
        image_of(data=None, parameters={"binary_data_size": IMAGE}),
        f"0 bytes after the JSON, {SIZE}",
    ),
    "two kinds of data": (image_of(parameters={"binary_data_size": IMAGE}), "got both data and binary_data_size"),
    "parameters of text": (image_of(parameters="x"), 'input_0.parameters: got "x", expected an object'),
    "an id of a number": ({"id": 3, "inputs": [tensor()]}, "id: got 3, expected a string"),
    "another output": (
        {"inputs": [tensor()], "outputs": [{"name": "x"}]},
        "outputs[0].name: got \"x\", expected 'output_0'",
    ),
    "outputs of text": ({"inputs": [tensor()], "outputs": "x"}, 'outputs: got "x", expected a list'),
    "two outputs": ({"inputs": [tensor()], "outputs": [{}, {}]}, "outputs: got 2, expected only output_0"),
    "two outputs of the same name": (
        {"inputs": [tensor()], "outputs": [{"name": "output_0"}] * 2},
        "outputs: got 2, expected only output_0",
    ),
    "another parameter of the output": (
        {"inputs": [tensor()], "outputs": [{"name": "output_0", "parameters": {"shared_memory_region": "x"}}]},
        'output_0.parameters: "shared_memory_region" is not supported; expected only classification and binary_data',
    ),
    **{
        f"{value!r} classes": (
            {"inputs": [tensor()], "outputs": [{"name": "output_0", "parameters": {"classification": value}}]},
            f"output_0.parameters.classification: got {shown}, expected a whole number, at least 0",
        )
        for value, shown in ((-1, "-1"), (2.5, "2.5"), ("2", '"2"'), (True, "true"), (None, "nothing"))
    },
    **{
        f"{value!r} microseconds": (
            {"inputs": [tensor()], "parameters": {"timeout": value}},
            f"parameters.timeout: got {shown}, expected a whole number, at least 0",
        )
        for value, shown in ((-1, "-1"), (1e6, "1000000.0"), ("x", '"x"'))
    },
    **{
        f"10 to the {power} microseconds": (
            {"inputs": [tensor()], "parameters": {"timeout": 10**power}},
            f"parameters.timeout: got {'1' + '0' * min(power, 36)}",
        )
        for power in (20, 310, 4000)
    },
    "a switch of text": ({"inputs": [tensor()], "parameters": {"binary_data_output": "yes"}}, "expected true or false"),
}


@pytest.mark.parametrize(("content", "message"), MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_is_refused_in_one_line(content, message):
    with pytest.raises(RequestError) as error:
        read(content)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


def test_the_longest_timeout_is_tritons():
    assert read({"inputs": [tensor()], "parameters": {"timeout": 2**64 - 1}}).seconds == 2**64 / 1e6


def test_parameters_of_any_depth_are_refused_in_one_line():
    """Near the interpreter's limit, what can be parsed cannot always be shown."""
    for depth in range(900, 1000):
        with pytest.raises(RequestError, match="the request's JSON: nested too deeply"):
            read(NESTED % ("[" * depth, "]" * depth))


HEADERS = ["0", "-1", "x", "", "999", "1e3", "٣", "9" * 30, "1.0"]


@pytest.mark.parametrize("header", HEADERS)
def test_an_invalid_json_length_is_refused(header):
    body = json.dumps({"inputs": [tensor()]}).encode()[:500]
    with pytest.raises(
        RequestError, match=rf"{HEADER}: got '{header[:40]}', expected 1 to 500, the length of the body"
    ):
        read_request(memoryview(body), header, SERVED)


def test_sizes_that_disagree_are_refused():
    for size, rest in ((IMAGE, b"x"), (IMAGE - 1, bytes(IMAGE)), (1.5, bytes(IMAGE)), (IMAGE, bytes(IMAGE + 1))):
        with pytest.raises(RequestError, match="binary_data_size: got"):
            read(image_of(data=None, parameters={"binary_data_size": size}), rest)
    with pytest.raises(RequestError, match="5 bytes follow the JSON, but input_0 has no binary_data_size"):
        read(image_of(), b"extra")
    with pytest.raises(RequestError, match=f"bytes besides the numbers of data, expected at most {MOST_REST:,}"):
        read_request(memoryview(bytes(MOST_REST + 2)), str(MOST_REST + 1), SERVED)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda x: st.lists(x, max_size=3)
)
CHANGED = st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), VALUES, max_size=2)


@pytest.mark.run
@settings(max_examples=150, deadline=None)
@given(changes=CHANGED, outputs=VALUES, parameters=VALUES, rest=st.binary(max_size=12))
def test_any_content_is_accepted_or_refused(changes, outputs, parameters, rest):
    content = {"inputs": [tensor() | changes], "outputs": outputs, "parameters": parameters}
    with contextlib.suppress(RequestError):
        assert read(content, rest).images.shape[1:] == (3, SIDE, SIDE)


@settings(max_examples=150, deadline=None)
@given(body=st.binary(max_size=60), header=st.none() | st.text(max_size=5))
def test_random_bytes_are_refused(body, header):
    with pytest.raises(RequestError):
        read_request(memoryview(body), header, SERVED)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_an_answer_contains_the_scores(dtype):
    scores = np.arange(2 * CLASSES).reshape(2, CLASSES).astype(dtype) / 3
    asked = Asked(images=pixels(2), id="x", binary=True)
    body, headers = write_answer(scores, asked, SERVED)
    length = int(headers[HEADER])
    (output,) = json.loads(body[:length])["outputs"]
    assert output["shape"] == [2, CLASSES]
    assert output["parameters"]["binary_data_size"] == scores.nbytes
    assert np.array_equal(np.frombuffer(body[length:], dtype=dtype).reshape(2, CLASSES), scores)
    text, headers = write_answer(scores, Asked(images=pixels(2), id=None, binary=False), SERVED)
    content = json.loads(text)
    assert HEADER not in headers
    assert "id" not in content
    assert np.array_equal(np.array(content["outputs"][0]["data"], dtype=dtype), scores.ravel())


# What tritonserver 2.51 answered for these scores (FP32, thirds) and labels a to e.
THIRDS = np.array([[1, 5, 3, 5, 2], [9, 8, 7, 6, 77]], dtype=np.float32) / 3
TOP_3 = ["1.666667:1:b", "1.666667:3:d", "1.000000:2:c", "25.666666:4:e", "3.000000:0:a", "2.666667:1:b"]


def classes(count, **more):
    return {"outputs": [{"name": "output_0", "parameters": {"classification": count, **more}}]}


def test_classes_are_written_as_triton_writes_them():
    asked = read({"inputs": [tensor(shape=[2, 3, SIDE, SIDE], data=[7] * 2 * IMAGE)], **classes(3)})
    text, _ = write_answer(THIRDS, asked, SERVED)
    (output,) = json.loads(text)["outputs"]
    assert output == {"name": "output_0", "datatype": "BYTES", "shape": [2, 3], "data": TOP_3}


def test_classes_are_written_as_binary_texts_after_their_lengths():
    body, headers = write_answer(THIRDS, read({"inputs": [tensor()], **classes(3, binary_data=True)}), SERVED)
    length = int(headers[HEADER])
    (output,) = json.loads(body[:length])["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 3])
    assert output["parameters"]["binary_data_size"] == len(body) - length
    expected = b"".join(len(text).to_bytes(4, "little") + text.encode() for text in TOP_3)
    assert body[length:] == expected


def test_more_classes_than_there_are_give_all_and_none_give_the_scores():
    text, _ = write_answer(THIRDS, read({"inputs": [tensor()], **classes(99)}), SERVED)
    (output,) = json.loads(text)["outputs"]
    assert output["shape"] == [2, CLASSES]
    assert output["data"][4] == "0.333333:0:a"
    text, _ = write_answer(THIRDS, read({"inputs": [tensor()], **classes(0)}), SERVED)
    assert json.loads(text)["outputs"][0]["datatype"] == "FP32"


def test_scores_that_are_not_numbers_come_last():
    scores = np.array([[np.nan, 1, np.inf, -np.inf, 2]], dtype=np.float16)
    text, _ = write_answer(scores, read({"inputs": [tensor()], **classes(5)}), SERVED)
    expected = ["inf:2:c", "2.000000:4:e", "1.000000:1:b", "-inf:3:d", "nan:0:a"]
    assert json.loads(text)["outputs"][0]["data"] == expected


def test_a_request_may_limit_its_time():
    assert read({"inputs": [tensor()], "parameters": {"timeout": 250_000}}).seconds == 0.25
    assert read({"inputs": [tensor()], "parameters": {"timeout": 0}}).seconds is None
    assert read({"inputs": [tensor()]}).seconds is None


def test_statistics_count_as_triton_does():
    counts = Counts(requests=3, images=5, executions=2, refused=1, late=1, failed=2)
    spent = Spent(queued=0.5, computed=0.25, failed=4.0, last=1700000000.5)
    spent.by_size[4] = Batches(1, 0.125)
    spent.by_size[1] = Batches(1, 0.0625)
    found = statistics(SERVED, counts, spent)
    assert (found["inference_count"], found["execution_count"]) == (5, 2)
    assert found["last_inference"] == 1700000000500
    stats = found["inference_stats"]
    assert stats["success"] == {"count": 3, "ns": 750_000_000}
    assert stats["fail"] == {"count": 4, "ns": 4_000_000_000}
    assert stats["queue"] == {"count": 3, "ns": 500_000_000}
    assert stats["compute_infer"] == {"count": 3, "ns": 250_000_000}
    sizes = [(each["batch_size"], each["compute_infer"]) for each in found["batch_stats"]]
    assert sizes == [(1, {"count": 1, "ns": 62_500_000}), (4, {"count": 1, "ns": 125_000_000})]


def test_metadata_has_what_clients_look_for():
    found = metadata(SERVED)
    assert found["inputs"] == [{"name": "input_0", "datatype": "UINT8", "shape": [-1, 3, SIDE, SIDE]}]
    assert found["outputs"] == [{"name": "output_0", "datatype": "FP32", "shape": [-1, CLASSES]}]
    assert found["parameters"]["class_names"] == list("abcde")
    assert found["parameters"]["probabilities"] == "softmax"
    assert found["parameters"]["preprocessing"]["mean"] == [0.5, 0.4, 0.3]
    assert configuration(SERVED, max_delay=0.002)["dynamic_batching"] == {"max_queue_delay_microseconds": 2000}


def test_nan_and_inf_are_null_in_json_and_unchanged_in_binary():
    scores = np.array([[np.nan, 1.5, np.inf], [-np.inf, 0.1, -2.0]], dtype=np.float32)
    text, _ = write_answer(scores, Asked(images=pixels(2), id=None, binary=False), SERVED)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    (output,) = json.loads(text, parse_constant=refuse)["outputs"]
    assert output["data"] == [None, 1.5, None, None, float(np.float32(0.1)), -2.0]
    # As tritonclient converts it.
    found = np.array(output["data"], dtype=np.float32).reshape(output["shape"])
    assert np.array_equal(np.isnan(found), ~np.isfinite(scores))
    raw, headers = write_answer(scores, Asked(images=pixels(2), id=None, binary=True), SERVED)
    assert raw[int(headers[HEADER]) :] == scores.tobytes()
