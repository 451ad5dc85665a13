"""Images opened from ranges of files, as in shards."""

import os
import weakref

import numpy as np
import pytest

from falconet.data.native import binding
from falconet.data.native.binding import Status, Workspace
from falconet.data.storage import Ranges


@pytest.fixture
def file(tmp_path, photo, jpeg):
    """A shard of two photos with other bytes around them, its descriptor, and the photos."""
    first, second = jpeg(photo(40, 30, 1)), jpeg(photo(33, 50, 2))
    path = tmp_path / "shard"
    path.write_bytes(b"head" + first + b"middle" + second + b"tail")
    handle = os.open(path, os.O_RDONLY)
    yield handle, first, second
    os.close(handle)


def opened(library, ranges, **limits):
    workspace = Workspace(library, **limits)
    sizes, statuses = workspace.open_ranges(ranges)
    return workspace, sizes.tolist(), statuses.tolist()


def test_sizes_and_pixels_are_those_of_the_same_files(library, file, tmp_path):
    handle, first, second = file
    places = np.array([[4, len(first), 0, len(first)], [4 + len(first), len(second) + 10, 6, len(second)]])
    checksums = np.array([library.crc32c(first), library.crc32c(b"middle" + second + b"tail")], np.uint32)
    workspace, sizes, statuses = opened(library, Ranges([handle, handle], places, checksums))
    assert (sizes, statuses) == ([[40, 30], [33, 50]], [Status.OK, Status.OK])
    for name, data in (("a", first), ("b", second)):
        (tmp_path / name).write_bytes(data)
    boxes, flips = np.array([[2.0, 3.0, 30.0, 25.0], [0.0, 0.0, 33.0, 50.0]]), np.array([True, False])
    from_ranges, from_files = np.zeros((2, 16, 16, 3), np.uint8), np.zeros((2, 16, 16, 3), np.uint8)
    assert workspace.decode(boxes, flips, from_ranges).tolist() == [Status.OK, Status.OK]
    plain = Workspace(library)
    plain.open([os.fsencode(tmp_path / name) for name in ("a", "b")])
    plain.decode(boxes, flips, from_files)
    assert from_ranges.any()
    assert np.array_equal(from_ranges, from_files)


def test_opened_images_are_given_to_other_decoders_as_they_are(library, file):
    handle, first, second = file
    images = [[4, len(first), 0, len(first)], [0, 4, 0, 4], [4 + len(first), len(second) + 6, 6, len(second)]]
    workspace, _, statuses = opened(library, Ranges([handle] * 3, np.array(images), None))
    assert statuses == [Status.OK, Status.NOT_JPEG, Status.OK]
    block, sizes = workspace.encoded(3)
    assert sizes.tolist() == [len(first), 0, len(second)]
    assert block.tobytes() == first + second
    assert workspace.encoded(9)[1].tolist() == [len(first), 0, len(second), *[0] * 6]  # three were opened
    workspace.open([])
    assert workspace.encoded(3)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("most", "is_kept"), [(2**20, True), (100, False)])
def test_memory_of_large_files_is_given_back(library, file, monkeypatch, most, is_kept):
    monkeypatch.setattr(binding, "KEPT_BYTES", most)
    handle, first, _ = file
    workspace, *_ = opened(library, Ranges([handle], np.array([[4, len(first), 0, len(first)]]), None))
    block, _ = workspace.encoded(1)
    assert block.tobytes() == first
    memory = weakref.ref(block.base)
    del block
    assert (memory() is not None) == is_kept


def test_without_checksums_none_is_compared(library, file):
    handle, first, _ = file
    places = np.array([[4, len(first), 0, len(first)]])
    assert opened(library, Ranges([handle], places, None))[2] == [Status.OK]
    assert opened(library, Ranges([handle], places, np.zeros(1, np.uint32)))[2] == [Status.CHANGED]


CASES = {
    "beyond the end": ([10, 1 << 20, 0, 5], Status.UNREADABLE),
    "no bytes": ([4, 0, 0, 0], Status.NOT_JPEG),
    "other bytes": ([0, 4, 0, 4], Status.NOT_JPEG),
    "before the beginning": ([-1, 5, 0, 5], Status.BAD_REQUEST),
    "less than nothing": ([4, -5, 0, -5], Status.BAD_REQUEST),
    "an image longer than its range": ([4, 50, 0, 51], Status.BAD_REQUEST),
    "an image after its range": ([4, 50, 51, 0], Status.BAD_REQUEST),
    "a skip that overflows": ([4, 50, 2**62, 2**62], Status.BAD_REQUEST),
    "a size that no file has": ([4, 2**62, 0, 5], Status.TOO_LARGE),
    "an end that overflows": ([2**63 - 1, 50, 0, 50], Status.BAD_REQUEST),
    "more than the limit": ([4, 1001, 0, 1001], Status.TOO_LARGE),
}


@pytest.mark.parametrize(("place", "status"), CASES.values(), ids=CASES)
def test_an_impossible_range_is_refused_and_its_neighbour_is_read(library, file, place, status):
    handle, first, _ = file
    good = [4, len(first), 0, len(first)]
    limits = {"most_bytes": 1000} if place[1] == 1001 else {}
    _, _, statuses = opened(library, Ranges([handle, handle], np.array([place, good]), None), **limits)
    assert statuses[0] == status
    if not limits:
        assert statuses[1] == Status.OK


def test_a_closed_file_is_unreadable(library, file):
    assert opened(library, Ranges([10_000], np.array([[0, 4, 0, 4]]), None))[2] == [Status.UNREADABLE]
