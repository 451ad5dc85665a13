"""The gRPC server over real connections, with the official clients: right answers, statuses, limits, and the drain."""

import asyncio
import concurrent.futures
import contextlib
import functools
import queue
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import gevent
import grpc
import numpy as np
import pytest
import tritonclient.grpc as client
import tritonclient.grpc.aio as async_client
import tritonclient.http as http_client
import tritonclient.http.aio as async_http_client
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as published
from tritonclient.utils import InferenceServerException

import falconet
from falconet.errors import CheckpointError
from falconet.infer.predictor import Lanes, Predictor
from falconet.serve import bodies, grpc_service
from falconet.serve.refusals import RequestError
from falconet.serve.repository import Opened, Source
from grpc_requests import REQUESTS, request
from served import (
    CLASSES,
    LIMIT,
    NAME,
    SIDE,
    Held,
    about,
    decoded,
    nothing_logged,
    pixels,
    running,
    served,
    small_classifier,
    until,
)

INFER = "/inference.GRPCInferenceService/ModelInfer"
MOST = 1 << 20


@pytest.fixture(scope="module")
def server():
    with running(most_bytes=MOST) as found:
        yield found


@pytest.fixture
def small(server):
    with nothing_logged():
        yield server


@contextlib.contextmanager
def talking(server):
    with contextlib.closing(client.InferenceServerClient(server.grpc)) as found:
        yield found


def tensors(images, library=client, name="input_0"):
    tensor = library.InferInput(name, list(images.shape), "UINT8")
    tensor.set_data_from_numpy(images)
    return [tensor]


@functools.cache
def lane():
    (found,) = Predictor(small_classifier(), max_batch=8).lanes()
    return found


def local(images):
    return lane()([images])[0]


def refused(call):
    """The status and the text of a refusal."""
    with pytest.raises(InferenceServerException) as error:
        call()
    return error.value.status().removeprefix("StatusCode."), error.value.message()


@contextlib.contextmanager
def raw(server, kind="unary_unary", method=INFER):
    """A method that takes and returns bytes."""
    with grpc.insecure_channel(server.grpc) as channel:
        yield getattr(channel, kind)(method)


# Every method.


def test_health_and_metadata_are_answered(small):
    with talking(small) as asking:
        assert asking.is_server_live()
        assert asking.is_server_ready()
        assert asking.is_model_ready(NAME)
        assert asking.is_model_ready(NAME, "1")
        assert not asking.is_model_ready(NAME, "2")
        assert not asking.is_model_ready("x")
        about_server = asking.get_server_metadata()
        assert (about_server.name, about_server.version) == ("falconet", falconet.__version__)
        assert {"classification", "statistics", "model_repository"} <= set(about_server.extensions)
        found = asking.get_model_metadata(NAME, as_json=True)
        assert found["inputs"] == [{"name": "input_0", "datatype": "UINT8", "shape": ["-1", "3", "8", "8"]}]
        assert found["outputs"] == [{"name": "output_0", "datatype": "FP32", "shape": ["-1", "5"]}]
        config = asking.get_model_config(NAME).config
        assert (config.name, config.max_batch_size, config.backend) == (NAME, 8, "falconet")
        assert config.dynamic_batching.max_queue_delay_microseconds == 20_000
        assert (config.input[0].data_type, list(config.input[0].dims)) == (2, [3, 8, 8])
        assert (config.output[0].data_type, list(config.output[0].dims)) == (11, [5])
        (listed,) = asking.get_model_repository_index().models
        assert (listed.name, listed.version, listed.state) == (NAME, "1", "READY")


def test_http_and_grpc_say_the_same(small):
    """Both clients find the same, except for the protocols' own spellings."""
    with (
        talking(small) as asking,
        contextlib.closing(http_client.InferenceServerClient(f"127.0.0.1:{small.port}")) as web,
    ):
        assert web.get_server_metadata() == asking.get_server_metadata(as_json=True)
        for theirs, ours in (
            (web.get_model_metadata(NAME), asking.get_model_metadata(NAME, as_json=True)),
            (web.get_model_config(NAME), asking.get_model_config(NAME, as_json=True)["config"]),
        ):
            same = theirs.keys() & ours.keys()
            assert {"name", "platform"} <= same
            assert {name: words(theirs[name]) for name in same} == {name: words(ours[name]) for name in same}


