"""Image files: what is decoded and how, what is refused and why."""

import contextlib
import io
import os
import socket
import threading

import numpy as np
import pytest
from PIL import Image

from falconet.data import layout
from falconet.data.image_files import BadImages, UnreadableImageError, open_regular, open_rgb, read_regular, use_image
from falconet.data.shards import open_shard
from falconet.data.sources.bounding_boxes import parse_xml
from falconet.data.storage import FileSource
from falconet.errors import DataError


def gradient(width=40, height=30):
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack((rows * 8, columns * 6, rows * 0 + 90), axis=2).astype(np.uint8)


def written(path, image, **options):
    image.save(path, **options)
    return path


def test_rgb_is_read_unchanged(tmp_path):
    path = written(tmp_path / "a.png", Image.fromarray(gradient()))
    np.testing.assert_array_equal(np.asarray(open_rgb(path)), gradient())


def test_bytes_are_read_like_a_file():
    buffer = io.BytesIO()
    Image.fromarray(gradient()).save(buffer, "PNG")
    np.testing.assert_array_equal(np.asarray(open_rgb(io.BytesIO(buffer.getvalue()))), gradient())


def test_alpha_is_dropped_not_blended(tmp_path):
    alpha = np.full((30, 40, 1), 7, np.uint8)
    path = written(tmp_path / "a.png", Image.fromarray(np.concatenate((gradient(), alpha), axis=2)))
    np.testing.assert_array_equal(np.asarray(open_rgb(path)), gradient())


def test_grey_is_repeated(tmp_path):
    grey = gradient()[..., 0]
    path = written(tmp_path / "a.png", Image.fromarray(grey))
    np.testing.assert_array_equal(np.asarray(open_rgb(path)), np.repeat(grey[..., None], 3, axis=2))


