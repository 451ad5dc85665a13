"""Thousands of requests, a tenth broken, beside slow, cut and half-open connections: the server stays as it was.

Every good request gets the local model's answer, every bad one its reason; memory, threads and files stay flat.
"""

import base64
import contextlib
import http.client
import json
import random
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from tritonclient.grpc import service_pb2 as published
from urllib3 import encode_multipart_formdata

import hostile_photos
import layouts
from falconet.config.settings import LINE, Setting
from falconet.data.encoded import PhotoDecoder
from falconet.errors import printable
from falconet.infer.predictor import Predictor, open_served
from falconet.serve.protocol import HEADER, MOST_JSON
from grpc_requests import request
from served import LIMIT, NAME, PATH, SIDE, answers, binary, connected, infer, pixels, received, served, until

pytestmark = pytest.mark.dist
OPTIONS = {"model": NAME, "image-size": str(SIDE), "classes": "5", "device": "cpu", "threads": "1", "engine": "torch"}
SERVER = " ".join(f"--{name} {value}" for name, value in OPTIONS.items()) + " --port 0 --max-batch 8 --max-body 1"
CLIENTS = 4
WARM = 520  # requests after which nothing may grow: each kind was sent
INFER = "/inference.GRPCInferenceService/ModelInfer"
FORMATS = ({"kind": "JPEG"}, {"kind": "PNG"}, {"kind": "WEBP"}, {"kind": "JPEG", "progressive": True})
SCORES, PROBABILITIES = 1e-4, 2e-6  # differences: kernels differ with the size of a batch


class Local:
    """The server's model in this process."""

    def __init__(self):
        line = [Setting(name, (value,), LINE) for name, value in OPTIONS.items()]
        self._classifier, _ = open_served(line, lambda _: None)
        self._predictor, self._decoder = Predictor(self._classifier, max_batch=8), PhotoDecoder()
        self.images = [pixels(1 + seed % 3, seed=seed) for seed in range(20)]
        self.scores = [self._scored(each) for each in self.images]
        self.photos = [layouts.encoded(layouts.photo(seed), **FORMATS[seed % 4]) for seed in range(20)]
        self.top = [self._top(photo) for photo in self.photos]

    def _scored(self, images):
        return self._predictor.logits(torch.from_numpy(images)).numpy()

    def _top(self, photo):
        rows = self._decoder.decode(photo, self._classifier.preprocessing)[None].transpose(0, 3, 1, 2)
        likely = torch.softmax(torch.from_numpy(self._scored(np.ascontiguousarray(rows))[0]), 0).sort(descending=True)
        return [
            (self._classifier.class_names[int(number)], float(value)) for value, number in zip(*likely, strict=True)
        ]


