"""Uploads: the photos in a request body, which is a photo itself, a form with files, or JSON with base64.

The parts of a form are views of the body, found by one search for its boundary. aiohttp's reader would copy them in the
event loop's thread, and Python's email parser makes text of every line.
"""

import binascii
import contextlib
import email.parser
import email.utils
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message

import numpy as np

from falconet.errors import did_you_mean, printable
from falconet.infer.photos import HEAD, is_photo
from falconet.serve import json_body
from falconet.serve.refusals import RequestError, TooLargeError

EXPECTED = "a JPEG, PNG or WebP file, multipart/form-data with files, or JSON with base64"
MOST_PHOTOS = 256  # per request
MOST_BYTES = 64 << 20  # per photo
MOST_NAME = 100  # characters in a file's name in an answer
MOST_FIELDS = 32  # in a form, besides its files
MOST_FIELD = 1024  # bytes in a field's value
MOST_HEADER = 4096  # bytes in a part's headers
SHOWN = 16  # bytes of a body shown in an error
LONG = 256  # bytes; a JSON string from this length on is not left to the JSON parser
PIECE = 1 << 18  # characters of base64 decoded at once, in half a millisecond, because the GIL is held meanwhile


@dataclass(frozen=True, eq=False)
class Upload:
    """A photo that a client sent, whose content has not been looked at."""

    name: str  # printable and short; empty if the body is the photo
    encoded: memoryview  # a view of the body, unless it was base64


@dataclass(frozen=True, eq=False)
class Uploads:
    """The photos in a request, and its other fields."""

    photos: list[Upload]
    fields: dict[str, str]  # `top` and others, as text


def read(
    body: memoryview, content_type: str, *, most_photos: int = MOST_PHOTOS, most_bytes: int = MOST_BYTES
) -> Uploads:
    """Read the photos in a complete body, of at most `most_bytes` each; RequestError or TooLargeError if that fails.

    A photo is recognised by its first bytes, whatever the Content-Type says: curl's `--data-binary` claims a form.
    """
    head = bytes(body[: max(HEAD, SHOWN)])
    header = f"Content-Type: {content_type}".encode("utf-8", "surrogateescape")  # back to the bytes that were sent
    kind = _message(header) if content_type else Message()
    if is_photo(head):
        found = Uploads([Upload("", body)], {})
    elif content_type and kind.get_content_maintype() == "multipart":
        found = _read_form(body, kind, most_photos=most_photos)
    elif head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        found = _read_json(body, most_photos=most_photos, most_bytes=most_bytes)
    elif not head:
        raise RequestError(f"the body is empty, expected {EXPECTED}")
    else:
        raise RequestError(f"the body is not a photo: it starts with {_shown(head)}, expected {EXPECTED}")
    for number, photo in enumerate(found.photos):
        _check_size(len(photo.encoded), most_bytes, _called(photo.name, number))
    return found


def _read_form(body: memoryview, kind: Message, *, most_photos: int) -> Uploads:
    if kind.get_content_type() != "multipart/form-data":
        raise RequestError(f"Content-Type: got {_shown(kind.get_content_type())}, expected multipart/form-data")
    with _readable("Content-Type: its boundary"):
        boundary = kind.get_boundary() or ""
    if not 0 < len(boundary) <= 70 or not boundary.isascii():
        raise RequestError("Content-Type: multipart/form-data without a boundary of 1 to 70 characters")
    photos, fields = list[Upload](), dict[str, str]()
    for number, part in enumerate(_parts(body, boundary.encode()), start=1):
        if number > most_photos + MOST_FIELDS:
            raise RequestError(f"the form has more than {most_photos + MOST_FIELDS} parts")
        header, content = _headers_and_content(part, number)
        with _readable(f"part {number} of the form: its name"):
            named = _text_of(header.get_param("name", "", header="Content-Disposition"))
            file = header.get_filename()
        if file is not None or is_photo(bytes(content[:HEAD])):
            if file or len(content):  # a browser sends an empty part for a file that was not chosen
                photos.append(Upload(_name(file or "") or f"photo {len(photos) + 1}", content))
                _check_count(len(photos), most_photos)
        elif len(content) > MOST_FIELD:
            raise RequestError(
                f"field {_shown(named)}: {len(content):,} bytes of text, expected at most {MOST_FIELD:,}"
            )
        else:
            fields[_name(named)] = str(content, "utf-8", "replace")
    if not photos:
        given = f"; got the text {_shown(next(iter(fields)))}" if fields else ""
        raise RequestError(f"the form has no file{given}; a file is sent with @: -F photo=@cat.jpg")
    return Uploads(photos, fields)


