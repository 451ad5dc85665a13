"""Keys, encryption and telemetry around gRPC calls."""

import asyncio
import contextlib
import threading

import grpc
import pytest
import trustme

from falconet.serve import records
from falconet.serve.access import Access, Keys
from falconet.serve.grpc_access import Guard, credentials
from falconet.serve.grpc_messages import message
from falconet.serve.prometheus import Metrics
from falconet.serve.telemetry import Telemetry
from falconet.serve.tls import read_identity
from grpc_requests import request
from served import LIMIT, NAME, PATH, running

KEY = "k" * 32
SERVICE = "inference.GRPCInferenceService"


waiting = threading.Event()  # set by a call that does not end


async def twice(_, context):
    records.note_model("resnet", "1")
    body = await context.read()
    if body == b"bad":
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad: expected good")
    if body == b"slow":
        waiting.set()
        await asyncio.sleep(LIMIT)
    return body * 2


async def each_twice(_, context):
    while (body := await context.read()) is not grpc.aio.EOF:
        await context.write(body * 2)


@contextlib.asynccontextmanager
async def serving(keys=None, identity=None):
    """Run a service of the same form as the real one; yield its address and the records of its calls."""
    seen = []
    server = grpc.aio.server(interceptors=[Guard(keys, Telemetry(Metrics(), [seen.append]))])
    methods = {
        "ModelInfer": grpc.stream_unary_rpc_method_handler(twice),
        "ServerLive": grpc.stream_unary_rpc_method_handler(twice),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(each_twice),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    if identity is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials(identity))
    await server.start()
    try:
        yield f"127.0.0.1:{port}", seen
    finally:
        await server.stop(0)


async def call(channel, method="ModelInfer", body=b"ab", *, timeout=LIMIT, **metadata):
    sent = [(name.replace("_", "-"), value) for name, value in metadata.items()]
    return await channel.unary_unary(f"/{SERVICE}/{method}")(body, metadata=sent, timeout=timeout)


def test_a_call_needs_a_key_and_a_probe_does_not():
    async def scenario():
        async with serving(Keys([KEY])) as (address, seen), grpc.aio.insecure_channel(address) as channel:
            assert await call(channel, x_api_key=KEY) == b"abab"
            assert await call(channel, authorization=f"Bearer {KEY}") == b"abab"
            assert await call(channel, "ServerLive") == b"abab"
            for metadata in ({}, {"x_api_key": "x" * 32}):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, **metadata)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert caught.value.details().startswith("API key: ")
                assert "x" * 32 not in caught.value.details()
        assert [record.status for record in seen] == ["OK", "OK", "OK", "UNAUTHENTICATED", "UNAUTHENTICATED"]
        assert seen[-1].reason == "unauthorized"

    asyncio.run(scenario())


REFUSED = {  # by reason: the key, then the address over HTTP, and the method and the model over gRPC
    "unauthorized": ("w" * 32, PATH, "ModelInfer", NAME),
    "request": (KEY, PATH, "ModelInfer", NAME),
    "unknown_model": (KEY, "/v2/models/x/infer", "ModelInfer", "x"),
    "forbidden": (KEY, "/v2/repository/models/x/load", "RepositoryModelLoad", "x"),
}


def test_a_refusal_has_the_same_reason_as_over_http():
    async def called(address):
        async with grpc.aio.insecure_channel(address) as channel:
            for key, _, method, model in REFUSED.values():
                body = message(f"{method}Request")(model_name=model).SerializeToString()
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(channel, method, body, x_api_key=key)

    seen = []
    telemetry = Telemetry(Metrics(), [seen.append])
    with running(access=Access(keys=Keys([KEY])), telemetry=telemetry, most_bytes=1 << 20) as found:
        for key, path, _, _ in REFUSED.values():
            assert found.request(b"{}", {"X-Api-Key": key}, path=path)[0] >= 400
        asyncio.run(called(found.grpc))
    assert [(record.method, record.reason) for record in seen] == [
        (method, reason) for method in ("POST", "gRPC") for reason in REFUSED
    ]