def words(value):
    """Turn numbers into text, as protobuf does with 64-bit integers."""
    if isinstance(value, dict):
        return {name: words(each) for name, each in value.items()}
    if isinstance(value, list):
        return [words(each) for each in value]
    return str(value)


def test_statistics_add_up():
    with running(most_bytes=MOST, max_delay=0.2) as found, talking(found) as asking:
        for count in (1, 3, 3):
            asking.infer(NAME, tensors(pixels(count)))
        assert refused(lambda: asking.infer(NAME, tensors(pixels(1)), timeout=1))[0] == "DEADLINE_EXCEEDED"
        (stats,) = asking.get_inference_statistics(NAME).model_stats
        assert (stats.inference_count, stats.execution_count) == (7, 3)
        assert stats.inference_stats.success.count == stats.inference_stats.queue.count == 3
        assert stats.inference_stats.fail.count == 1
        whole = stats.inference_stats.queue.ns + stats.inference_stats.compute_infer.ns
        assert stats.inference_stats.success.ns == pytest.approx(whole, abs=2)
        assert stats.inference_stats.compute_infer.ns > 0
        assert [(each.batch_size, each.compute_infer.count) for each in stats.batch_stats] == [(1, 1), (3, 2)]
        assert sum(each.compute_infer.ns for each in stats.batch_stats) == pytest.approx(
            stats.inference_stats.compute_infer.ns, abs=5
        )
        assert stats.last_inference > 1_700_000_000_000
        assert asking.get_inference_statistics().model_stats == [stats]
        with contextlib.closing(http_client.InferenceServerClient(f"127.0.0.1:{found.port}")) as web:
            (told,) = web.get_inference_statistics(NAME)["model_stats"]
        assert told["inference_stats"]["success"]["ns"] == stats.inference_stats.success.ns
        assert [each["batch_size"] for each in told["batch_stats"]] == [1, 3]


def opened(name):
    return Opened(
        replace(about(), name=name),
        Lanes(each=tuple(Predictor(small_classifier(), max_batch=8).lanes())),
        decoded,
        stamp=0,
        about="",
    )


def broken():
    raise CheckpointError("torn: its weights\nare cut")


SOURCES = {
    "other": Source(open=lambda: opened("other"), stamp=lambda: 0),
    "torn": Source(open=broken, stamp=lambda: 0),
}


def test_models_are_loaded_and_unloaded():
    with (
        nothing_logged(),
        running(most_bytes=MOST, may_load=True, sources=lambda: SOURCES) as found,
        talking(found) as asking,
    ):
        assert refused(lambda: asking.infer("other", tensors(pixels(1))))[0] == "UNAVAILABLE"
        assert not asking.is_model_ready("other")
        asking.load_model("other")
        assert asking.is_model_ready("other")
        images = pixels(2)
        np.testing.assert_allclose(
            asking.infer("other", tensors(images)).as_numpy("output_0"), local(images), rtol=1e-4, atol=1e-5
        )
        assert len(asking.get_inference_statistics().model_stats) == 2
        asking.unload_model("other")
        assert not asking.is_model_ready("other")
        code, text = refused(lambda: asking.load_model("torn"))
        assert (code, text) == ("INVALID_ARGUMENT", "torn: its weights\\nare cut")
        states = {each.name: (each.state, each.reason) for each in asking.get_model_repository_index().models}
        assert states["other"] == ("UNAVAILABLE", "unloaded")
        assert states["torn"][0] == "UNAVAILABLE"
        stub = published_stub(found)
        ready = stub("RepositoryIndex", published.RepositoryIndexRequest(ready=True))
        assert [each.name for each in published.RepositoryIndexResponse.FromString(ready).models] == [NAME]
        assert refused(lambda: asking.load_model("x"))[0] == "NOT_FOUND"
        assert refused(lambda: asking.unload_model("x"))[0] == "NOT_FOUND"
        code, text = refused(lambda: asking.load_model("other", config="{}"))
        assert (code, text.partition(",")[0]) == ("INVALID_ARGUMENT", "parameters: got 'config'")


