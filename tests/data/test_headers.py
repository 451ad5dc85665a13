"""The check of every photo: which are called broken and why, and which a second start looks at."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import layouts
from falconet.data import headers, native
from falconet.data.headers import Bad, read_headers, without_bad
from falconet.data.layout import Division, load_photos
from falconet.data.native import binding
from falconet.data.storage import FileSource


@pytest.fixture(params=["native", "Pillow"])
def library(request, monkeypatch):
    """Run the test with the native library and without it."""
    if request.param == "Pillow":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.why_not())
    return request.param


KINDS = {
    "JPEG": {"quality": 80},
    "progressive": {"format": "JPEG", "progressive": True},
    "long EXIF": {"format": "JPEG", "exif": b"Exif\0\0" + b"x" * 60_000},
    "PNG": {},
    "GIF": {},
    "WEBP": {},
    "lossless": {"format": "WEBP", "lossless": True},
    "BMP": {},
    "TIFF": {},
    "JPEG2000": {},
    "PPM": {},
}


def encoded(kind, width=90, height=70):
    options = {"format": kind} | KINDS[kind]
    return layouts.encoded(layouts.photo(0, width=width, height=height), options.pop("format"), **options)


def source(root, files):
    """A source of files by name, dated back so that an index of them is used."""
    (root / "c").mkdir(exist_ok=True)
    for name, data in files.items():
        (root / "c" / name).write_bytes(data)
        os.utime(root / "c" / name, ns=(10**18, 10**18))
    return FileSource.of(root, names=list(files), labels=[0] * len(files), class_names=("c",))


def checked(source):
    (found,) = read_headers([source], home=source.root, workers=2)
    return found


@pytest.mark.usefixtures("library")
def test_every_format_gives_its_size(tmp_path):
    found = checked(source(tmp_path, {f"{kind}.jpg": encoded(kind) for kind in KINDS}))
    assert found.reasons == {}
    assert found.sizes.tolist() == [[90, 70]] * len(KINDS)


BROKEN = {
    "empty": (b"", "empty file"),
    "text": (b"hello", "not an image"),
    "truncated JPEG": (encoded("JPEG")[:-400], "truncated"),
    "JPEG without its scan": (encoded("JPEG")[:300], "truncated"),
    "truncated PNG": (encoded("PNG")[:-500], "truncated"),
    "truncated WebP": (encoded("WEBP")[:-200], None),
    "zeros": (bytes(5000), "not an image"),
    "half of a PNG's head": (encoded("PNG")[:14], None),
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("data", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_named_with_its_reason(tmp_path, data, reason):
    found = checked(source(tmp_path, {"good.jpg": encoded("JPEG"), "bad.jpg": data}))
    assert list(found.reasons) == [1]
    assert reason is None or found.reasons[1] == reason
    assert found.good().tolist() == [0]


@pytest.mark.usefixtures("library")
def test_bytes_after_the_end_do_not_make_a_photo_broken(tmp_path):
    video = b"\0\0\0\x18ftypmp42" + bytes(range(1, 200)) * 100  # a phone's moving photo has its video there
    found = checked(source(tmp_path, {f"{kind}.jpg": encoded(kind) + video for kind in ("JPEG", "PNG", "WEBP")}))
    assert found.reasons == {}
    assert found.sizes.tolist() == [[90, 70]] * 3


@pytest.mark.usefixtures("library")
def test_a_missing_file_and_one_of_another_kind_are_named(tmp_path):
    files = source(tmp_path, {"1.jpg": b"", "2.jpg": b"", "3.jpg": encoded("JPEG")})
    (tmp_path / "c/1.jpg").unlink()
    (tmp_path / "c/2.jpg").unlink()
    os.mkfifo(tmp_path / "c/2.jpg")
    found = checked(files)
    assert found.reasons == {0: "missing", 1: "a pipe, not a file"}
    assert found.bad(files)[0] == Bad(tmp_path / "c/1.jpg", "missing")
    assert str(found.bad(files)[0]) == f"{tmp_path}/c/1.jpg: missing"


@pytest.mark.usefixtures("library")
def test_a_photo_with_too_many_pixels_is_refused_by_its_header(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    found = checked(source(tmp_path, {"1.jpg": encoded("JPEG"), "2.jpg": encoded("JPEG", width=50, height=50)}))
    assert found.reasons == {0: "more than 5,000 pixels"}


@pytest.fixture
def looked(monkeypatch):
    """The names of files whose headers are read."""
    seen, plain = [], headers.look

    def look(paths):
        seen.extend(Path(os.fsdecode(path)).name for path in paths)
        return plain(paths)

    monkeypatch.setattr(headers, "look", look)
    return seen


def test_a_second_start_looks_only_at_what_has_changed(tmp_path, looked):
    files = {"1.jpg": encoded("JPEG"), "2.jpg": encoded("PNG"), "3.jpg": b"bad", "4.jpg": b"bad"}
    first = checked(source(tmp_path, files))
    assert looked == ["1.jpg", "2.jpg", "3.jpg", "4.jpg"]
    looked.clear()
    again = checked(source(tmp_path, files))
    assert looked == []
    assert (again.reasons, again.sizes.tolist()) == (first.reasons, first.sizes.tolist())
    changed = source(tmp_path, files | {"0.jpg": encoded("GIF"), "3.jpg": encoded("JPEG")})
    assert checked(changed).reasons == {3: "not an image"}
    assert looked == ["3.jpg", "0.jpg"]


def test_a_file_that_changed_a_moment_ago_is_looked_at_again(tmp_path, looked):
    files = source(tmp_path, {"1.jpg": encoded("JPEG"), "2.jpg": encoded("JPEG")})
    os.utime(tmp_path / "c/2.jpg")
    for _ in range(2):
        checked(files)
    assert looked == ["1.jpg", "2.jpg", "2.jpg"]


def test_a_file_that_could_not_be_read_is_looked_at_again(tmp_path, looked):
    files = source(tmp_path, {"1.jpg": encoded("JPEG")})
    (tmp_path / "c/1.jpg").rename(tmp_path / "c/gone.jpg")
    assert checked(files).reasons == {0: "missing"}
    (tmp_path / "c/gone.jpg").rename(tmp_path / "c/1.jpg")
    assert checked(files).reasons == {}


@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: b"x" * len(data), lambda data: b""])
def test_a_damaged_index_is_made_again(tmp_path, looked, spoil):
    files = source(tmp_path, {"1.jpg": encoded("JPEG"), "2.jpg": b"bad"})
    first = checked(files)
    (place,) = (tmp_path / ".falconet-index").glob("headers*")
    place.write_bytes(spoil(place.read_bytes()))
    assert checked(files).reasons == first.reasons
    assert len(looked) == 4


def test_both_sides_of_a_split_share_one_index_whatever_the_seed(tmp_path, looked):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(10):
            (tmp_path / name / f"{number}.jpg").write_bytes(encoded("JPEG", width=60 + number))
            os.utime(tmp_path / name / f"{number}.jpg", ns=(10**18, 10**18))
    (tmp_path / "cat/3.jpg").write_bytes(b"")
    os.utime(tmp_path / "cat/3.jpg", ns=(10**18, 10**18))
    for seed in range(3):
        splits, check = without_bad(load_photos(tmp_path, Division(0.3, seed)), home=tmp_path, workers=1)
        assert len(splits.train) + len(splits.validation) == 19
        assert [bad.path for bad in (*check.training, *check.validation)] == [tmp_path / "cat/3.jpg"]
        assert (check.smallest, check.largest) == ((60, 70), (69, 70))
        names = {source.name(number) for source in (splits.train, splits.validation) for number in range(len(source))}
        assert "cat/3.jpg" not in names
    assert len(looked) == 20


def test_the_native_library_and_python_agree_on_hostile_bytes(tmp_path, monkeypatch):
    if native.library() is None:
        pytest.skip(native.why_not())
    random = np.random.default_rng(0)
    files = {}
    for number in range(150):
        data = bytearray(encoded(list(KINDS)[number % len(KINDS)], width=20, height=16))
        for _ in range(random.integers(1, 6)):
            data[random.integers(0, min(len(data), 64))] = random.integers(0, 256)
        files[f"{number}.jpg"] = bytes(data[: random.integers(1, len(data) + 1)])
    files = source(tmp_path, files)
    sizes, states = native.library().look([os.fsencode(files.path(number)) for number in range(len(files))])
    for number in np.flatnonzero(states == binding.State.WHOLE).tolist():
        try:
            assert headers.read_size(files.path(number)) == tuple(sizes[number].tolist())
        except headers.UnreadableImageError:
            continue  # Pillow looks at more than the size
