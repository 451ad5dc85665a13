"""One tf.train.Example of a TFRecord: where its image lies, and its label, without reading the image.

Example { Features features = 1; }   Features { map<string, Feature> feature = 1; }
Feature { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }   each list: { repeated value = 1; }
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from falconet.data.objects import BoxArray, proper

IMAGE, LABEL = b"image/encoded", b"image/class/label"
SYNSET, TEXT = b"image/class/synset", b"image/class/text"
SIDES = tuple(b"image/object/bbox/" + side for side in (b"xmin", b"ymin", b"xmax", b"ymax"))
WANTED = frozenset((IMAGE, LABEL, SYNSET, TEXT, *SIDES))

MOST_SMALL = 1 << 20  # bytes of a feature that is not the image
WINDOW = 4096  # bytes looked at at once; all of a record but the image itself usually fits
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5  # protobuf's wire types
Read = Callable[[int, int], bytes]  # from where, how many


class MalformedError(Exception):
    """Bytes that are no Example; the text is the reason, in a few words."""


class Example(NamedTuple):
    skip: int  # bytes of the record before the image
    length: int  # bytes of the image
    label: int  # as it is stored
    name: str  # of the class; empty if the record has none
    boxes: BoxArray


def parse(read: Read, size: int) -> Example:
    """The Example in a record of `size` bytes."""
    image: list[tuple[int, int]] = []
    small: dict[bytes, bytes] = {}  # features but the image, taken along as they are passed
    for number, begin, end in _fields(read, 0, size):
        for inner, entry, entry_end in _fields(read, begin, end) if number == 1 else ():
            key, place, place_end = _entry(read, entry, entry_end) if inner == 1 else (b"", 0, 0)
            if key == IMAGE:
                image = _values(read, place, place_end, kind=1)
            elif key in WANTED:
                small[key] = read(place, min(place_end - place, MOST_SMALL))
    if not image or LABEL not in small:
        raise MalformedError(f"no '{(LABEL if image else IMAGE).decode()}' in it")
    labels = _integers(small[LABEL])
    if len(image) != 1 or len(labels) != 1:
        raise MalformedError(f"{len(image)} images and {len(labels)} labels in it, wanted one of each")
    return Example(image[0][0], image[0][1] - image[0][0], labels[0], _name(small), _boxes(small))


def _name(small: dict[bytes, bytes]) -> str:
    for key in (SYNSET, TEXT):
        values = _lists(small.get(key, b""), kind=1)
        if values:
            return values[0].decode("utf-8", "replace")
    return ""


def _boxes(small: dict[bytes, bytes]) -> BoxArray:
    if not all(side in small for side in SIDES):
        return np.zeros((0, 4), np.float32)
    sides = [_floats(small[side]) for side in SIDES]
    if len({len(side) for side in sides}) != 1:
        raise MalformedError("its object boxes have sides of different numbers")
    return proper(np.array(sides, np.float32).T)


def _entry(read: Read, begin: int, end: int) -> tuple[bytes, int, int]:
    """Key, and the place of the value, of one entry of the map."""
    key, place = b"", (end, end)
    for number, inner, inner_end in _fields(read, begin, end):
        if number == 1:
            key = read(inner, min(inner_end - inner, 64))  # longer ones are none of ours
        elif number == 2:
            place = (inner, inner_end)
    return (key, *place)


def _values(read: Read, begin: int, end: int, *, kind: int) -> list[tuple[int, int]]:
    """The places of the values in a Feature that holds a list of this kind."""
    return [
        (inner, inner_end)
        for number, values, values_end in _fields(read, begin, end)
        if number == kind
        for inner_number, inner, inner_end in _fields(read, values, values_end)
        if inner_number == 1
    ]


def _lists(data: bytes, *, kind: int) -> list[bytes]:
    """The values of a Feature that is at hand."""
    places = _values(lambda at, count: data[at : at + count], 0, len(data), kind=kind)
    return [data[begin:end] for begin, end in places]


def _integers(data: bytes) -> list[int]:
    numbers = []
    for packed in _lists(data, kind=3):
        at = 0
        while at < len(packed):
            value, at = _varint(packed, at)
            numbers.append(value - (1 << 64) if value >> 63 else value)
    return numbers


def _floats(data: bytes) -> list[float]:
    numbers: list[float] = []
    for packed in _lists(data, kind=2):
        if len(packed) % 4:
            raise MalformedError("a list of numbers ends within one")
        numbers += struct.unpack(f"<{len(packed) // 4}f", packed)
    return numbers


def _fields(read: Read, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Number, begin and end of each field of a message; a single number's bytes are its value."""
    fields = []
    while begin < end:
        head = read(begin, min(20, end - begin))  # two varints at most
        tag, at = _varint(head, 0)
        wire = tag & 7
        if wire == DELIMITED:
            length, at = _varint(head, at)
        elif wire == VARINT:
            length = _varint(head, at)[1] - at
        elif wire in (FIXED64, FIXED32):
            length = 8 if wire == FIXED64 else 4
        else:
            raise MalformedError("not a tf.train.Example")
        begin += at
        if length > end - begin:
            raise MalformedError("not a tf.train.Example")
        fields.append((tag >> 3, begin, begin + length))
        begin += length
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise MalformedError("not a tf.train.Example")
