"""Request bodies with photos: forms by two independent libraries, base64, what people get wrong, and damage."""

import asyncio
import base64
import json
import re
import tracemalloc

import aiohttp
import numpy as np
import pytest
import urllib3
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import layouts
from falconet.serve import uploads
from falconet.serve.refusals import RefusedError, RequestError, TooLargeError

JPEG = layouts.encoded(layouts.photo(1))
PHOTOS = {kind: layouts.encoded(layouts.photo(2), kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")}
FORM = "application/x-www-form-urlencoded"
STRAY = "multipart/form-data; boundary=x; name=é\udcff"  # as aiohttp gives UTF-8 with a byte that is not


def read(body, content_type=FORM, **limits):
    """Read a body as the server has it, in writable memory."""
    return uploads.read(np.frombuffer(bytearray(body), np.uint8).data, content_type, **limits)


def sent(found):
    return [(photo.name, bytes(photo.encoded)) for photo in found.photos]


def by_urllib3(*parts):
    """A form of (name, file name, content) parts; a part without a file name is a field."""
    return urllib3.encode_multipart_formdata([(name, (file, data) if file else data) for name, file, data in parts])


def by_aiohttp(*parts):
    async def written():
        form = aiohttp.FormData(default_to_multipart=True, quote_fields=False)  # else it writes %20
        for name, file, data in parts:
            form.add_field(name, data, filename=file) if file else form.add_field(name, data.decode())
        payload = form()
        return await payload.as_bytes(), payload.headers["Content-Type"]

    return asyncio.run(written())


def text(photo):
    return base64.b64encode(photo).decode()


@pytest.mark.parametrize("kind", PHOTOS)
@pytest.mark.parametrize(
    "content_type", ["", FORM, "image/png", "application/json", "multipart/form-data; boundary=x", STRAY]
)
def test_a_body_that_is_a_photo_is_read_as_one_whatever_its_type(kind, content_type):
    found = read(PHOTOS[kind], content_type)
    assert sent(found) == [("", PHOTOS[kind])]
    assert found.fields == {}


@pytest.mark.parametrize("form", [by_urllib3, by_aiohttp])
def test_a_form_has_files_and_fields(form):
    found = read(
        *form(("a", "cat.jpg", JPEG), ("top", "", b"3"), ("a", "hund ä.png", PHOTOS["PNG"]), ("b", "x", b"no"))
    )
    assert sent(found) == [("cat.jpg", JPEG), ("hund ä.png", PHOTOS["PNG"]), ("x", b"no")]
    assert found.fields == {"top": "3"}


@pytest.mark.parametrize("form", [by_urllib3, by_aiohttp])
@given(contents=st.lists(st.binary(max_size=200), min_size=1, max_size=5), names=st.data())
def test_forms_by_other_libraries_are_read_back(form, contents, names):
    usual = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters='"\\%;'), min_size=1)
    named = [names.draw(usual.filter(lambda name: len(name) <= 80)) for _ in contents]
    found = read(*form(*(("p", name, data) for name, data in zip(named, contents, strict=True))))
    assert sent(found) == list(zip(named, contents, strict=True))


@given(
    contents=st.lists(st.binary(min_size=1, max_size=900), min_size=1, max_size=5), indent=st.sampled_from([None, 1])
)
def test_base64_is_read_back(contents, indent):
    several = json.dumps({"images": [text(each) for each in contents], "top": 7}, indent=indent).encode()
    found = read(several)
    assert sent(found) == [(f"photo {number}", each) for number, each in enumerate(contents, start=1)]
    assert found.fields == {"top": "7"}
    for escape in ({"/": r"\/"}, {"+": r"\u002B", "=": r"\u003d"}):  # as PHP and .NET write it
        coded = text(contents[0]).translate(str.maketrans(escape))
        assert sent(read(f'{{"image":"{coded}"}}'.encode())) == [("photo 1", contents[0])]


def test_long_base64_is_decoded_piece_by_piece():
    content = np.random.default_rng(0).bytes(uploads.PIECE * 2 + 1)
    assert sent(read(json.dumps({"image": text(content)}).encode())) == [("photo 1", content)]
    early = text(content)
    for place in (uploads.PIECE - 2, uploads.PIECE - 1):  # padding at the end of a piece that is not the last
        wrong = early[:place] + "=" * (uploads.PIECE - place) + early[uploads.PIECE :]
        with pytest.raises(RequestError, match=r"^image: not base64 \(Excess data after padding\)$"):
            read(json.dumps({"image": wrong}).encode())