def published_stub(server):
    def call(method, message):
        with raw(server, method=f"/inference.GRPCInferenceService/{method}") as asking:
            return asking(message.SerializeToString(), timeout=LIMIT)

    return call


def test_models_are_not_loaded_by_clients_unless_the_server_lets_them(small):
    with talking(small) as asking:
        for call in (asking.load_model, asking.unload_model):
            code, text = refused(lambda call=call: call(NAME))
            assert (code, "--repository" in text) == ("PERMISSION_DENIED", True)


def test_kubernetes_can_check_the_health(small):
    with raw(small, method="/grpc.health.v1.Health/Check") as check:
        assert check(b"") == b"\x08\x01"  # status: SERVING
        assert check(b"\n\x1einference.GRPCInferenceService") == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as error:
            check(b"\n\x01x")
        assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_every_method_of_the_interface_is_answered(small):
    names = [handler.service_name() for handler in small.service.handlers()]
    assert names == [grpc_service.SERVICE, grpc_service.HEALTH]
    with raw(small, method="/inference.GRPCInferenceService/LogSettings") as unknown:
        with pytest.raises(grpc.RpcError) as error:
            unknown(b"")
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
    ours = grpc_service.grpc_messages._pool().FindServiceByName(grpc_service.SERVICE)
    for method in set(ours.methods_by_name) - {"ModelStreamInfer"}:
        with raw(small, method=f"/{grpc_service.SERVICE}/{method}") as asking:
            try:
                asking(b"")
            except grpc.RpcError as refusal:
                assert refusal.code() is not grpc.StatusCode.UNIMPLEMENTED, method  # noqa: PT017


# Scores.


def test_scores_are_the_local_models(small):
    images = pixels(3)
    with talking(small) as asking:
        found = asking.infer(NAME, tensors(images), request_id="mine", model_version="1")
        assert found.get_response().id == "mine"
        assert found.get_response().model_version == "1"
        np.testing.assert_allclose(found.as_numpy("output_0"), local(images), rtol=1e-4, atol=1e-5)
        assert np.array_equal(found.as_numpy("output_0"), small.scores(images))
        named = asking.infer(NAME, tensors(images), outputs=[client.InferRequestedOutput("output_0")])
        assert np.array_equal(named.as_numpy("output_0"), small.scores(images))


def test_numbers_give_the_same_scores_as_bytes(small):
    images = pixels(8)
    contents = {"uint_contents": images.ravel().tolist()}
    message = request(raw=[], tensor={"shape": list(images.shape), "contents": contents})
    found = published.ModelInferResponse.FromString(published_stub(small)("ModelInfer", message))
    assert found.raw_output_contents == [small.scores(images).tobytes()]


@pytest.mark.parametrize("library", [client, http_client], ids=["gRPC", "HTTP"])
def test_classes_are_answered_in_words(small, library):
    images = pixels(4)
    with contextlib.closing(
        library.InferenceServerClient(small.grpc if library is client else f"127.0.0.1:{small.port}")
    ) as asking:
        wished = [library.InferRequestedOutput("output_0", class_count=3)]
        found = asking.infer(NAME, tensors(images, library), outputs=wished).as_numpy("output_0")
    scores = small.scores(images)
    assert found.shape == (4, 3)
    for row, texts in zip(scores, found, strict=True):
        best = sorted(range(CLASSES), key=lambda number, row=row: -row[number])[:3]
        assert [text.decode() for text in texts] == [f"{row[number]:f}:{number}:{'abcde'[number]}" for number in best]


def test_concurrent_requests_share_batches_and_get_their_own_scores():
    """Eight clients, batches of eight, and a delay that never ends: each batch waits for all of them."""
    with nothing_logged(), running(most_bytes=MOST, max_delay=LIMIT) as found, talking(found) as asking:
        images = [pixels(1, seed=number) for number in range(64)]
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda each: asking.infer(NAME, tensors(each)).as_numpy("output_0"), images))
        for answer, each in zip(answers, images, strict=True):
            np.testing.assert_allclose(answer, local(each), rtol=1e-4, atol=1e-5)
        assert (found.batcher.counts.requests, found.batcher.counts.executions) == (64, 8)


