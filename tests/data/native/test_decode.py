"""The native decoder against Pillow: the same crop of the same file, decoded, resized and flipped."""

import io

import numpy as np
import pytest
from PIL import Image

from falconet.data.crops import evaluation_box
from falconet.data.native.binding import Status, Workspace

CROPS = {  # of a width and height: whole, evaluation's, and crops as training draws them
    "whole": lambda w, h: (0, 0, w, h),
    "centre": lambda w, h: evaluation_box(w, h, resize=80, crop=64),
    "corner": lambda w, h: (w - w // 3, h - h // 2, w, h),
    "inner": lambda w, h: (w // 5, h // 7, w - w // 4, h - h // 6),
    "small": lambda w, h: (w // 2, h // 2, w // 2 + max(1, w // 9), h // 2 + max(1, h // 9)),
}
# name, Pillow's sampling or the factors of Y, Cb, Cr for our own encoder
SAMPLINGS = {
    "4:4:4": 0,
    "4:2:2": 1,
    "4:2:0": 2,
    "4:1:1": ((4, 1), (1, 1), (1, 1)),
    "4:4:0": ((1, 2), (1, 1), (1, 1)),
    "4:1:0": ((4, 2), (1, 1), (1, 1)),
    "1 x 4": ((1, 4), (1, 1), (1, 1)),
    "3 x 1": ((3, 1), (1, 1), (1, 1)),
    "Cb finer than Cr": ((2, 2), (2, 1), (1, 2)),
    "Y coarser than Cr": ((1, 1), (1, 1), (2, 2)),
}


def decoded(library, tmp_path, data, box, *, size=64, flip=False, planar=False, portable=False, **limits):
    path = tmp_path / "image.jpg"
    path.write_bytes(data)
    workspace = Workspace(library, portable=portable, **limits)
    sizes, opened = workspace.open([bytes(path)])
    out = np.full((1, 3, size, size) if planar else (1, size, size, 3), 77, np.uint8)
    statuses = workspace.decode(np.array([box], float), np.array([flip]), out, planar=planar)
    assert opened[0] in (Status.OK, statuses[0])
    return out[0], Status(statuses[0]), tuple(sizes[0].tolist())


def pillows(data, box, *, size=64, flip=False):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return pixels[:, ::-1] if flip else pixels


def psnr(a, b):
    error = np.mean((a.astype(float) - b) ** 2)
    return 99.0 if error == 0 else 10 * np.log10(255**2 / error)


def written(sampling, jpeg, odd_jpeg, image, **options):
    return jpeg(image, subsampling=sampling, **options) if isinstance(sampling, int) else odd_jpeg(image, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_sampling_agrees_with_pillow(library, tmp_path, photo, jpeg, odd_jpeg, sampling):
    agreement = []
    for seed, (width, height) in enumerate([(200, 150), (131, 173), (97, 90)]):
        data = written(SAMPLINGS[sampling], jpeg, odd_jpeg, photo(width, height, seed))
        for name, crop in CROPS.items():
            box, flip = crop(width, height), name in ("corner", "small")
            pixels, status, size = decoded(library, tmp_path, data, box, flip=flip)
            assert (status, size) == (Status.OK, (width, height))
            agreement.append(psnr(pixels, pillows(data, box, flip=flip)))
    assert np.median(agreement) >= 50, agreement
    assert np.percentile(agreement, 5) >= 45, agreement


@pytest.mark.parametrize("quality", [5, 40, 75, 90, 100])
def test_every_quality_agrees_with_pillow(library, tmp_path, photo, jpeg, quality):
    for optimize in (False, True):
        data = jpeg(photo(240, 180, quality), quality=quality, subsampling=2, optimize=optimize)
        pixels, status, _ = decoded(library, tmp_path, data, (11, 17, 201, 160), size=96)
        assert status == Status.OK
        assert psnr(pixels, pillows(data, (11, 17, 201, 160), size=96)) >= 47


@pytest.mark.parametrize("quality", [30, 75, 95, 100])
def test_grey_at_full_size_equals_libjpeg_bit_for_bit(library, tmp_path, photo, jpeg, quality):
    data = jpeg(photo(120, 120, 3).convert("L"), quality=quality)
    pixels, status, _ = decoded(library, tmp_path, data, (0, 0, 120, 120), size=120)
    assert status == Status.OK
    np.testing.assert_array_equal(pixels, pillows(data, (0, 0, 120, 120), size=120))


def test_colour_at_full_size_is_at_most_one_level_off(library, tmp_path, photo, jpeg):
    data = jpeg(photo(128, 128, 4), quality=92, subsampling=0)
    pixels, _, _ = decoded(library, tmp_path, data, (0, 0, 128, 128), size=128)
    assert np.abs(pixels.astype(int) - pillows(data, (0, 0, 128, 128), size=128)).max() <= 1


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 9), (7, 8), (8, 8), (9, 17), (16, 16), (500, 3), (3, 700)])
@pytest.mark.parametrize("sampling", [0, 2])
def test_every_shape_is_decoded(library, tmp_path, photo, jpeg, shape, sampling):
    data = jpeg(photo(*shape, 5), quality=90, subsampling=sampling)
    box = (0, 0, *shape)
    pixels, status, size = decoded(library, tmp_path, data, box, size=40)
    assert (status, size) == (Status.OK, shape)
    assert psnr(pixels, pillows(data, box, size=40)) >= 45


@pytest.mark.parametrize("size", [1, 7, 31, 32, 33, 112, 225])
@pytest.mark.parametrize("planar", [False, True])
def test_every_output_size_and_layout_agrees_with_pillow(library, tmp_path, photo, jpeg, size, planar):
    data, box = jpeg(photo(300, 260, 6), quality=92), (20, 30, 280, 250)
    pixels, status, _ = decoded(library, tmp_path, data, box, size=size, planar=planar, flip=True)
    expected = pillows(data, box, size=size, flip=True)
    assert status == Status.OK
    assert psnr(pixels.transpose(1, 2, 0) if planar else pixels, expected) >= 45


def test_only_the_row_of_the_image_is_written(library, tmp_path, photo, jpeg):
    (tmp_path / "a.jpg").write_bytes(jpeg(photo(90, 70, 7)))
    workspace = Workspace(library)
    for size in (5, 33, 61):
        out = np.full((3, size, size, 3), 77, np.uint8)
        workspace.open([bytes(tmp_path / "a.jpg")])
        workspace.decode(np.array([[3.0, 4, 80, 60]]), np.array([False]), out[1:2])
        assert (out[[0, 2]] == 77).all()


@pytest.mark.run
@pytest.mark.parametrize("reduction", [1, 2, 4, 8, 16, 24])
def test_large_photos_are_reduced_while_decoding_and_still_agree(library, tmp_path, photo, jpeg, reduction):
    """The transform is reduced to a half, quarter or eighth from 4, 8 or 16 times the output on."""
    size, agreement = 40, []
    for seed, sampling in enumerate((0, 1, 2)):
        side = size * reduction + 13
        data = jpeg(photo(side, side + 20, seed), quality=90, subsampling=sampling)
        box = (6, 3, 6 + size * reduction, 3 + size * reduction)
        pixels, status, _ = decoded(library, tmp_path, data, box, size=size)
        assert status == Status.OK
        agreement.append(psnr(pixels, pillows(data, box, size=size)))
    assert min(agreement) >= 45, agreement
    assert np.median(agreement) >= 48, agreement


@pytest.mark.parametrize("blocks", [1, 2, 7, 40])
@pytest.mark.parametrize("crop", CROPS)
def test_restart_markers_change_nothing(library, tmp_path, photo, jpeg, blocks, crop):
    image = photo(170, 130, 8)
    box = CROPS[crop](170, 130)
    for sampling in (0, 2):
        plain, _, _ = decoded(library, tmp_path, jpeg(image, subsampling=sampling), box)
        data = jpeg(image, subsampling=sampling, restart_marker_blocks=blocks)
        assert b"\xff\xdd" in data
        marked, status, _ = decoded(library, tmp_path, data, box)
        assert status == Status.OK
        np.testing.assert_array_equal(marked, plain)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_portable_code_gives_the_same_bytes(library, tmp_path, photo, jpeg, odd_jpeg, sampling):
    data = written(SAMPLINGS[sampling], jpeg, odd_jpeg, photo(150, 110, 9))
    for name, crop in CROPS.items():
        for size in (16, 47):
            box = crop(150, 110)
            one, a, _ = decoded(library, tmp_path, data, box, size=size, planar=name == "small")
            two, b, _ = decoded(library, tmp_path, data, box, size=size, planar=name == "small", portable=True)
            assert (a, b) == (Status.OK, Status.OK)
            np.testing.assert_array_equal(one, two)


def test_a_workspace_forgets_the_previous_image(library, tmp_path, photo, jpeg, odd_jpeg):
    """Its tables, planes and restart positions are reused, whatever was decoded before."""
    images = [
        jpeg(photo(300, 200, 1), quality=95, subsampling=0),
        jpeg(photo(60, 90, 2).convert("L"), quality=30),
        odd_jpeg(photo(100, 64, 3), ((4, 1), (1, 1), (1, 1)), restart=3),
        jpeg(photo(210, 160, 4), quality=80, subsampling=2, optimize=True),
        jpeg(photo(210, 160, 4), quality=80)[:900],
    ]
    paths = []
    for number, data in enumerate(images):
        paths.append(tmp_path / f"{number}.jpg")
        paths[-1].write_bytes(data)
    workspace = Workspace(library)
    for order in ([0, 1, 2, 3, 4], [4, 3, 1, 0, 2], [2, 2, 4, 1, 0]):
        sizes, _ = workspace.open([bytes(paths[i]) for i in order])
        out = np.zeros((5, 48, 48, 3), np.uint8)
        boxes = np.array([(0, 0, max(w, 1), max(h, 1)) for w, h in sizes.tolist()], float)
        statuses = workspace.decode(boxes, np.zeros(5, bool), out)
        for row, image in enumerate(order):
            alone, status, _ = decoded(library, tmp_path, images[image], boxes[row], size=48)
            assert statuses[row] == status
            if status == Status.OK:
                np.testing.assert_array_equal(out[row], alone)


def changed(data, marker, offset, value):
    at = data.index(marker)
    return data[: at + offset] + bytes([value]) + data[at + offset + 1 :]


@pytest.fixture(scope="module")
def refused(photo, jpeg, odd_jpeg):
    image = photo(80, 60, 10)
    plain, restarts = jpeg(image, subsampling=0), jpeg(image, subsampling=0, restart_marker_blocks=4)
    adobe_rgb = b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0\0"
    second = restarts.index(b"\xff\xd1")
    return {
        "empty": (b"", Status.NOT_JPEG),
        "text": (b"<html>not here</html>", Status.NOT_JPEG),
        "png": (b"\x89PNG\r\n\x1a\n" + bytes(50), Status.NOT_JPEG),
        "only a beginning": (plain[:2], Status.NOT_JPEG),
        "only markers": (plain[:200], Status.DAMAGED),
        "progressive": (jpeg(image, progressive=True), Status.UNSUPPORTED),
        "four components": (jpeg(image.convert("CMYK")), Status.UNSUPPORTED),
        "12 bits": (changed(plain, b"\xff\xc0", 4, 12), Status.UNSUPPORTED),
        "arithmetic": (plain.replace(b"\xff\xc0", b"\xff\xc9"), Status.UNSUPPORTED),
        "lossless": (plain.replace(b"\xff\xc0", b"\xff\xc3"), Status.UNSUPPORTED),
        "hierarchical": (plain.replace(b"\xff\xc0", b"\xff\xc5"), Status.UNSUPPORTED),
        "Adobe RGB": (plain[:2] + adobe_rgb + plain[2:], Status.UNSUPPORTED),
        "no tables": (plain.replace(b"\xff\xc4", b"\xff\xe5"), Status.UNSUPPORTED),
        "a sampling of 3 over 2": (
            changed(changed(plain, b"\xff\xc0", 11, 0x31), b"\xff\xc0", 14, 0x21),
            Status.UNSUPPORTED,
        ),
        "too many blocks": (changed(plain, b"\xff\xc0", 11, 0x44), Status.DAMAGED),
        "a sampling of nothing": (changed(plain, b"\xff\xc0", 11, 0x01), Status.DAMAGED),
        "no width": (changed(changed(plain, b"\xff\xc0", 7, 0), b"\xff\xc0", 8, 0), Status.UNSUPPORTED),
        "cut in the scan": (plain[: len(plain) * 3 // 4], Status.DAMAGED),
        "no end": (plain[:-2], Status.DAMAGED),
        "a hole": (plain[:-500] + plain[-400:], Status.DAMAGED),
        "a lost restart interval": (restarts[:second] + restarts[restarts.index(b"\xff\xd2") :], Status.DAMAGED),
        "restarts out of turn": (restarts.replace(b"\xff\xd1", b"\xff\xd5"), Status.DAMAGED),
        "unexpected restarts": (restarts.replace(b"\xff\xdd", b"\xff\xe5"), Status.DAMAGED),
    }


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("box", [(0, 0, 80, 60), (10, 20, 60, 59)])
def test_unsupported_images_are_refused(library, tmp_path, refused, box, portable):
    found = {name: decoded(library, tmp_path, data, box, portable=portable)[1] for name, (data, _) in refused.items()}
    assert found == {name: expected for name, (_, expected) in refused.items()}


def test_a_crop_beyond_the_data_is_damaged(library, tmp_path, photo, jpeg):
    data = changed(jpeg(photo(80, 60, 10)), b"\xff\xc0", 5, 8)  # 2,108 rows, says the header
    assert decoded(library, tmp_path, data, (0, 50, 80, 100))[1] == Status.DAMAGED


def test_a_hole_in_the_scan_is_noticed(library, tmp_path, odd_jpeg, photo):
    """A run of ones is no code in the standard's tables: it is refused, in the crop and before it."""
    data = odd_jpeg(photo(64, 64, 1), ((1, 1), (1, 1), (1, 1)))
    start = data.index(b"\xff\xda") + 14
    broken = data[: start + 60] + b"\xff\x00" * 8 + data[start + 76 :]
    for box in ((0, 0, 64, 64), (32, 40, 64, 64)):
        assert decoded(library, tmp_path, broken, box)[1] == Status.DAMAGED


def test_pixels_and_memory_are_limited(library, tmp_path, photo, jpeg):
    data = jpeg(photo(100, 80, 1))
    assert decoded(library, tmp_path, data, (0, 0, 100, 80), most_pixels=8000)[1] == Status.OK
    assert decoded(library, tmp_path, data, (0, 0, 100, 80), most_pixels=7999)[1] == Status.TOO_LARGE
    assert decoded(library, tmp_path, data, (0, 0, 100, 80), most_bytes=50_000)[1] == Status.TOO_LARGE
    claimed = changed(changed(data, b"\xff\xc0", 5, 0xFF), b"\xff\xc0", 7, 0xFF)  # 65,000 x 65,000 pixels
    assert decoded(library, tmp_path, claimed, (0, 0, 100, 80))[1] == Status.TOO_LARGE


@pytest.mark.parametrize(
    "box", [(0, 0, 101, 80), (-1, 0, 50, 50), (50, 0, 50, 80), (60, 0, 50, 80), (0, 0, np.nan, 80), (0, 0, np.inf, 80)]
)
def test_a_box_outside_the_image_is_a_bad_request(library, tmp_path, photo, jpeg, box):
    assert decoded(library, tmp_path, jpeg(photo(100, 80, 1)), box)[1] == Status.BAD_REQUEST


def test_a_mean_of_too_many_pixels_is_left_to_pillow(library, tmp_path, jpeg):
    data = jpeg(Image.new("RGB", (4000, 8)))
    assert decoded(library, tmp_path, data, (0, 0, 4000, 8), size=1)[1] == Status.UNSUPPORTED


def test_missing_files_folders_and_pipes_are_unreadable(library, tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    _, statuses = Workspace(library).open([bytes(tmp_path / name) for name in ("missing", ".", "pipe")])
    assert statuses.tolist() == [Status.UNREADABLE] * 3


def test_decoding_more_than_was_opened_is_a_bad_request(library):
    out = np.zeros((2, 8, 8, 3), np.uint8)
    statuses = Workspace(library).decode(np.zeros((2, 4)), np.zeros(2, bool), out)
    assert statuses.tolist() == [Status.BAD_REQUEST] * 2


def test_optional_bytes_between_markers_are_allowed(library, tmp_path, photo, jpeg):
    """They are fill bytes before markers, comments, an Adobe marker for YCbCr, and bytes after the end."""
    image = photo(80, 60, 11)
    plain = jpeg(image, subsampling=0)
    adobe = b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0\1"
    odd = plain[:2] + b"\xff\xfe\0\x04hi" + adobe + plain[2:].replace(b"\xff\xc0", b"\xff\xff\xff\xc0") + b"trailing"
    box = (5, 5, 70, 55)
    pixels, status, _ = decoded(library, tmp_path, odd, box)
    assert status == Status.OK
    np.testing.assert_array_equal(pixels, decoded(library, tmp_path, plain, box)[0])
