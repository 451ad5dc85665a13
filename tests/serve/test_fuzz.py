"""A fuzzer of the request parsers: it changes real bodies, and keeps those that reach lines which no other has reached.

The lines are counted by Python's own trace function, so that it needs no instrumented interpreter.
"""

import base64
import json
import math
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image
from urllib3 import encode_multipart_formdata

import layouts
from falconet.errors import printable
from falconet.serve import grpc_messages, json_body, protocol, uploads
from falconet.serve.protocol import HEADER
from falconet.serve.refusals import RefusedError
from grpc_requests import parameter, request
from served import SIDE, about, binary, pixels

SERVE = str(Path(uploads.__file__).parent)
SERVED = about()
PHOTO = layouts.encoded(Image.new("RGB", (4, 4)), "PNG")
FORM, KIND = encode_multipart_formdata(
    [("a", ("ä.png", PHOTO)), ("top", "3"), ("b", ("b.png", PHOTO))], boundary="bound"
)
CODED = base64.b64encode(PHOTO * 5).decode()
TENSOR = {"name": "input_0", "shape": [1, 3, SIDE, SIDE], "datatype": "UINT8"}
NUMBERS = {"inputs": [TENSOR | {"data": pixels(1).ravel().tolist()}], "id": "x", "parameters": {"timeout": 5}}
WISHED = {"name": "output_0", "parameters": {"classification": 3, "binary_data": False}}
TENSOR_BODY, TENSOR_HEADERS = binary(pixels(2))
# Pieces of the formats, and numbers at the ends of their ranges.
WORDS = [
    *(b'"', b"\\", b"\r\n", b"--", b";", b"*", b"=", b"NaN", b"[", b"]", b"{", b"}", b",", b":", b" ", b"\0", b"\xff"),
    *(b"-1", b"1e999", b"256", b"007", b"99999999999999999999", b"\\u0000", b"\\ud800", b"data:", b";base64,", b"null"),
    *(b"--bound", b"--bound--", b"\r\n\r\n", b'filename="', b"filename*=utf-8''%ff", b"\xef\xbb\xbf", b"\x7f" * 5),
    *(b"; filename*=utf-8''a; filename*0=b", b"; filename*=undefined''a", b"; name*=idna''a..b", b"; name*=u\0''a"),
    *(b'"parameters":{"timeout":1%s},' % (b"0" * 400), b"0" * 400),
    *(b"\x80" * 10, b"\xff\xff\xff\xff\x0f", b"\x0a\x00", b"\x3a\x00", b"\x2a\x02\x08\x00"),
]


def read_upload(body):
    kind = ("", KIND, "multipart/form-data; boundary*=utf-8''bound")[body[0] % 3] if body else ""
    found = uploads.read(memoryview(body)[1:], kind, most_photos=8, most_bytes=1 << 20)
    assert found.photos
    for text in (*(photo.name for photo in found.photos), *found.fields):
        assert len(text) <= uploads.MOST_NAME
        text.encode()


def read_tensor(body):
    asked = protocol.read_request(memoryview(body), None, SERVED)
    assert asked.images.shape[1:] == SERVED.image_shape


def read_binary(body):
    head, _, rest = body.partition(b"|")  # the header's value and the body
    asked = protocol.read_request(memoryview(rest), head.decode("latin-1"), SERVED)
    assert asked.images.shape[1:] == SERVED.image_shape


def read_json(body):
    try:
        found = json_body.loads(memoryview(body))
    except ValueError:
        return
    if not has_numbers(found):  # which are looked at later, by the shape that they should have
        assert found == json.loads(body)


def has_numbers(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, json_body.Numbers) or any(map(has_numbers, inner))


def read_message(body):
    grpc_messages.id_of(body)
    sent = grpc_messages.split(body)
    asked = grpc_messages.read_request(grpc_messages.read_message(sent), sent.raw, SERVED)
    assert asked.images.shape[1:] == SERVED.image_shape
    grpc_messages.write_answer(asked.images.reshape(len(asked.images), -1)[:, :5].astype("f4"), asked, SERVED)