def test_calls_without_waiting_are_answered(small):
    images = [pixels(2, seed=number) for number in range(10)]
    answers = queue.Queue()
    with talking(small) as asking:
        for number, each in enumerate(images):
            asking.async_infer(
                NAME, tensors(each), callback=lambda result, error: answers.put((result, error)), request_id=str(number)
            )
        for _ in images:
            result, error = answers.get(timeout=LIMIT)
            assert error is None
            each = images[int(result.get_response().id)]
            np.testing.assert_allclose(result.as_numpy("output_0"), local(each), rtol=1e-4, atol=1e-5)


# Streams.


@contextlib.contextmanager
def streaming(server):
    """A function that sends a request, and the queue of answers."""
    answers = queue.Queue()
    with talking(server) as asking:
        asking.start_stream(lambda result, error: answers.put((result, error)))
        yield asking, answers
        asking.stop_stream(cancel_requests=True)


def test_a_stream_is_answered_in_order(small):
    """There are more requests than are computed at once, and some are wrong."""
    images = [pixels(1 + number % 3, seed=number) for number in range(40)]
    with streaming(small) as (asking, answers):
        for number, each in enumerate(images):
            asking.async_stream_infer("x" if number % 7 == 3 else NAME, tensors(each), request_id=str(number))
        for number, each in enumerate(images):
            result, error = answers.get(timeout=LIMIT)
            if number % 7 == 3:
                assert "there is no model 'x'" in str(error)
            else:
                response = result.get_response()
                assert response.id == str(number)
                assert response.parameters["triton_final_response"].bool_param
                np.testing.assert_allclose(result.as_numpy("output_0"), local(each), rtol=1e-4, atol=1e-5)


def test_a_refusal_in_a_stream_has_the_requests_id(small):
    with raw(small, "stream_stream", "/inference.GRPCInferenceService/ModelStreamInfer") as asking:
        sent = [request(id="mine", raw=[b"x"]).SerializeToString(), b"\xff\xff", request().SerializeToString()]
        found = [published.ModelStreamInferResponse.FromString(each) for each in asking(iter(sent), timeout=LIMIT)]
    assert found[0].infer_response.id == "mine"
    assert "raw_input_contents: got 1 bytes" in found[0].error_message
    assert "not a ModelInferRequest" in found[1].error_message
    assert len(found[2].infer_response.raw_output_contents) == 1


def test_a_stream_that_is_cancelled_leaves_the_queue():
    """It has more requests than are computed at once."""
    held = Held()
    with nothing_logged(), running(held, most_bytes=MOST, max_delay=0) as found:
        with streaming(found) as (asking, _):
            for _ in range(3 * grpc_service.MOST_AHEAD):
                asking.async_stream_infer(NAME, tensors(pixels(1)))
            until(lambda: found.service._in_progress == grpc_service.MOST_AHEAD)
        until(lambda: not found.service._readers)
        until(lambda: not found.service._in_progress)
        assert found.batcher.waiting == 0
        held.go.set()


def test_too_many_streams_are_refused(monkeypatch):
    monkeypatch.setattr(grpc_service, "MOST_STREAMS", 1)
    with nothing_logged(), running(most_bytes=MOST) as found:
        with streaming(found) as (asking, answers):
            asking.async_stream_infer(NAME, tensors(pixels(1)))
            assert answers.get(timeout=LIMIT)[1] is None
            with streaming(found) as (_, refusals):
                _, error = refusals.get(timeout=LIMIT)
                assert error.status() == "StatusCode.UNAVAILABLE"
        until(lambda: not found.service._readers)  # the client has ended it
        with streaming(found) as (asking, answers):
            asking.async_stream_infer(NAME, tensors(pixels(1)))
            assert answers.get(timeout=LIMIT)[1] is None


# Refusals.