def test_sixteen_bit_grey_keeps_its_range(tmp_path):
    wide = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    path = written(tmp_path / "a.png", Image.fromarray(wide))
    np.testing.assert_array_equal(np.asarray(open_rgb(path))[..., 1], wide // 256)


def test_a_palette_with_transparency_gives_its_colours(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    path = written(tmp_path / "a.png", image, transparency=b"\x00\x80")
    assert np.asarray(open_rgb(path)).tolist() == [[[10, 20, 30], [40, 50, 60]]]


def test_cmyk_is_converted(tmp_path):
    path = written(tmp_path / "a.jpg", Image.new("CMYK", (8, 8), (0, 255, 255, 0)), quality=100)
    red, green, blue = np.asarray(open_rgb(path))[4, 4].tolist()
    assert red > 240
    assert green < 15 > blue


def test_exif_orientation_is_ignored_as_the_peers_do(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    path = written(tmp_path / "a.png", Image.fromarray(gradient()), exif=exif)
    np.testing.assert_array_equal(np.asarray(open_rgb(path)), gradient())


def test_the_first_frame_of_an_animation_is_read(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    path = written(tmp_path / "a.gif", frames[0], save_all=True, append_images=frames[1:])
    assert np.asarray(open_rgb(path))[0, 0].tolist() == [255, 0, 0]


def encoded(kind):
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, kind, quality=95)
    return buffer.getvalue()


WEBP = encoded("WEBP")


BROKEN = {
    "empty.jpg": (b"", "empty file"),
    "page.jpg": (b"<html>404</html>", "not an image"),
    "phone.jpg": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC, which Pillow cannot read; convert it to JPEG"),
    "half.jpg": (encoded("JPEG")[:3000], "truncated"),
    "header.jpg": (encoded("JPEG")[:20], None),
    "cut.webp": (WEBP[:-20], "truncated"),
    "early.webp": (WEBP[:40], "truncated"),
    "wrong.webp": (WEBP[:20] + bytes(len(WEBP) - 20), "damaged: could not create decoder object"),
    "cut.png": (b"\x89PNG\r\n\x1a\n\x00\x00", None),
    "texture.jpg": (b"DDS " + (124).to_bytes(4, "little") + bytes(120), None),  # Pillow says that it is not implemented
}


@pytest.mark.parametrize(("name", "content", "reason"), [(name, *rest) for name, rest in BROKEN.items()])
def test_a_broken_file_gets_its_reason(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnreadableImageError) as caught:
        open_rgb(path)
    assert reason in (None, str(caught.value))
    assert "\n" not in str(caught.value)


WEBP_KINDS = {
    "lossy": {},
    "lossless": {"lossless": True},
    "extended": {"icc_profile": b"profile"},
    "animated": {"save_all": True, "append_images": [Image.fromarray(gradient(83, 61))]},
}


@pytest.mark.parametrize("kind", WEBP_KINDS)
def test_a_webp_photo_of_too_many_pixels_is_refused_by_its_header(kind, monkeypatch):
    file = io.BytesIO()
    Image.effect_noise((83, 61), 50).convert("RGB").save(file, "WEBP", **WEBP_KINDS[kind])
    assert use_image(file, lambda image: image.size, most_pixels=83 * 61) == (83, 61)
    monkeypatch.setattr(Image, "open", None)  # before version 13, it makes room for all pixels
    with pytest.raises(UnreadableImageError, match="more than 5,062 pixels"):
        use_image(file, lambda image: image.size, most_pixels=83 * 61 - 1)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of metadata; the package silences them
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_damaged_bytes_are_either_read_or_refused(tmp_path, kind):
    buffer = io.BytesIO()
    Image.fromarray(gradient()).save(buffer, kind)
    generator = np.random.default_rng(0)
    path = tmp_path / "damaged"
    for _ in range(40):
        content = np.frombuffer(buffer.getvalue(), np.uint8).copy()
        content[generator.integers(0, min(200, len(content)), 4)] = generator.integers(0, 256, 4)
        path.write_bytes(content[: generator.integers(1, len(content) + 1)].tobytes())
        with contextlib.suppress(UnreadableImageError):
            assert open_rgb(path).mode == "RGB"


def test_postscript_is_refused_without_starting_ghostscript(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: pytest.fail("Ghostscript was started"))
    path = written(tmp_path / "a.eps", Image.fromarray(gradient())).rename(tmp_path / "a.jpg")
    with pytest.raises(UnreadableImageError):
        open_rgb(path)


def test_a_missing_file_gets_the_systems_reason(tmp_path):
    with pytest.raises(UnreadableImageError, match="No such file"):
        open_rgb(tmp_path / "gone.jpg")


@pytest.mark.parametrize("name", ["a\0b.jpg", "\ud800.jpg"])
def test_a_name_that_no_file_can_have_is_unreadable(tmp_path, name):
    with pytest.raises(UnreadableImageError, match="no file can have this name"):
        open_rgb(tmp_path / name)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_at_the_first_limit(tmp_path, monkeypatch):
    path = written(tmp_path / "a.png", Image.fromarray(gradient()))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # the image has 1200: Pillow would only warn
    with pytest.raises(UnreadableImageError, match="more than 1,000 pixels"):
        open_rgb(path)


def test_bad_images_are_noted_once_and_counted_up_to_the_limit():
    notes = []
    bad = BadImages(2, note=notes.append)
    for name in ("1.jpg", "2.jpg", "1.jpg"):
        bad.add(f"data/train/cat/{name}", "truncated")
    assert len(bad) == 2
    assert notes == [
        "data/train/cat/1.jpg: cannot be decoded (truncated); skipped, bad image 1 of 2 allowed",
        "data/train/cat/2.jpg: cannot be decoded (truncated); skipped, bad image 2 of 2 allowed",
    ]
    with pytest.raises(DataError) as caught:
        bad.add("data/train/cat/7.jpg", "truncated")
    expected = "data/train/cat/7.jpg: cannot be decoded (truncated); 3 bad images, at most 2 allowed"
    assert str(caught.value) == expected


def test_with_none_allowed_the_first_bad_image_ends_the_run():
    with pytest.raises(DataError, match="1 bad image, at most 0 allowed"):
        BadImages(0, note=lambda message: None).add("a.jpg", "empty file")


def test_threads_may_report_bad_images_together():
    notes = []
    bad = BadImages(1000, note=notes.append)
    work = [
        threading.Thread(target=lambda: [bad.add(str(number), "empty file") for number in range(200)]) for _ in range(4)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(bad) == len(notes) == 200


def pipe(path):
    os.mkfifo(path)


def link_to_pipe(path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def listening(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


KINDS = {pipe: "a pipe", link_to_pipe: "a pipe", device: "a device", folder: "a folder", listening: "a socket"}


@pytest.mark.parametrize(("make", "what"), KINDS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_anything_but_a_regular_file_is_refused_at_once(tmp_path, monkeypatch, make, what):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = type(tmp_path)("x.jpg")
    make(path)
    for opened in (open_regular, read_regular):
        with pytest.raises(OSError, match=f"{what}, not a file"):
            opened(path)
    with pytest.raises(UnreadableImageError, match=f"^{what}, not a file$"):
        open_rgb(path)
    with pytest.raises(DataError, match=f"x.jpg: cannot be opened .{what}, not a file"):
        open_shard(path)
    with pytest.raises(OSError, match=f"{what}, not a file"):
        parse_xml(path)
    source = FileSource.of(tmp_path.parent, names=["x.jpg"], labels=[0], class_names=(tmp_path.name,))
    with pytest.raises(OSError, match=f"{what}, not a file"):
        source.encoded(0)


def test_a_file_and_a_link_to_one_are_opened(tmp_path):
    (tmp_path / "a").write_bytes(b"words")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "a") == read_regular(tmp_path / "b") == b"words"


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a.jpg").symlink_to("b.jpg")
    (tmp_path / "b.jpg").symlink_to("a.jpg")
    with pytest.raises(UnreadableImageError, match="Too many levels of symbolic links"):
        open_rgb(tmp_path / "a.jpg")


SHARDS = {
    "train-00000-of-00001": "validation-00000-of-00001",
    "train-0.tar": "val-0.tar",
    "train-00000.falconet": "validation-00000.falconet",
}


@pytest.mark.parametrize(("name", "other"), SHARDS.items())
def test_a_pipe_under_a_shards_name_is_refused_in_one_line(tmp_path, name, other):
    os.mkfifo(tmp_path / name)
    (tmp_path / other).touch()
    with pytest.raises(DataError) as caught:
        layout.load_photos(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name}: cannot be ")
    assert str(caught.value).endswith(" (a pipe, not a file)")