def test_json_may_name_photos_and_send_data_urls():
    content = {
        "images": [
            {"name": "a.jpg", "data": text(JPEG)},
            f"data:image/png;base64,{text(PHOTOS['PNG'])}",
            text(b"GIF89a"),
        ],
        "top": 2,
        "model": "birds",
        "ignored": None,
    }
    found = read(b"\xef\xbb\xbf \n" + json.dumps(content).encode(), "application/json")
    assert sent(found) == [("a.jpg", JPEG), ("photo 2", PHOTOS["PNG"]), ("photo 3", b"GIF89a")]
    assert found.fields == {"top": "2", "model": "birds"}


def test_photos_in_a_form_are_not_copied():
    parts = [("p", f"{number}.bin", np.random.default_rng(number).bytes(4_000_000)) for number in range(4)]
    body, content_type = by_urllib3(*parts)
    held = np.frombuffer(body, np.uint8)
    tracemalloc.start()
    found = uploads.read(held.data, content_type)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [bytes(photo.encoded) for photo in found.photos] == [data for _, _, data in parts]
    assert peak < 1_000_000


def test_names_are_printable_and_short():
    long, odd = "x" * 300 + ".jpg", "a\x1b[2J\u202e.jpg"
    content = {"images": [{"name": name, "data": text(JPEG)} for name in (long, odd, "\ud800", "  ")]}
    names = [photo.name for photo in read(json.dumps(content).encode()).photos]
    assert names == ["x" * 97 + "...", "a\\x1b[2J\\u202e.jpg", "?", "photo 4"]


def test_a_file_that_was_not_chosen_is_passed_over():
    body = (
        b'preamble\r\n--x  \r\nContent-Disposition: form-data; name="f"; filename=""\r\n\r\n\r\n'
        b'--x\r\nContent-Disposition: form-data; name="g"\r\n\r\n' + JPEG + b"\r\n-x\r\n--x--\r\nepilogue"
    )
    assert sent(read(body, 'multipart/form-data; boundary="x"')) == [("photo 1", JPEG + b"\r\n-x")]


