"""Shards are read from their ranges, kept open within limits, read ahead, and checked."""

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as tensorboards
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

import layouts
from falconet.data import layout, native
from falconet.data.native.binding import Workspace
from falconet.data.readers import opener
from falconet.data.shards import Readahead, Shards, crc32c, crc32c_numpy, unmasked
from falconet.errors import DataError


@pytest.fixture
def paths(tmp_path):
    for number in range(6):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 100)
    return [tmp_path / str(number) for number in range(6)]


@pytest.fixture
def open_files(tmp_path):
    """The number of open shards; other files of this process come and go."""

    def count():
        found = 0
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # such as that of the folder itself
                found += file.readlink().is_relative_to(tmp_path)
        return found

    return count


def test_bytes_are_read_from_their_range(paths):
    paths[2].write_bytes(bytes(range(50)))
    assert Shards(paths).read(2, begin=10, size=3) == bytes((10, 11, 12))
    assert Shards(paths).read(2, begin=48, size=9) == bytes((48, 49))


def test_a_file_is_opened_once(paths, open_files):
    shards = Shards(paths)
    for _ in range(3):
        shards.read(1, begin=0, size=1)
    assert open_files() == 1
    shards.close()
    assert open_files() == 0


def test_open_files_stay_below_the_limit_of_the_process(paths, open_files, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda what: (4, 4))
    shards = Shards(paths)
    with shards.files([0, 1, 2, 3, 3, 5]) as files:
        assert [os.pread(file, 1, 0)[0] for file in files] == [0, 1, 2, 3, 3, 5]
    assert open_files() == 2
    shards.close()


def test_files_are_closed_with_the_object(paths, open_files):
    shards = Shards(paths)
    shards.read(0, begin=0, size=1)
    del shards
    assert open_files() == 0


def test_many_threads_read_at_once(paths):
    shards, wrong = Shards(paths), []

    def read(seed):
        for number in np.random.default_rng(seed).integers(0, 6, 300).tolist():
            if shards.read(number, begin=50, size=1) != bytes([number]):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_missing_shard_is_named(paths):
    paths[3].unlink()
    with pytest.raises(DataError) as caught:
        Shards(paths).read(3, begin=0, size=1)
    assert str(caught.value) == f"{paths[3]}: cannot be opened (No such file or directory)"


@pytest.fixture
def asked(monkeypatch):
    """The reads requested from the system, in order: where from, and how many bytes."""
    calls = []
    monkeypatch.setattr("os.posix_fadvise", lambda file, begin, size, advice: calls.append((begin, size)))
    return calls


def test_shards_that_fit_into_memory_are_requested_in_order_and_once(paths, asked, monkeypatch):
    monkeypatch.setattr("falconet.data.shards.STRIDE", 150)
    ahead = Readahead(Shards(paths), memory=1200)
    for _ in range(9):
        ahead.advance()
    assert asked == [(0, 100), (0, 50), (50, 50), (0, 100)] * 2
    assert ahead.done


def test_shards_that_do_not_fit_are_not_requested(paths, asked):
    ahead = Readahead(Shards(paths), memory=1199)
    ahead.advance()
    assert asked == []


def test_every_reader_of_shards_advances_the_readahead(tmp_path, asked):
    root = layouts.tar_archives(layouts.class_folders(tmp_path / "folders"), tmp_path / "tar")
    for read in (read_natively, lambda source: source.encoded(0)):
        source = layout.load_photos(root).train
        asked.clear()
        read(source)
        assert sum(size for _, size in asked) == sum(path.stat().st_size for path in source.shards.paths)


def read_natively(source):
    library = native.library()
    if library is None:
        pytest.skip(native.why_not())
    opener(source)(Workspace(library), np.array([0]))


# RFC 3720, appendix B.4, and the check value of the CRC catalogue.
PUBLISHED = {
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"": 0,
}


def portable(data):
    library = native.library()
    if library is None:
        pytest.skip(native.why_not())
    return library.crc32c(data, portable=True)


@pytest.mark.parametrize("function", [crc32c, crc32c_numpy, portable])
@pytest.mark.parametrize(("data", "checksum"), PUBLISHED.items())
def test_checksums_equal_published_ones(function, data, checksum):
    assert function(data) == checksum


@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 129, 255, 257, 1000, 4096, 70_001])
def test_every_implementation_agrees_with_tensorboards(length):
    data = np.random.default_rng(length).bytes(length)
    assert crc32c(data) == crc32c_numpy(data) == portable(data) == tensorboards(data)


def test_the_mask_is_tensorflows():
    data = b"some bytes"
    assert unmasked(masked_crc32c(data)) == crc32c(data)