_AFTER_BOUNDARY = re.compile(rb"(--)|[ \t]*\r\n")
_TRANSFERRED = ("", "7bit", "8bit", "binary")  # as they are


def _parts(body: memoryview, boundary: bytes) -> Iterator[memoryview]:
    """The parts of a form, which lie between boundaries on lines of their own."""
    line, begin = b"--" + boundary, None
    first = [(0, len(line))] if bytes(body[: len(line)]) == line else []
    others = re.finditer(re.escape(b"\r\n" + line), body)  # linear, like any search for a fixed text
    for start, end in itertools.chain(first, (found.span() for found in others)):
        after = _AFTER_BOUNDARY.match(body, end)
        if after is None:
            raise RequestError(f"the form has a line that starts like its boundary, {_shown(line)}")
        if begin is not None:
            yield body[begin : max(begin, start)]
        if after[1]:
            return
        begin = after.end()
    if begin is None:
        raise RequestError(f"the form does not contain its boundary, the line {_shown(line)}")
    raise RequestError("the form ends before its closing boundary")


def _headers_and_content(part: memoryview, number: int) -> tuple[Message, memoryview]:
    head = b"\r\n" + bytes(part[:MOST_HEADER])  # so that a blank line at the start is found
    end = head.find(b"\r\n\r\n")
    if end < 0:
        raise RequestError(f"part {number} of the form: no blank line within {MOST_HEADER:,} bytes of headers")
    header = _message(head[2:end])
    if header.get_content_maintype() == "multipart":
        raise RequestError(f"part {number} of the form: {header.get_content_type()} within a form is not supported")
    coded = str(header.get("Content-Transfer-Encoding", ""))
    if coded.strip().lower() not in _TRANSFERRED:
        raise RequestError(f"part {number} of the form: Content-Transfer-Encoding {_shown(coded)} is not supported")
    return header, part[end + 2 :]


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    """Refuse what Python's parser of header parameters cannot read within the context; it has no error of its own."""
    try:
        yield
    except (TypeError, ValueError):  # from unknown encodings, and pieces with no numbers or huge ones
        raise RequestError(f"{what} cannot be read; expected plain text, or UTF-8 as in name*=utf-8''x") from None


def _message(headers: bytes) -> Message:
    return email.parser.HeaderParser().parsestr(str(headers, "utf-8", "replace"))