WRONG = {
    "another model": (lambda asking: asking.infer("x", tensors(pixels(1))), "NOT_FOUND", "there is no model 'x'"),
    "another version": (
        lambda asking: asking.infer(NAME, tensors(pixels(1)), model_version="7"),
        "NOT_FOUND",
        f"{NAME} has no version '7'; its version is 1",
    ),
    "metadata of another model": (lambda asking: asking.get_model_metadata("x"), "NOT_FOUND", "no model 'x'"),
    "config of another model": (lambda asking: asking.get_model_config("x"), "NOT_FOUND", "no model 'x'"),
    "statistics of another model": (lambda asking: asking.get_inference_statistics("x"), "NOT_FOUND", "no model 'x'"),
    "too many images": (lambda asking: asking.infer(NAME, tensors(pixels(9))), "INVALID_ARGUMENT", "N from 1 to 8"),
    "another input": (
        lambda asking: asking.infer(NAME, tensors(pixels(1), name="x")),
        "INVALID_ARGUMENT",
        "expected 'input_0'",
    ),
    "another output": (
        lambda asking: asking.infer(NAME, tensors(pixels(1)), outputs=[client.InferRequestedOutput("x")]),
        "INVALID_ARGUMENT",
        "expected 'output_0'",
    ),
    "a name of control characters": (
        lambda asking: asking.infer("\x1b[31m\n\x00", tensors(pixels(1))),
        "NOT_FOUND",
        "there is no model",
    ),
}


@pytest.mark.parametrize(("call", "status", "text"), WRONG.values(), ids=WRONG)
def test_every_mistake_has_its_status(small, call, status, text):
    with talking(small) as asking:
        found, told = refused(lambda: call(asking))
    assert (found, text in told) == (status, True)
    assert told.isprintable()


def test_a_message_that_is_too_large_is_refused(small):
    with talking(small) as asking:
        code, text = refused(lambda: asking.infer(NAME, tensors(np.zeros((8, 3, 300, 300), dtype=np.uint8))))
        assert (code, "larger than max" in text) == ("RESOURCE_EXHAUSTED", True)
        assert asking.infer(NAME, tensors(pixels(1))).as_numpy("output_0").shape == (1, CLASSES)
        with raw(small) as infer, pytest.raises(grpc.RpcError) as error:
            infer(request(id="x" * 20_000).SerializeToString())
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("error", [RequestError("the call ended without a request"), CheckpointError("damaged")])
def test_a_call_that_grpc_has_ended_counts_as_cancelled(error):
    """As after a message that is too large, in some versions at times; it would be logged with a traceback."""

    class Ended:
        async def abort(self, *_):
            raise grpc.aio.InternalError

    async def call():
        async with grpc_service._refusing(Ended()):
            raise error

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(call())


@pytest.mark.parametrize("body", [b"\xff", b"\x2a\x00" * 2000], ids=["not a message", "very many fields"])
def test_bytes_that_are_no_request_are_refused(small, body):
    with raw(small) as infer, pytest.raises(grpc.RpcError) as error:
        infer(body)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_without_a_request_is_refused(small):
    with raw(small, "stream_unary") as infer, pytest.raises(grpc.RpcError) as error:
        infer(iter([]))
    assert (error.value.code(), error.value.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the call ended without a request",
    )


CODES = {"INVALID_ARGUMENT", "NOT_FOUND"}


@pytest.mark.run
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=REQUESTS.map(lambda message: message.SerializeToString()) | st.binary(max_size=60))
def test_any_request_is_answered_or_refused(small, body):
    with raw(small) as infer:
        try:
            answer = published.ModelInferResponse.FromString(infer(body, timeout=LIMIT))
            assert answer.model_name == NAME
        except grpc.RpcError as error:
            if error.code().name != "DEADLINE_EXCEEDED":  # a request may give itself 1 microsecond
                assert error.code().name in CODES  # noqa: PT017


# Limits.


def test_a_full_queue_says_when_to_retry():
    held = Held()
    with nothing_logged(), running(held, most_bytes=MOST, max_queue=8, max_delay=0) as found, raw(found) as infer:
        whole = request(tensor={"shape": [8, 3, SIDE, SIDE]}, raw=[pixels(8).tobytes()]).SerializeToString()
        begun, waiting = infer.future(whole), None
        assert held.begun.acquire(timeout=LIMIT)
        waiting = infer.future(whole)
        until(lambda: found.batcher.waiting == 8)
        with pytest.raises(grpc.RpcError) as error:
            infer(request().SerializeToString())
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "8 images are waiting; try again later"
        assert ("grpc-retry-pushback-ms", "1000") in error.value.trailing_metadata()
        held.go.set()
        for call in (begun, waiting):
            assert call.result(LIMIT)