NESTED = {"outputs": [WISHED], **NUMBERS, "inputs": [TENSOR | {"data": pixels(1).tolist()}]}
CORPORA = {
    read_upload: [
        b"\0" + PHOTO,
        b"\1" + FORM,
        b"\2" + FORM,
        b"\0" + json.dumps({"images": [CODED, {"name": "x", "data": CODED}], "top": 5}).encode(),
        b"\0" + json.dumps({"image": f"data:image/png;base64,{CODED}"}).encode(),
    ],
    read_tensor: [json.dumps(NUMBERS).encode(), json.dumps(NESTED, indent=1).encode()],
    read_binary: [TENSOR_HEADERS[HEADER].encode() + b"|" + TENSOR_BODY],
    read_json: [json.dumps(NUMBERS).encode(), json.dumps(NESTED, indent=1).encode(), b'{"data": [[1, 2], [3, 4]]}'],
    read_message: [
        request().SerializeToString(),
        request(raw=[], tensor={"contents": {"uint_contents": [7] * 3 * SIDE**2}}).SerializeToString(),
        request(parameters={"timeout": parameter(5)}, id="x").SerializeToString(),
        request(
            outputs=[{"name": "output_0", "parameters": {"classification": parameter(2)}}],
        ).SerializeToString(),
    ],
}


@dataclass
class Fuzzer:
    """Changes bodies at random and remembers those that reached new lines."""

    read: object
    corpus: list[bytes]
    random: random.Random
    reached: set = field(default_factory=set)  # pairs of lines, one after the other
    tried: int = 0
    refused: int = 0

    def run(self, *, bodies=math.inf, seconds=math.inf):
        for body in list(self.corpus):
            self.tell(body)
        until = time.monotonic() + seconds
        while self.tried < bodies and time.monotonic() < until:
            body = self.changed(self.random.choice(self.corpus))
            before = len(self.reached)
            self.tell(body)
            if len(self.reached) > before:
                self.corpus.append(body)

    def tell(self, body):
        """Let the parser read a body; anything but a value or a one-line refusal fails the test."""
        self.tried += 1
        last = {}

        def trace(frame, event, _):
            if not frame.f_code.co_filename.startswith(SERVE):
                return None
            code = frame.f_code
            self.reached.add((code, last.get(code), frame.f_lineno))
            last[code] = frame.f_lineno
            return trace

        outer = sys.gettrace()
        sys.settrace(trace)
        try:
            self.read(body)
        except RefusedError as error:
            said, self.refused = str(error), self.refused + 1
        except BaseException:
            sys.settrace(outer)
            print("body:", body)
            raise
        else:
            said = ""
        finally:
            sys.settrace(outer)
        assert "\n" not in printable(said), body
        assert len(said) < 800, body
        said.encode()

    def changed(self, body):
        new = bytearray(body)
        for _ in range(self.random.choice((1, 1, 2, 4, 8))):
            at = self.random.randrange(len(new) + 1)
            size = self.random.choice((0, 1, 2, 4, 16, 64))
            way = self.random.randrange(6)
            if way == 0:
                new[at : at + size] = self.random.choice(WORDS)
            elif way == 1:
                new[at : at + size] = self.random.randbytes(self.random.randrange(5))
            elif way == 2 and at < len(new):
                new[at] ^= 1 << self.random.randrange(8)
            elif way == 3:
                other = self.random.choice(self.corpus)
                begin = self.random.randrange(len(other) + 1)
                new[at : at + size] = other[begin : begin + self.random.choice((1, 8, 64, 512))]
            elif way == 4:
                new[at:at] = new[at : at + size] * self.random.choice((1, 2, 30))
            elif self.random.random() < 0.3:
                del new[at:]
        return bytes(new[: 1 << 16])


@pytest.mark.parametrize("read", CORPORA, ids=lambda read: read.__name__)
@pytest.mark.parametrize(
    "most",
    [pytest.param({"bodies": 2000}, id="short"), pytest.param({"seconds": 60.0}, id="long", marks=pytest.mark.slow)],
)
def test_changed_bodies_are_read_or_refused_in_one_line(read, most):
    fuzzer = Fuzzer(read, list(CORPORA[read]), random.Random(1))
    begun = len(fuzzer.corpus)
    fuzzer.run(**most)
    print(f"{fuzzer.tried:,} bodies, {fuzzer.refused:,} refused, {len(fuzzer.corpus)} reached something new")
    assert len(fuzzer.corpus) > begun  # else it does not see what the parser does
    assert fuzzer.refused or read is read_json