@dataclass
class Client:
    """Sends requests of all kinds over connections that it keeps, and checks what it gets."""

    port: int
    address: str  # of gRPC
    local: Local
    random: random.Random
    wrong: list = field(default_factory=list)
    good: int = 0
    bad: int = 0
    _kept: http.client.HTTPConnection | None = None

    def __post_init__(self):
        limits = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(self.address, options=limits)
        self._grpc = self._channel.unary_unary(INFER)

    def close(self):
        self._channel.close()
        if self._kept:
            self._kept.close()

    def send(self, number):
        try:
            if number % 10 == 0:
                self.bad += 1
                self.broken(number // 10)
            else:
                self.good += 1
                ways = (self.raw, self.form, self.json, self.tensor, self.numbers, self.message, self.typed)
                ways[number % len(ways)](self.random.randrange(20))
        except (AssertionError, OSError, http.client.HTTPException, grpc.RpcError) as error:
            self.wrong.append((number, repr(error)[:500]))

    # Good requests.

    def post(self, path, body, headers=None):
        if self._kept is None:
            self._kept = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        self._kept.request("POST", path, body, headers or {})
        response = self._kept.getresponse()
        return response.status, response.headers, response.read()

    def check_photos(self, answer, expected):
        status, _, body = answer
        assert status == 200, body
        predictions = json.loads(body)["predictions"]
        assert len(predictions) == len(expected)
        for found, number in zip(predictions, expected, strict=True):
            top = self.local.top[number]
            assert [each["label"] for each in found["top"]] == [label for label, _ in top]
            assert [each["probability"] for each in found["top"]] == pytest.approx(
                [p for _, p in top], abs=PROBABILITIES
            )

    def check_scores(self, found, number):
        expected = self.local.scores[number]
        np.testing.assert_allclose(np.reshape(found, expected.shape), expected, rtol=SCORES, atol=SCORES)

    def raw(self, number):
        self.check_photos(self.post("/predict", self.local.photos[number]), [number])

    def form(self, number):
        numbers = [(number + step) % 20 for step in range(3)]
        body, kind = encode_multipart_formdata([("p", (f"{each}.jpg", self.local.photos[each])) for each in numbers])
        self.check_photos(self.post(f"/predict?model={NAME}&top=5", body, {"Content-Type": kind}), numbers)

    def json(self, number):
        numbers = [number, (number + 7) % 20]
        coded = [base64.b64encode(self.local.photos[each]).decode() for each in numbers]
        self.check_photos(self.post("/predict", json.dumps({"images": coded, "top": 5})), numbers)

    def tensor(self, number):
        status, headers, body = self.post(PATH, *binary(self.local.images[number]))
        assert status == 200, body
        self.check_scores(np.frombuffer(body[int(headers[HEADER]) :], np.float32), number)

    def numbers(self, number):
        images = self.local.images[number]
        tensor = {"name": "input_0", "shape": images.shape, "datatype": "UINT8", "data": images.ravel().tolist()}
        status, _, body = self.post(PATH, json.dumps({"inputs": [tensor], "id": str(number)}))
        assert status == 200, body
        content = json.loads(body)
        assert content["id"] == str(number)
        self.check_scores(content["outputs"][0]["data"], number)

    def message(self, number, **how):
        images = self.local.images[number]
        how = {"raw": [images.tobytes()], "tensor": {}} | how
        how["tensor"] = {"shape": images.shape} | how["tensor"]
        sent = request(**how).SerializeToString()
        answer = published.ModelInferResponse.FromString(self._grpc(sent, timeout=LIMIT))
        self.check_scores(np.frombuffer(answer.raw_output_contents[0], np.float32), number)

    def typed(self, number):
        values = self.local.images[number].ravel().tolist()
        self.message(number, raw=[], tensor={"contents": {"uint_contents": values}})

    # Bad ones.

    def broken(self, number):
        name = BROKEN_NAMES[number % len(BROKEN_NAMES)]
        how, status, reason = BROKEN[name]
        sent = how(self)
        if isinstance(status, grpc.StatusCode):
            with pytest.raises(grpc.RpcError) as caught:
                self._grpc(sent, timeout=LIMIT)
            assert (caught.value.code(), bool(re.search(reason, caught.value.details()))) == (status, True), name
            return
        path, body, headers = sent
        if isinstance(body, RawBytes):
            found, content = self.exchanged(body)
        else:
            found, _, answer = self.post(path, body, headers)
            content = json.loads(answer)
        assert (found, list(content)) == (status, ["error"]), (name, content)
        assert re.search(reason, content["error"]), (name, content)
        assert printable(content["error"]) == content["error"]
        if found == 413:  # which the server does not read to its end
            self._kept.close()
            self._kept.request("GET", "/v2/health/live")  # on a new one: each client has one whenever files are counted
            assert self._kept.getresponse().read()

    def exchanged(self, sent):
        """The only answer to bytes sent on a connection of their own."""
        with connected(self.port) as connection:
            connection.sendall(sent)
            ((status, _, content),) = answers(received(connection))
        return status, content

    def photo(self):
        return self.random.choice(self.local.photos)

    def cut(self, least=60):
        whole = self.local.photos[1]  # a PNG
        return whole[: self.random.randrange(least, len(whole) - 40)]

    def noise(self):
        return self.random.randbytes(self.random.randrange(1, 3000)).lstrip(b"{\xff\x89RGBIM \t\r\n\xef\xbb\xbf") + b"x"

    def changed(self, **change):
        tensor = {"name": "input_0", "shape": [1, 3, SIDE, SIDE], "datatype": "UINT8", "data": [1] * 3 * SIDE**2}
        return json.dumps({"inputs": [tensor | change]})

    def form_of(self, *files):
        return encode_multipart_formdata([("p", file) for file in files])


class RawBytes(bytes):
    """A whole request, headers and all."""


BOMBS = {
    name: hostile_photos.REFUSED[name][0]()
    for name in (
        "png of 50,000 x 50,000",
        "jpeg of 65,500 x 65,500",
        "webp of 16,000 x 16,000",
        "gif with a frame of 60,000 x 60,000",
        "tiff of 50,000 x 50,000",
        "bmp of run lengths",
    )
}
BAD, MISSING, LARGE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED
BOUNDARY = {"Content-Type": "multipart/form-data; boundary=b"}


def predict(make, headers=None, query=""):
    return lambda client: (f"/predict{query}", make(client), headers or {})


def tensor(make, path=PATH, headers=None):
    return lambda client: (path, make(client), headers or {})


def form(*make):
    def sent(client):
        body, kind = client.form_of(*(each(client) for each in make))
        return "/predict", body, {"Content-Type": kind}

    return sent


def raw(head, body=b""):
    return lambda _: ("", RawBytes(head.replace(b"\n", b"\r\n") + body), {})


BROKEN = {
    "a photo that is cut": (predict(lambda c: c.cut()), 400, "truncated|damaged|broken|cut|not a"),
    "noise": (predict(lambda c: c.noise()), 400, "^the body is not a photo: it starts with "),
    "nothing": (predict(lambda _: b""), 400, "^the body is empty"),
    "a page": (predict(lambda _: b"<html>", {"Content-Type": "image/jpeg"}), 400, "it starts with '<html>'"),
    "a jpeg of two bytes": (predict(lambda _: b"\xff\xd8\xff"), 400, "."),
    "top of no number": (predict(lambda c: c.photo(), query="?top=many"), 400, "^top: got 'many'"),
    "another model": (predict(lambda c: c.photo(), query="?model=resnet9-cifar"), 404, "did you mean 'resnet8-cifar'"),
    "another version": (predict(lambda c: c.photo(), query="?version=7"), 404, "has no version '7'"),
    "a compressed body": (predict(lambda c: c.photo(), {"Content-Encoding": "gzip"}), 400, "^Content-Encoding: "),
    "no base64": (predict(lambda _: b'{"image": "%%%"}'), 400, "^image: not base64"),
    "json that is cut": (predict(lambda _: b'{"image": "'), 400, "^the request's JSON: "),
    "json of something else": (predict(lambda _: b'{"imag": 1}'), 400, "did you mean 'image'"),
    "json nested deeply": (predict(lambda _: b'{"image": ' + b"[" * 5000), 400, "nested too deeply|the request's JSON"),
    "base64 of noise": (
        predict(lambda c: json.dumps({"image": base64.b64encode(c.noise()).decode()})),
        400,
        "not a JPEG|damaged",
    ),
    "a form of broken photos": (
        form(lambda c: ("a.jpg", c.cut()), lambda c: ("b.txt", c.noise())),
        400,
        r"^a\.jpg: .*; b\.txt: ",
    ),
    "a form without its end": (
        predict(lambda c: b"--b\r\n\r\n" + c.photo(), BOUNDARY),
        400,
        "^the form ends before its closing boundary",
    ),
    "a form without a boundary": (predict(lambda _: b"--b", {"Content-Type": "multipart/form-data"}), 400, "boundary"),
    "a form of another kind": (predict(lambda _: b"--b", {"Content-Type": "multipart/mixed"}), 400, "form-data"),
    "a form without files": (
        predict(lambda _: b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n--b--', BOUNDARY),
        400,
        "^the form has no file",
    ),
    "too many photos": (form(*[lambda _: ("a.png", b"x")] * 257), 400, "^got more than 256 photos"),
    "too large": (predict(lambda _: bytes((1 << 20) + 1)), 413, "^Content-Length: got 1,048,577"),
    "a shape of others": (tensor(lambda c: c.changed(shape=[1, 3, 9, 9])), 400, r"^input_0\.shape: got \[1, 3, 9, 9\]"),
    "a huge shape": (tensor(lambda c: c.changed(shape=[10**30, 3, SIDE, SIDE])), 400, r"^input_0\.shape: "),
    "a number above 255": (tensor(lambda c: c.changed(data=[256] * 3 * SIDE**2)), 400, r"^input_0\.data: "),
    "too few numbers": (tensor(lambda c: c.changed(data=[1] * 7)), 400, r"^input_0\.data: "),
    "numbers that are texts": (tensor(lambda c: c.changed(data="1, 2")), 400, r"^input_0\.data: "),
    "floats": (tensor(lambda c: c.changed(datatype="FP32")), 400, r"^input_0\.datatype: got \"FP32\""),
    "tensor of no json": (tensor(lambda c: c.noise()), 400, "^the request's JSON: "),
    "no json length": (
        tensor(lambda c: binary(c.local.images[0])[0], headers={HEADER: "x"}),
        400,
        f"^{HEADER}: got 'x'",
    ),
    "a tensor that is cut": (
        lambda c: (PATH, binary(c.local.images[0])[0][:-9], binary(c.local.images[0])[1]),
        400,
        r"binary_data_size: got 192 and 183 bytes",
    ),
    "json without end": (tensor(lambda _: b" " * (MOST_JSON + 1)), 413, "^Content-Length: "),
    "no such path": (tensor(lambda _: b"{}", path="/v3/models"), 404, "^POST /v3/models: not found"),
    "an unknown model": (tensor(lambda _: b"{}", path="/v2/models/x%0A/infer"), 404, r"^there is no model 'x\\n'"),
    "loading": (tensor(lambda _: b"", path=f"/v2/repository/models/{NAME}/load"), 403, "--repository"),
    "chunks": (
        raw(b"POST /predict HTTP/1.1\nHost: localhost\nConnection: close\nTransfer-Encoding: chunked\n\n0\n\n"),
        411,
        ".",
    ),
    "two lengths": (
        raw(b"POST /predict HTTP/1.1\nHost: localhost\nContent-Length: 1\nContent-Length: 2\n\n"),
        400,
        "not HTTP",
    ),
    "no http": (raw(b"\x16\x03\x01\x02\x00\x01\x00", bytes(300)), 400, "^the request is not HTTP: "),
    "long headers": (raw(b"GET / HTTP/1.1\nHost: localhost\nA: " + b"a" * 9000 + b"\n\n"), 431, "."),
    "many headers": (
        raw(b"GET / HTTP/1.1\nHost: localhost\n" + b"A: b\n" * 200 + b"\n"),
        431,
        "^got more than 128 headers",
    ),
    "no message": (lambda c: b"\xff" + c.noise(), BAD, "^the request is not a ModelInferRequest|fields"),
    "no tensor": (lambda _: request(raw=[]).SerializeToString(), BAD, r"^input_0\.contents: got nothing"),
    "a message that is cut": (lambda _: request().SerializeToString()[:-5], BAD, "it ends too early"),
    "a message of another shape": (
        lambda _: request(tensor={"shape": [2, 3, SIDE, SIDE]}).SerializeToString(),
        BAD,
        "^raw_input_contents: got 192 bytes, expected 384",
    ),
    "a message to another model": (
        lambda _: request(model_name="x" * 9000).SerializeToString(),
        MISSING,
        "^there is no",
    ),
    "a message that is too large": (lambda _: bytes(6 << 20), LARGE, "."),
    **{name: (predict(lambda _, name=name: BOMBS[name]), 400, hostile_photos.REFUSED[name][1]) for name in BOMBS},
}
BROKEN_NAMES = list(BROKEN)


def beside(port, stop, good):
    """Make slow, cut and half-open connections until the end; `good` counts the slow requests, which are answered."""
    head, body = infer(pixels(1, seed=5))
    dice = random.Random(3)
    with contextlib.ExitStack() as held:
        while not stop.is_set():
            with connected(port) as cut:
                cut.sendall((head + body)[: dice.randrange(len(head + body))])
            if dice.random() < 0.1:
                idle = held.enter_context(connected(port))  # neither sends all of a request nor closes
                idle.sendall(head[: dice.randrange(len(head))])
            with connected(port) as slow:
                for at in range(0, len(head + body), 50):
                    slow.sendall((head + body)[at : at + 50])
                    stop.wait(0.01)
                assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
                good.append(1)


def used(process):
    """Memory in MiB, threads and open files of a process."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    memory, threads = (int(re.search(rf"{name}:\s+(\d+)", text)[1]) for name in ("VmRSS", "Threads"))
    return memory / 1024, threads, len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


@pytest.mark.parametrize(
    "requests", [pytest.param(1500, id="1,500"), pytest.param(10_000, id="10,000", marks=pytest.mark.slow)]
)
def test_every_good_request_is_right_and_every_bad_one_is_refused_while_nothing_grows(requests):
    local = Local()
    with served(SERVER) as (process, port, lines):
        address = re.search(r" and grpc://(127\.0\.0\.1:\d+): ", "".join(lines))[1]
        clients = [Client(port, address, local, random.Random(seed)) for seed in range(CLIENTS)]
        numbers, turn, measured = iter(range(requests)), threading.Lock(), []

        def send(client, most):
            for _ in range(most):
                with turn:
                    number = next(numbers, None)
                if number is None:
                    return
                client.send(number)

        def all_send(most):
            threads = [threading.Thread(target=send, args=(client, most // CLIENTS)) for client in clients]
            for each in threads:
                each.start()
            for each in threads:
                each.join()

        all_send(WARM)
        idle, stop, slow = used(process), threading.Event(), []
        trouble = threading.Thread(target=beside, args=(port, stop, slow))
        trouble.start()
        while sum(each.good + each.bad for each in clients) < requests:
            all_send(WARM)
            measured.append(used(process))
        stop.set()
        trouble.join(LIMIT)
        # The connections of `beside` are closed; threads of gRPC's own come and go.
        until(lambda: used(process)[2] <= idle[2] and used(process)[1] <= idle[1] + 1)
        last = used(process)
        print(f"{idle} after {WARM}, then {measured}, {last} at the end; {len(slow)} slow connections")
        assert [wrong for client in clients for wrong in client.wrong] == []
        statistics = asked(port, f"/v2/models/{NAME}/stats")["model_stats"][0]["falconet"]
        for client in clients:
            client.close()
        process.terminate()
        assert process.wait(LIMIT) == 0
        assert process.stderr.read() == ""
        assert process.stdout.read().startswith(f"stopped: {statistics['requests']:,} requests, ")
    assert sum(client.good + client.bad for client in clients) == requests
    assert sum(client.bad for client in clients) == requests // 10 >= len(BROKEN)
    assert slow
    assert statistics["requests"] == sum(client.good for client in clients) + len(slow)
    assert (statistics["failed"], statistics["refused"], statistics["late"]) == (0, 0, 0)
    assert max(memory for memory, _, _ in [*measured, last]) - idle[0] < 64  # MiB: pictures that are being decoded


def asked(port, path):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