def test_memory_for_requests_is_limited():
    held = Held()
    with nothing_logged(), running(held, most_bytes=MOST, memory=2000, max_delay=0) as found, raw(found) as infer:
        begun = infer.future(request(tensor={"shape": [8, 3, SIDE, SIDE]}, raw=[bytes(8 * 192)]).SerializeToString())
        assert held.begun.acquire(timeout=LIMIT)
        with pytest.raises(grpc.RpcError) as error:
            infer(request(tensor={"shape": [4, 3, SIDE, SIDE]}, raw=[bytes(4 * 192)]).SerializeToString())
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "out of memory for request bodies" in error.value.details()
        held.go.set()
        assert begun.result(LIMIT)
        assert infer(request().SerializeToString())


def test_the_requests_received_at_once_are_limited(monkeypatch):
    """Calls that send nothing hold their places; others wait, but health checks are answered."""
    monkeypatch.setattr(grpc_service, "RECEIVING", 2)
    with nothing_logged(), running(most_bytes=MOST) as found, contextlib.ExitStack() as stack:
        go = threading.Event()

        def silent():
            go.wait(LIMIT)
            yield request().SerializeToString()

        slow = stack.enter_context(raw(found, "stream_unary"))
        holding = [slow.future(silent()) for _ in range(2)]
        until(lambda: found.service._inferring.locked())
        infer = stack.enter_context(raw(found))
        waiting = infer.future(request().SerializeToString())
        with talking(found) as asking:
            assert asking.is_server_live()
            assert asking.is_model_ready(NAME)
        with pytest.raises(grpc.FutureTimeoutError):
            waiting.result(0.3)
        go.set()
        for call in (*holding, waiting):
            assert call.result(LIMIT)


def test_a_request_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr(bodies, "SECONDS", 0.2)
    with nothing_logged(), running(most_bytes=MOST) as found, raw(found, "stream_unary") as infer:
        never = threading.Event()
        call = infer.future(iter(lambda: never.wait(LIMIT) and b"", None))
        with pytest.raises(grpc.RpcError) as error:
            call.result(LIMIT)
        never.set()
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert error.value.details() == "the request was not received in 0.2 s"


def test_a_cancelled_call_leaves_the_queue():
    held = Held()
    with nothing_logged(), running(held, most_bytes=MOST, max_delay=0) as found, raw(found) as infer:
        begun = infer.future(request().SerializeToString())
        assert held.begun.acquire(timeout=LIMIT)
        waiting = infer.future(request().SerializeToString())
        until(lambda: found.batcher.waiting == 1)
        waiting.cancel()
        until(lambda: found.batcher.waiting == 0)
        held.go.set()
        assert begun.result(LIMIT)
        assert found.batcher.counts.dropped == 1
        assert found.service._in_progress == 0


@pytest.mark.parametrize("way", ["the call's deadline", "the request's timeout", "the server's"])
def test_a_late_request_leaves_the_queue(way):
    held = Held()
    seconds = 0.3 if way == "the server's" else LIMIT
    with (
        nothing_logged(),
        running(held, most_bytes=MOST, max_delay=0, seconds=seconds) as found,
        talking(found) as asking,
        raw(found) as infer,
    ):
        begun = infer.future(request().SerializeToString())
        assert held.begun.acquire(timeout=LIMIT)
        options = {
            "the call's deadline": {"client_timeout": 0.3},
            "the request's timeout": {"timeout": 300_000},
            "the server's": {},
        }
        code, text = refused(lambda: asking.infer(NAME, tensors(pixels(1)), **options[way]))
        assert code == "DEADLINE_EXCEEDED"
        if way != "the call's deadline":  # then the client does not wait for the answer
            assert re.fullmatch(r"not computed within [\d.]+ s, the time limit of the request", text)
        until(lambda: found.batcher.waiting == 0)
        held.go.set()
        with contextlib.suppress(grpc.RpcError):  # it is late too where the server limits the time
            begun.result(LIMIT)
        until(lambda: found.service._in_progress == 0)


