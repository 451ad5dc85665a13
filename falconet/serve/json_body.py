"""Parses JSON whose long lists of numbers are read by numpy and never become Python objects.

`json.loads` holds the GIL: a megabyte of `[],` stops all threads for 0.1 s and takes 25 MB. Numpy works without it.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_REST = 16 << 10  # bytes of JSON besides the lists of numbers
MOST_DEPTH = 32  # nested lists and objects
MARK = "NaN"  # stands for what was cut out; it is not JSON, so it is refused if a client sends it
_DATA = re.compile(rb'"data"\s*:\s*(?=\[)')
_IN_LISTS = np.isin(np.arange(256), np.frombuffer(b"0123456789,[] \t\r\n", dtype=np.uint8))
_Text = npt.NDArray[np.uint8]  # one dimension


@dataclass(frozen=True)
class Numbers:
    """A list under the key "data", flat or nested, made only of digits, commas, brackets and white space."""

    text: bytes

    def pixels(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint16] | None:
        """The values, of at most three digits each; None if the list does not have the shape or the size.

        This takes at most about ten times the text's memory.
        """
        text = self._dense()
        if text is None or len(text) < 2 * prod(shape):  # a digit and a comma or bracket for each
            return None
        digit = _digits(text)
        skeletons = (_skeleton(shape), _skeleton((prod(shape),)))
        if text[~digit].tobytes() not in skeletons or _starts(digit) != prod(shape):
            return None
        # As many numbers as places: each has one, if none is after a closing or before an opening bracket.
        if ((text[:-1] == ord("]")) & digit[1:]).any() or (digit[:-1] & (text[1:] == ord("["))).any():
            return None
        leading = (text[1:-1] == ord("0")) & ~digit[:-2] & digit[2:]
        if leading.any() or (digit[3:] & digit[2:-1] & digit[1:-2] & digit[:-3]).any():  # 007, 1000
            return None
        value = np.where(digit, text - ord("0"), 0).astype(np.uint16)
        value, digit = np.append(np.uint16(0), value), np.append(False, digit)  # so that two precede the first number
        last = digit[2:-1] & ~digit[3:]
        return value[2:-1][last] + 10 * value[1:-2][last] + 100 * (value[:-3] * digit[1:-2])[last]

    def _dense(self) -> _Text | None:
        """The text without white space; None if some was within a number."""
        text = np.frombuffer(self.text, dtype=np.uint8)
        white = text <= ord(" ")
        if not white.any():
            return text
        dense = text[~white]
        return dense if _starts(_digits(dense)) == _starts(_digits(text)) else None


def loads(text: memoryview) -> Any:
    """Parse JSON, with `Numbers` for each list of whole numbers under the key "data"; ValueError if it is not JSON.

    Only MOST_REST bytes may remain, and lists and objects may be nested MOST_DEPTH deep.
    """
    kept, lists = _cut(np.frombuffer(text, dtype=np.uint8))
    if len(kept) > MOST_REST:
        raise ValueError(f"{len(kept):,} bytes besides the numbers of data, expected at most {MOST_REST:,}")
    return parse(kept, lists)


def parse(text: bytes, cut: Iterable[object]) -> Any:
    """Parse short JSON in which marks stand for what was cut out; raise ValueError if it is not JSON, or too deep."""
    left = iter(cut)

    def constant(word: str) -> object:
        found = next(left, None) if word == MARK else None
        if found is None:
            raise ValueError(f"{word} is not a number")
        return found

    try:
        content = json.loads(text, parse_constant=constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_depth(content)
    return content


def _cut(text: _Text) -> tuple[bytes, list[Numbers]]:
    """Replace the lists of numbers under "data" by marks; return the text and the lists."""
    if len(text) <= MOST_REST and not _DATA.search(text.data):  # with a binary tensor: numpy is not needed
        return text.tobytes(), []
    others = np.flatnonzero(~_IN_LISTS[text])
    kept, lists, at = list[bytes](), list[Numbers](), 0
    if len(others) <= MOST_REST:  # otherwise the rest is too long, whatever is cut
        for found in _DATA.finditer(text.data):
            start = found.end()
            following = int(np.searchsorted(others, start))
            run = text[start : others[following] if following < len(others) else len(text)].tobytes()
            run = run[: run.rfind(b"]") + 1]
            if run and run.count(b"[") == run.count(b"]"):
                kept += [text[at:start].tobytes(), MARK.encode()]
                lists.append(Numbers(run))
                at = start + len(run)
    return b"".join([*kept, text[at:].tobytes()]), lists


def _check_depth(content: object) -> None:
    level = [content]
    for _ in range(MOST_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise ValueError("nested too deeply")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _digits(text: _Text) -> npt.NDArray[np.bool]:
    return (text - np.uint8(ord("0"))) <= 9  # smaller codes wrap around


def _starts(digit: npt.NDArray[np.bool]) -> int:
    """The number of numbers; the first character is a bracket."""
    return int(np.count_nonzero(digit[1:] & ~digit[:-1]))


def _skeleton(shape: tuple[int, ...]) -> bytes:
    """The brackets and commas of nested lists of this shape."""
    text = b""
    for length in reversed(shape):
        text = b"[" + b",".join([text] * length) + b"]"
    return text
