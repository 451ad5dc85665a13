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
    found: dict[bytes, tuple[int, int]] = {}  # feature -> its place in the record
    for number, begin, end in _fields(read, 0, size):
        if number == 1:
            for inner, entry, entry_end in _fields(read, begin, end):
                if inner == 1:
                    key, place = _entry(read, entry, entry_end)
                    if key in WANTED:
                        found[key] = place
    if IMAGE not in found or LABEL not in found:
        raise MalformedError(f"no '{(IMAGE if IMAGE not in found else LABEL).decode()}' in it")
    image = _values(read, *found[IMAGE], kind=1)
    labels = [int(value) for value in _integers(read, *found[LABEL])]
    if len(image) != 1 or len(labels) != 1:
        raise MalformedError(f"{len(image)} images and {len(labels)} labels in it, wanted one of each")
    return Example(image[0][0], image[0][1] - image[0][0], labels[0], _name(read, found), _boxes(read, found))


def _name(read: Read, found: dict[bytes, tuple[int, int]]) -> str:
    for key in (SYNSET, TEXT):
        values = _values(read, *found[key], kind=1) if key in found else []
        if values:
            return read(values[0][0], values[0][1] - values[0][0]).decode("utf-8", "replace")
    return ""


def _boxes(read: Read, found: dict[bytes, tuple[int, int]]) -> BoxArray:
    if not all(side in found for side in SIDES):
        return np.zeros((0, 4), np.float32)
    sides = [_floats(read, *found[side]) for side in SIDES]
    if len({len(side) for side in sides}) != 1:
        raise MalformedError("its object boxes have sides of different numbers")
    return proper(np.array(sides, np.float32).T)


def _entry(read: Read, begin: int, end: int) -> tuple[bytes, tuple[int, int]]:
    """Key and place of the value of one entry of the map."""
    key, place = b"", (end, end)
    for number, inner, inner_end in _fields(read, begin, end):
        if number == 1:
            key = read(inner, min(inner_end - inner, 64))  # longer ones are none of ours
        elif number == 2:
            place = (inner, inner_end)
    return key, place


def _values(read: Read, begin: int, end: int, *, kind: int) -> list[tuple[int, int]]:
    """The places of the values in a Feature that holds a list of this kind."""
    return [
        (inner, inner_end)
        for number, values, values_end in _fields(read, begin, end)
        if number == kind
        for inner_number, inner, inner_end in _fields(read, values, values_end)
        if inner_number == 1
    ]


def _integers(read: Read, begin: int, end: int) -> list[int]:
    numbers = []
    for inner, inner_end in _values(read, begin, end, kind=3):
        data, at = read(inner, inner_end - inner), 0
        while at < len(data):
            value, at = _varint(data, at)
            numbers.append(value - (1 << 64) if value >> 63 else value)
    return numbers


def _floats(read: Read, begin: int, end: int) -> list[float]:
    numbers: list[float] = []
    for inner, inner_end in _values(read, begin, end, kind=2):
        data = read(inner, inner_end - inner)
        if len(data) % 4:
            raise MalformedError("a list of numbers ends within one")
        numbers += struct.unpack(f"<{len(data) // 4}f", data)
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