def test_the_requests_timeout_counts_over_http_too():
    held = Held()
    with (
        nothing_logged(),
        running(held, max_delay=0) as found,
        contextlib.closing(http_client.InferenceServerClient(f"127.0.0.1:{found.port}", concurrency=2)) as asking,
    ):
        begun = asking.async_infer(NAME, tensors(pixels(1), http_client))
        # Its client sends only while gevent has this thread, of which it takes 10 ms itself.
        until(lambda: gevent.sleep(0.01) or held.begun.acquire(blocking=False))
        with pytest.raises(InferenceServerException) as error:
            asking.infer(NAME, tensors(pixels(1), http_client), timeout=300_000)
        assert re.search(r"not computed within [\d.]+ s, the time limit of the request", error.value.message())
        held.go.set()
        assert begun.get_result().as_numpy("output_0").shape == (1, CLASSES)


def test_a_model_that_fails_is_an_error_of_the_server_and_then_not_ready():
    def fails(portions):
        raise RuntimeError("device\nlost")

    with running(fails, most_bytes=MOST, max_delay=0) as found, talking(found) as asking:
        for _ in range(3):
            assert asking.is_model_ready(NAME)
            code, text = refused(lambda: asking.infer(NAME, tensors(pixels(1))))
            assert (code, text) == ("INTERNAL", "the model failed: RuntimeError: device")
        assert not asking.is_model_ready(NAME)
        assert not asking.is_server_ready()
        with raw(found, method="/grpc.health.v1.Health/Check") as check:
            assert check(b"") == b"\x08\x02"  # NOT_SERVING


# The end.


def test_requests_in_progress_are_finished_and_further_ones_refused():
    held = Held()
    with (
        nothing_logged(),
        running(held, most_bytes=MOST, max_delay=0) as found,
        raw(found) as infer,
        streaming(found) as (asking, answers),
    ):
        begun = infer.future(request().SerializeToString())
        assert held.begun.acquire(timeout=LIMIT)
        for number in range(3):
            asking.async_stream_infer(NAME, tensors(pixels(1)), request_id=str(number))
        until(lambda: found.batcher.waiting == 3)
        found.ask_to_stop()
        until(lambda: not found.service.is_ready)
        with raw(found) as late, pytest.raises(grpc.RpcError) as error:
            late(request().SerializeToString())
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        held.go.set()
        assert begun.result(LIMIT)
        for number in range(3):
            result, error = answers.get(timeout=LIMIT)
            assert error is None
            assert result.get_response().id == str(number)
        _, error = answers.get(timeout=LIMIT)
        assert (error.status(), error.message()) == ("StatusCode.UNAVAILABLE", "the server is stopping")
        until(lambda: found.cut is not None)
    assert found.cut == 0


def test_requests_that_outlast_the_drain_are_cut():
    held = Held()
    with nothing_logged(), running(held, most_bytes=MOST, max_delay=0, drain_seconds=0.3) as found, raw(found) as infer:
        begun = infer.future(request().SerializeToString())
        assert held.begun.acquire(timeout=LIMIT)
        found.ask_to_stop()
        with pytest.raises(grpc.RpcError) as error:
            begun.result(LIMIT)
        assert error.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        held.go.set()
        until(lambda: found.cut is not None)
    assert found.cut == 1


def test_an_idle_client_does_not_hold_the_server():
    def parsing():
        return {thread for thread in threading.enumerate() if thread.name.startswith("protobuf")}

    before = parsing()  # of other tests' servers
    with nothing_logged(), running(most_bytes=MOST) as found, talking(found), streaming(found):
        contents = {"uint_contents": pixels(8).ravel().tolist() * 4}  # too long to be read in the server's thread
        with contextlib.suppress(grpc.RpcError):
            published_stub(found)("ModelInfer", request(raw=[], tensor={"contents": contents}))
        assert len(parsing() - before) == 1
        found.ask_to_stop()
        until(lambda: found.cut is not None)
    assert found.cut == 0
    until(lambda: not parsing() - before)