HEAD = b'--x\r\nContent-Disposition: form-data; name="p"; filename="a"\r\n'
EXPECTED = ", expected a JPEG, PNG or WebP file, multipart/form-data with files, or JSON with base64"
X = "multipart/form-data; boundary=x"
MISTAKES = {
    "nothing": (b"", "", f"the body is empty{EXPECTED}"),
    "text": (b"hello", "", f"the body is not a photo: it starts with 'hello'{EXPECTED}"),
    "a form by -d": (b"photo=cat.jpg", FORM, f"the body is not a photo: it starts with 'photo=cat.jpg'{EXPECTED}"),
    "no @": (
        b'--x\r\nContent-Disposition: form-data; name="x"\r\n\r\ncat.jpg\r\n--x--\r\n',
        X,
        "the form has no file; got the text 'x'; a file is sent with @: -F photo=@cat.jpg",
    ),
    "no parts": (b"--x--", X, "the form has no file; a file is sent with @: -F photo=@cat.jpg"),
    "another boundary": (b"--y\r\n\r\n--y--", X, "the form does not contain its boundary, the line '--x'"),
    "no boundary": (
        b"--x",
        "multipart/form-data",
        "Content-Type: multipart/form-data without a boundary of 1 to 70 characters",
    ),
    "a stray byte in the boundary": (
        b"--x--",
        "multipart/form-data; boundary=é\udcff",
        "Content-Type: multipart/form-data without a boundary of 1 to 70 characters",
    ),
    "a stray byte in the type": (
        b"--x--",
        "multipart/é\udcff; boundary=x",
        r"Content-Type: got 'multipart/\xe9\ufffd', expected multipart/form-data",
    ),
    "cut": (HEAD + b"\r\n" + JPEG, X, "the form ends before its closing boundary"),
    "a line like the boundary": (
        HEAD + b"\r\nab\r\n--xy\r\n--x--",
        X,
        "the form has a line that starts like its boundary, '--x'",
    ),
    "mixed": (
        b"--x--",
        "multipart/mixed; boundary=x",
        "Content-Type: got 'multipart/mixed', expected multipart/form-data",
    ),
    "nested": (
        HEAD + b"Content-Type: multipart/mixed; boundary=y\r\n\r\n--y--\r\n--x--",
        X,
        "part 1 of the form: multipart/mixed within a form is not supported",
    ),
    "base64 in a form": (
        HEAD + b"Content-Transfer-Encoding: base64\r\n\r\nAAAA\r\n--x--",
        X,
        "part 1 of the form: Content-Transfer-Encoding 'base64' is not supported",
    ),
    **{
        f"a name of {what}": (
            b"--x\r\nContent-Disposition: form-data; " + written + b"\r\n\r\nAAAA\r\n--x--",
            X,
            "part 1 of the form: its name cannot be read; expected plain text, or UTF-8 as in name*=utf-8''x",
        )
        for what, written in {
            "pieces with and without a number": b"filename*=utf-8''a; filename*0=b",
            "an encoding with rules": b"filename*=idna''a..b",
            "an encoding that refuses all": b"filename*=undefined''a",
            "an encoding with a NUL": b"filename*=utf\0-8''a",
        }.items()
    },
    "a boundary in a piece with 5,000 digits": (
        b"--x--",
        f"multipart/form-data; boundary*{'9' * 5000}=x",
        "Content-Type: its boundary cannot be read; expected plain text, or UTF-8 as in name*=utf-8''x",
    ),
    "long headers": (
        HEAD + b"X: " + b"y" * 5000 + b"\r\n\r\nAAAA\r\n--x--",
        X,
        "part 1 of the form: no blank line within 4,096 bytes of headers",
    ),
    "a long field": (
        b'--x\r\nContent-Disposition: form-data; name="t"\r\n\r\n' + b"a" * 1025 + b"\r\n--x--",
        X,
        "field 't': 1,025 bytes of text, expected at most 1,024",
    ),
    "not an object": (b'{"image"}', "", "the request's JSON: Expecting ':' delimiter: line 1 column 9 (char 8)"),
    "no image": (
        b'{"imgae": "AAAA"}',
        "",
        'the request\'s JSON: got neither image nor images, expected {"image": "BASE64"} or'
        ' {"images": ["BASE64", ...]}; did you mean \'image\'?',
    ),
    "both": (
        b'{"image": "AAAA", "images": []}',
        "",
        "the request's JSON: got both image and images, expected one of them",
    ),
    "tensors": (
        b'{"inputs": []}',
        "",
        "the request's JSON: got inputs, which tensors have: they are sent to /v2/models/NAME/infer; expected"
        ' {"image": "BASE64"} or {"images": ["BASE64", ...]}',
    ),
    "no list": (b'{"images": "AAAA"}', "", "images: got a text, expected a list of base64 texts"),
    "an empty list": (b'{"images": []}', "", "images: got nothing, expected a list of base64 texts"),
    "a number": (b'{"images": ["AAAA", 5]}', "", "images[1]: got a number, expected base64 as a text"),
    "no data": (b'{"images": [{"name": "a"}]}', "", "images[0].data: got nothing, expected base64 as a text"),
    "another key": (b'{"image": {"nmae": "a"}}', "", "image: unknown 'nmae', expected name and data"),
    "empty text": (b'{"image": ""}', "", "image: got an empty text, expected base64"),
    "an address": (b'{"image": "cat.jpg"}', "", "image: not base64 (Only base64 data is allowed)"),
    "no padding": (b'{"images": ["AAAA", "AAA"]}', "", "images[1]: not base64 (Incorrect padding)"),
    "a data URL of text": (
        b'{"image": "data:text/plain,hello"}',
        "",
        "image: a data URL without base64, expected 'data:image/jpeg;base64,...'",
    ),
    "lines": (
        json.dumps({"image": base64.encodebytes(JPEG).decode()}).encode(),
        "",
        "image: not base64 (Only base64 data is allowed); it has line breaks, and `base64 -w 0` writes none",
    ),
    "lines by a shell": (
        b'{"image": "' + base64.encodebytes(JPEG) + b'"}',
        "",
        "image: not base64 (Only base64 data is allowed); it has line breaks, and `base64 -w 0` writes none",
    ),
    "a field that is a list": (
        b'{"image": "AAAA", "top": [5]}',
        "",
        "top: got a list, expected a number or a short text",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_line(name):
    body, content_type, expected = MISTAKES[name]
    with pytest.raises(RequestError, match=f"^{re.escape(expected)}$"):
        read(body, content_type)


def test_photos_and_bytes_are_limited():
    several, one = [("p", f"{n}.jpg", JPEG) for n in range(3)], len(JPEG)
    coded = json.dumps({"images": [text(JPEG)] * 3}).encode()
    assert len(read(*by_urllib3(*several), most_photos=3, most_bytes=one).photos) == 3
    assert len(read(coded, most_photos=3, most_bytes=one).photos) == 3
    for body in (by_urllib3(*several), (coded, "")):
        with pytest.raises(RequestError, match=r"^got more than 2 photos, expected at most 2 in a request$"):
            read(*body, most_photos=2)
    for body, name in ((by_urllib3(*several), r"photo 1 \(0.jpg\)"), ((coded, ""), r"\S+"), ((JPEG, ""), "the photo")):
        with pytest.raises(TooLargeError, match=rf"^{name}: [\d,]+ bytes, expected at most 1,000$"):
            read(*body, most_bytes=1000)
    fields = [(f"f{n}", "", b"v") for n in range(uploads.MOST_FIELDS + 4)]
    with pytest.raises(RequestError, match=r"^the form has more than 35 parts$"):
        read(*by_urllib3(*fields), most_photos=3)


SIZE = 8_000_000
HOSTILE = {
    "empty lists": b'{"images": [' + b"[]," * (SIZE // 3),
    "short texts": b'{"images": [' + b'"AAAA",' * (SIZE // 7),
    "quotes": b"{" + b'"' * SIZE,
    "spaces": b'{"image": ' + b" " * SIZE + b'"AAAA"}',
    "escapes": b'{"image": "' + rb"\/" * (SIZE // 2) + b'"}',
    "escaped quotes": b'{"image": "' + (b"A" * 300 + rb"\"") * (SIZE // 302) + b'"}',
    "digits": b'{"a":' + b"1" * SIZE + b',"image":"AAAA"}',
    "long keys": b'{"' + b"A" * SIZE + b'": 1, "image": "AAAA"}',
    "brackets": b'{"images": ' + b"[" * SIZE,
}
FORMS = {
    "boundaries": b"--x\r\n" * (SIZE // 5),
    "line breaks": b"--x\r\n" + b"\r\n" * (SIZE // 2),
    "beginnings of boundaries": b"--x\r\n" + b"\r\n--" * (SIZE // 4) + b"\r\n--x--",
    "almost boundaries": b"--x\r\n\r\n" + b"\r\n--xy" * (SIZE // 6) + b"\r\n--x--",
    "spaces after a boundary": b"--x" + b" " * SIZE + b"\r\n\r\n\r\n--x--",
    "parameters": HEAD[:-2] + b"; a=b" * 800 + b"\r\n\r\n\r\n" + b"--x--",
    "a long number": HEAD[:-15] + b"; filename*" + b"9" * 4000 + b"*=x\r\n\r\n\r\n--x--",
}


@pytest.mark.parametrize("name", [*HOSTILE, *FORMS])
def test_hostile_bodies_take_little_memory(name):
    body = HOSTILE.get(name) or FORMS[name]
    held = np.frombuffer(body, np.uint8)
    tracemalloc.start()
    try:
        uploads.read(held.data, X if name in FORMS else "")
    except RefusedError as error:
        said = str(error)
    else:
        said = ""
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in said
    assert peak < 4 * SIZE  # json.loads would take 25 times as much


def unharmed(body, content_type):
    """Read a body; anything but photos or a one-line refusal fails the test."""
    try:
        found = read(body, content_type, most_photos=8, most_bytes=1 << 20)
    except RefusedError as error:
        said = str(error)
    else:
        assert found.photos
        for text in (*(photo.name for photo in found.photos), *found.fields):
            assert len(text) <= uploads.MOST_NAME
            text.encode()
        return
    assert said.isprintable()
    assert len(said) < 400


@given(
    start=st.sampled_from([b"", b"{", b'{"image":"', b"--x\r\n", HEAD + b"\r\n"]),
    rest=st.binary(max_size=300),
    kind=st.text() | st.just(X),
)
def test_any_bytes_are_photos_or_refused(start, rest, kind):
    unharmed(start + rest, kind)


SMALL = layouts.encoded(Image.new("RGB", (4, 4)), "PNG")
BODIES = [
    by_urllib3(("a", "ä.png", SMALL), ("top", "", b"3"), ("b", "b.png", SMALL)),
    by_aiohttp(("a", "ä.png", SMALL), ("top", "", b"3")),
    (json.dumps({"images": [text(SMALL), {"name": "x", "data": text(SMALL * 4)}], "top": 5}).encode(), ""),
    (json.dumps({"image": f"data:image/png;base64,{text(SMALL * 4)}"}).encode(), "application/json"),
    (SMALL, "image/png"),
]


@settings(max_examples=600)
@given(data=st.data(), which=st.sampled_from(BODIES))
def test_damaged_bodies_are_photos_or_refused(data, which):
    body, content_type = bytearray(which[0]), which[1]
    pieces = st.sampled_from(
        [b"", b'"', b"\\", b"\r\n", b"--", b";", b"*", b"=", b"NaN", b"[", b"{", b"\xff"]
    ) | st.binary(max_size=4)
    for place, old, new in data.draw(
        st.lists(st.tuples(st.integers(0, len(body)), st.integers(0, 4), pieces), max_size=6)
    ):
        body[place : place + old] = new
    unharmed(body[: data.draw(st.integers(0, len(body)) | st.just(len(body)))], content_type)