def _read_json(body: memoryview, *, most_photos: int, most_bytes: int) -> Uploads:
    try:
        content = json_body.parse(*_without_long(body))
    except ValueError as error:
        raise RequestError(f"the request's JSON: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or ("image" in content) == ("images" in content):
        raise RequestError(f"the request's JSON: {_why_neither(content)}")
    several = content.get("images", [content.get("image")])
    if not isinstance(several, list) or not several:
        raise RequestError(f"images: got {_kind(several)}, expected a list of base64 texts")
    _check_count(len(several), most_photos)
    fields = {_name(key): _field(key, value) for key, value in content.items() if key not in ("image", "images")}
    photos = list[Upload]()
    for number, value in enumerate(several):
        where = f"images[{number}]" if "images" in content else "image"
        photos.append(_photo(value, where, f"photo {number + 1}", most_bytes=most_bytes))
    return Uploads(photos, {key: value for key, value in fields.items() if value is not None})


def _why_neither(content: object) -> str:
    expected = 'expected {"image": "BASE64"} or {"images": ["BASE64", ...]}'
    if not isinstance(content, dict):
        return f"got {_kind(content)}, {expected}"
    if "image" in content:
        return "got both image and images, expected one of them"
    if "inputs" in content:
        return f"got inputs, which tensors have: they are sent to /v2/models/NAME/infer; {expected}"
    near = next(filter(None, (did_you_mean(key, ("image", "images")) for key in content)), "")
    return f"got neither image nor images, {expected}{near}"


def _without_long(body: memoryview) -> tuple[bytes, list[memoryview]]:
    """Replace long strings in JSON by marks; return the JSON and the strings; ValueError if much is left.

    Only quotes are looked for: in valid JSON, what follows a quote is a string unless it begins with punctuation. An
    escaped quote in a string leaves invalid JSON behind.
    """
    text = np.frombuffer(body, np.uint8)
    is_quote = text == ord('"')
    if np.count_nonzero(is_quote) > json_body.MOST_REST:
        raise ValueError(f"more than {json_body.MOST_REST:,} quotes")
    quotes = np.flatnonzero(is_quote)
    kept, cut, done = list[bytes](), list[memoryview](), 0
    for number in np.flatnonzero(np.diff(quotes) > LONG).tolist():
        begin, end = int(quotes[number]) + 1, int(quotes[number + 1])
        if begin > done and text[begin] not in b",:]} \t\r\n":
            kept += [_kept(body[done : begin - 1]), json_body.MARK.encode()]
            cut.append(body[begin:end])
            done = end + 1
    kept.append(_kept(body[done:]))
    left = sum(map(len, kept))
    if left > json_body.MOST_REST:
        raise ValueError(f"{left:,} bytes besides the photos, expected at most {json_body.MOST_REST:,}")
    return b"".join(kept), cut


def _kept(text: memoryview) -> bytes:
    """The text, or as much of it as shows that it is too long."""
    return bytes(text[: json_body.MOST_REST + 1])


def _photo(value: object, where: str, called: str, *, most_bytes: int) -> Upload:
    name = ""
    if isinstance(value, dict):
        for key in value:
            if key not in ("name", "data"):
                raise RequestError(f"{where}: unknown {_shown(key)}, expected name and data")
        name, value = value.get("name", ""), value.get("data")
        if isinstance(name, memoryview):
            name = str(name[: 2 * MOST_NAME], "utf-8", "replace")  # as sent, with its escapes: it is shortened anyway
        if not isinstance(name, str):
            raise RequestError(f"{where}.name: got {_kind(name)}, expected a text")
        where = f"{where}.data"
    if isinstance(value, str):
        value = memoryview(value.encode("utf-8", "replace"))
    if not isinstance(value, memoryview):
        raise RequestError(f"{where}: got {_kind(value)}, expected base64 as a text")
    return Upload(_name(name) or called, _from_base64(value, where, most_bytes=most_bytes))


_ESCAPED = {rb"\/": b"/", rb"\u002B": b"+", rb"\u002b": b"+", rb"\u003D": b"=", rb"\u003d": b"="}  # by PHP and .NET


def _from_base64(text: memoryview, where: str, *, most_bytes: int) -> memoryview:
    """Decode base64; each piece is written straight to its place, so that there is no second copy."""
    if re.search(rb"\\", text):
        plain = bytes(text)
        for escape, character in _ESCAPED.items():
            plain = plain.replace(escape, character)
        text = memoryview(plain)
    if bytes(text[:5]) == b"data:":
        head = bytes(text[:MOST_NAME])
        if not head.partition(b",")[0].endswith(b";base64"):
            raise RequestError(f"{where}: a data URL without base64, expected 'data:image/jpeg;base64,...'")
        text = text[head.index(b",") + 1 :] if b"," in head else text[:0]
    _check_size(len(text) // 4 * 3 - 2, most_bytes, where)
    if not len(text):
        raise RequestError(f"{where}: got an empty text, expected base64")
    out, done = memoryview(bytearray(len(text) // 4 * 3)), 0
    try:
        for begin in range(0, len(text), PIECE):
            piece = binascii.a2b_base64(text[begin : begin + PIECE], strict_mode=True)
            out[done : done + len(piece)] = piece
            done += len(piece)
            if done % 3 and begin + PIECE < len(text):
                raise binascii.Error("Excess data after padding")
    except binascii.Error as error:
        broken = re.search(rb"[\r\n]|\\[rn]", text) is not None
        hint = "; it has line breaks, and `base64 -w 0` writes none" if broken else ""
        raise RequestError(f"{where}: not base64 ({error}){hint}") from None
    return out[:done]


def _field(key: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise RequestError(f"{_name(key)}: got {_kind(value)}, expected a number or a short text")
    return str(value)


def _check_count(photos: int, most: int) -> None:
    if photos > most:
        raise RequestError(f"got more than {most} photos, expected at most {most} in a request")


def _check_size(size: int, most: int, what: str) -> None:
    if size > most:
        raise TooLargeError(f"{what}: {size:,} bytes, expected at most {most:,}")


def _called(name: str, number: int) -> str:
    return "the photo" if not name else name if name == f"photo {number + 1}" else f"photo {number + 1} ({name})"


def _kind(value: object) -> str:
    """A JSON value in words."""
    if isinstance(value, memoryview):
        return "a long text"
    words: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return "nothing" if value is None or value == [] else words.get(type(value), "a number")


def _name(text: str) -> str:
    """Shorten a text to one line of characters that every terminal and every log can take."""
    clean = printable(text.encode("utf-8", "replace").decode("utf-8")).strip()
    return clean if len(clean) <= MOST_NAME else f"{clean[: MOST_NAME - 3]}..."


def _text_of(parameter: object) -> str:
    """The text of a header's parameter, which has three parts if it was encoded."""
    return email.utils.collapse_rfc2231_value(parameter) if isinstance(parameter, str | tuple) else ""


def _shown(value: str | bytes) -> str:
    text = value if isinstance(value, str) else value.decode("latin-1")
    return ascii(text if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN]}...")