def test_credentials_and_interceptors_can_be_handed_in():
    """TLS and API keys need them."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    seen = []

    class Interceptor(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            seen.append((details.method, dict(details.invocation_metadata).get("x-key")))
            return await continuation(details)

    async def serve():
        with running() as found, socket.create_server(("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
            service = grpc_service.GrpcService(found.repository, memory=found.memory, seconds=LIMIT)
            credentials = grpc.ssl_server_credentials(
                [(certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())]
            )
            security = grpc_service.Security(credentials=credentials, interceptors=[Interceptor()])
            async with grpc_service.answering(
                service, reserved, most_bytes=MOST, drain_seconds=LIMIT, security=security
            ):
                return await asyncio.to_thread(ask, port)

    def ask(port):
        trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            return live(b"", metadata=[("x-key", "secret")], timeout=LIMIT)

    assert asyncio.run(serve()) == b"\x08\x01"
    assert seen == [("/inference.GRPCInferenceService/ServerLive", "secret")]


# A server in a process of its own: the clients' event loops would share gRPC's with one in this process.

SMALL = (
    "--model resnet8-cifar --image-size 8 --classes 5 --port 0 --threads 1 --device cpu --max-batch 4 --engine torch"
)


@pytest.mark.dist
def test_the_clients_for_asyncio_get_the_same_scores():
    images = [pixels(1, seed=number) for number in range(12)]

    async def ask(library, address):
        async with library.InferenceServerClient(address) as asking:
            assert await asking.is_server_ready()
            assert await asking.is_model_ready(NAME)
            kind = client if library is async_client else http_client
            calls = [asking.infer(NAME, tensors(each, kind)) for each in images]
            return [each.as_numpy("output_0") for each in await asyncio.gather(*calls)]

    async def stream(address):
        async def requests():
            for number, each in enumerate(images):
                yield {"model_name": NAME, "inputs": tensors(each), "request_id": str(number)}

        async with async_client.InferenceServerClient(address) as asking:
            found = []
            async for result, error in asking.stream_infer(requests()):
                assert error is None
                assert result.get_response().id == str(len(found))
                found.append(result.as_numpy("output_0"))
            return found

    with served(SMALL) as (_, port, lines):
        address = re.search(r"and grpc://(127\.0\.0\.1:\d+): ", "".join(lines))[1]
        over_http = asyncio.run(ask(async_http_client, f"127.0.0.1:{port}"))
        over_grpc = asyncio.run(ask(async_client, address))
        streamed = asyncio.run(stream(address))
    for one, two, three in zip(over_http, over_grpc, streamed, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(one, three, rtol=1e-4, atol=1e-5)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NONSENSE = {
    "nothing": b"",
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 40,
    "a preface that is cut": PREFACE[:10],
    "a preface and noise": PREFACE + bytes(range(256)) * 40,
    "a frame that is too long": PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "settings, and half a frame": PREFACE + bytes(3) + b"\x04" + bytes(5) + b"\x00\x00\x10\x01",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
}


@pytest.mark.dist
def test_nonsense_and_lost_clients_leave_no_trace():
    """Connections of every kind of nonsense, some cut and some left open, and calls that are given up.

    A full batch starts at once. Two images would wait for others until long after the client has given up.
    """
    with served(f"{SMALL} --max-delay {1000 * LIMIT} --request-timeout {2 * LIMIT}") as (process, _, lines):
        address = re.search(r"and grpc://(127\.0\.0\.1:\d+): ", "".join(lines))[1]
        host, port = address.split(":")
        images = pixels(4)
        with contextlib.closing(client.InferenceServerClient(address)) as asking, contextlib.ExitStack() as stack:
            expected = asking.infer(NAME, tensors(images)).as_numpy("output_0")
            before = threads_of(process)
            for number in range(10):
                for sent in NONSENSE.values():
                    connection = socket.create_connection((host, int(port)), timeout=LIMIT)
                    with contextlib.suppress(ConnectionError):
                        connection.sendall(sent)
                    if number == 0:
                        stack.enter_context(connection)  # stays open
                    else:
                        connection.close()
                code, _ = refused(lambda: asking.infer(NAME, tensors(pixels(2)), client_timeout=0.1))
                assert code == "DEADLINE_EXCEEDED"
                found = asking.infer(NAME, tensors(images)).as_numpy("output_0")
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
            until(lambda: threads_of(process) <= before + 4)  # gRPC starts a few of its own, not one for a connection
        process.terminate()
        assert process.wait(LIMIT) == 0
        assert process.stderr.read() == ""


def threads_of(process):
    return len(list(Path(f"/proc/{process.pid}/task").iterdir()))
