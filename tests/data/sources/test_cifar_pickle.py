"""CIFAR's pickles: their numbers are read, their code does not run."""

import io
import os
import pickle
import struct
from typing import ClassVar

import numpy as np
import pytest

from falconet.data.sources.cifar import read_arrays
from falconet.errors import DataError

DATA = np.arange(12, dtype=np.uint8).reshape(3, 4)


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote str, which the official files hold."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_python2_string(self, content):
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(content)

    dispatch[bytes] = save_python2_string


def as_python2(content):
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


WAYS = {
    "official": as_python2,
    "protocol 3": lambda content: pickle.dumps(content, protocol=3),
    "protocol 4": lambda content: pickle.dumps(content, protocol=4),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_arrays_lists_and_bytes_are_read(tmp_path, way):
    path = tmp_path / "batch"
    path.write_bytes(way({b"data": DATA, b"labels": [3, 1, 2]}))
    stored = read_arrays(path)
    np.testing.assert_array_equal(stored[b"data"], DATA)
    assert stored[b"labels"] == [3, 1, 2]


class Hostile:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_file_runs_nothing(tmp_path, protocol):
    path, proof = tmp_path / "batch", tmp_path / "executed"
    path.write_bytes(pickle.dumps({"data": Hostile(proof)}, protocol=protocol))
    with pytest.raises(DataError) as caught:
        read_arrays(path)
    assert str(caught.value) == f"{path}: not a CIFAR python file (it asks for posix.mkdir)"
    assert not proof.exists()


def test_an_ordinary_unpickler_would_run_the_hostile_file(tmp_path):
    pickle.loads(pickle.dumps(Hostile(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def crafted(*opcodes):
    return b"\x80\x02" + b"".join(opcodes) + b"."


REFUSED = {
    "no pickle": b"\x00\x01 garbage",
    "empty": b"",
    "a list": pickle.dumps([1, 2]),
    "a persistent id": crafted(b"K\x01Q"),
    "eval": crafted(b"cbuiltins\neval\n", b"X\x01\x00\x00\x001", b"\x85R"),
    "an attribute of an allowed name": b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.tofile.x\x93.",
    "a memo of tens of gigabytes": crafted(b"K\x01r\xff\xff\xff\xff"),
    "an array without state": crafted(b"}U\x04data", b"cnumpy\nndarray\n", b")R", b"s"),
    "an array that claims more than it has": pickle.dumps({b"data": DATA}, protocol=4).replace(
        DATA.tobytes(), DATA.tobytes()[:-1] + b"."
    )[:-3],
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED.keys())
def test_anything_else_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_arrays(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_damaged_bytes_are_either_read_or_refused(tmp_path):
    path = tmp_path / "batch"
    whole = np.frombuffer(as_python2({b"data": DATA, b"labels": [3, 1, 2]}), np.uint8)
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        content = whole.copy()
        content[generator.integers(0, len(content), 2)] = generator.integers(0, 256, 2)
        path.write_bytes(content[: generator.integers(len(content) // 2, len(content) + 1)].tobytes())
        try:
            read_arrays(path)
        except DataError:
            refused += 1
    assert refused > 100