def test_a_stream_needs_a_key():
    async def answers(channel, *parts, **sent):
        streamed = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(iter(parts), metadata=[*sent.items()])
        return [each async for each in streamed]

    async def scenario():
        async with serving(Keys([KEY])) as (address, seen), grpc.aio.insecure_channel(address) as channel:
            assert await answers(channel, b"a", b"b", authorization=f"Bearer {KEY}") == [b"aa", b"bb"]
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await answers(channel)  # without parts: a client that still sends may not see why it was refused
        assert [record.status for record in seen] == ["OK", "UNAUTHENTICATED"]

    asyncio.run(scenario())


def test_calls_are_followed_with_their_model_status_and_id():
    async def scenario():
        async with serving() as (address, seen), grpc.aio.insecure_channel(address) as channel:
            await call(channel, x_request_id="mine")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(channel, body=b"bad")
            leaving = asyncio.ensure_future(call(channel, body=b"slow"))
            assert await asyncio.to_thread(waiting.wait, LIMIT)
            leaving.cancel()
            while len(seen) < 3:
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await call(channel, "NoSuchMethod")
        return seen

    good, bad, left = asyncio.run(scenario())
    assert (good.id, good.method, good.route) == ("mine", "gRPC", f"/{SERVICE}/ModelInfer")
    assert (good.model, good.status, good.bytes_out) == ("resnet", "OK", 4)
    assert good.client.startswith("ipv4:127.0.0.1:")
    assert (bad.status, bad.reason, bad.error) == ("INVALID_ARGUMENT", "invalid_argument", "bad: expected good")
    assert (left.status, left.reason) == ("CANCELLED", "client_gone")


def test_calls_are_encrypted_with_the_servers_certificate(tmp_path):
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost", "127.0.0.1")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    key.chmod(0o600)

    async def scenario():
        async with serving(identity=read_identity(certificate, key)) as (address, _):
            trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
            async with grpc.aio.secure_channel(address, trusted) as channel:
                assert await call(channel) == b"abab"
            async with grpc.aio.insecure_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                    await call(channel)

    asyncio.run(scenario())


def test_the_real_service_needs_a_key_and_is_counted():
    seen = []
    telemetry = Telemetry(Metrics(), [seen.append])
    with (
        running(most_bytes=1 << 20, access=Access(keys=Keys([KEY])), telemetry=telemetry) as found,
        grpc.insecure_channel(found.grpc) as channel,
    ):
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        index = channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
        assert ready(b"", timeout=LIMIT)
        assert index(b"", timeout=LIMIT, metadata=[("x-api-key", KEY)])
        with pytest.raises(grpc.RpcError, match="API key: required"):
            index(b"", timeout=LIMIT)
    text = telemetry.metrics.exposition("")[0].decode()  # after the end of all calls
    assert [record.status for record in seen] == ["OK", "OK", "UNAUTHENTICATED"]
    assert 'route="/inference.GRPCInferenceService/RepositoryIndex",status="UNAUTHENTICATED"} 1.0' in text


def test_the_bytes_of_calls_and_streams_are_counted():
    seen = []
    telemetry, body = Telemetry(Metrics(), [seen.append]), request().SerializeToString()
    with running(most_bytes=1 << 20, telemetry=telemetry) as found, grpc.insecure_channel(found.grpc) as channel:
        answer = channel.unary_unary(f"/{SERVICE}/ModelInfer")(body, timeout=LIMIT)
        streamed = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        answers = list(streamed(iter([body, body, b"bad"]), timeout=LIMIT))
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"bad", timeout=LIMIT)
    assert [(record.bytes_in, record.bytes_out) for record in seen] == [
        (len(body), len(answer)),
        (2 * len(body) + 3, sum(map(len, answers))),
        (3, 0),
    ]
    text = telemetry.metrics.exposition("")[0].decode()
    assert f'falconet_received_bytes_total{{route="/{SERVICE}/ModelInfer"}} {float(len(body) + 3)}' in text
