"""Restart marking: the same pixels in Pillow, and markers where they were requested."""

import io

import numpy as np
import pytest
from PIL import Image

from falconet.data.native.binding import Status, Workspace


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("sampling", [0, 1, 2])
@pytest.mark.parametrize("quality", [10, 75, 92, 100])
def test_pillow_sees_the_same_pixels(library, photo, jpeg, sampling, quality):
    for options in ({}, {"optimize": True}, {"restart_marker_blocks": 5}):
        data = jpeg(photo(133, 117, quality), quality=quality, subsampling=sampling, **options)
        marked = library.restart_marked(data, interval=8)
        np.testing.assert_array_equal(pixels(marked), pixels(data))


@pytest.mark.parametrize(
    "sampling", [((4, 1), (1, 1), (1, 1)), ((1, 2), (1, 1), (1, 1)), ((2, 2), (2, 1), (1, 2)), ((3, 1), (1, 1), (1, 1))]
)
def test_odd_samplings_keep_their_pixels(library, photo, odd_jpeg, sampling):
    data = odd_jpeg(photo(101, 75, 1), sampling)
    np.testing.assert_array_equal(pixels(library.restart_marked(data, interval=3)), pixels(data))


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (9, 70), (300, 2)])
def test_grey_photos_and_every_shape_keep_their_pixels(library, photo, jpeg, shape):
    for image in (photo(*shape, 2), photo(*shape, 2).convert("L"), Image.new("RGB", shape)):
        data = jpeg(image)
        np.testing.assert_array_equal(pixels(library.restart_marked(data, interval=2)), pixels(data))


@pytest.mark.parametrize("interval", [1, 8, 1000])
def test_a_marker_follows_every_interval(library, photo, jpeg, interval):
    marked = library.restart_marked(jpeg(photo(160, 96, 3), subsampling=0), interval=interval)
    assert marked[marked.index(b"\xff\xdd") + 4 :][:2] == interval.to_bytes(2, "big")
    markers = sum(marked.count(bytes((0xFF, 0xD0 + number))) for number in range(8))
    assert markers == (20 * 12 - 1) // interval


def test_marked_files_are_not_much_larger(library, photo, jpeg):
    """Huffman tables made for the image save about as much as the markers cost."""
    data = jpeg(photo(500, 375, 4), quality=92)
    assert len(library.restart_marked(data)) < 1.02 * len(data)


def test_the_native_decoder_gives_the_same_crop_of_both(library, tmp_path, photo, jpeg):
    data = jpeg(photo(320, 240, 5), subsampling=2)
    (tmp_path / "plain.jpg").write_bytes(data)
    (tmp_path / "marked.jpg").write_bytes(library.restart_marked(data))
    workspace, out = Workspace(library), np.zeros((2, 64, 64, 3), np.uint8)
    workspace.open([bytes(tmp_path / "plain.jpg"), bytes(tmp_path / "marked.jpg")])
    statuses = workspace.decode(np.array([[100.0, 90, 300, 200]] * 2), np.array([True, True]), out)
    assert statuses.tolist() == [Status.OK, Status.OK]
    np.testing.assert_array_equal(out[0], out[1])


def test_unsupported_or_incomplete_files_are_refused(library, photo, jpeg):
    data = jpeg(photo(64, 64, 6))
    assert library.restart_marked(b"") == Status.NOT_JPEG
    assert library.restart_marked(jpeg(photo(64, 64, 6), progressive=True)) == Status.UNSUPPORTED
    assert library.restart_marked(jpeg(photo(64, 64, 6).convert("CMYK"))) == Status.UNSUPPORTED
    assert library.restart_marked(data[:-30]) == Status.DAMAGED
    assert library.restart_marked(data, most_pixels=4095) == Status.TOO_LARGE
    for interval in (0, -1, 65536):
        assert library.restart_marked(data, interval=interval) == Status.BAD_REQUEST
