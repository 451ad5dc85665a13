"""Packing gives the same bytes after any number of interruptions and with any number of threads."""

import hashlib
import io
import os

import numpy as np
import pytest
from PIL import Image

import layouts
from falconet.data import layout, packing
from falconet.data.packing import Packer, Recipe, plan, prepared, shrunk
from falconet.data.sources import packed
from falconet.errors import DataError
from layouts import pack


def digests(target):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(target.iterdir())}


@pytest.fixture
def root(tmp_path):
    return layouts.class_folders(tmp_path / "folders")


def test_any_number_of_threads_writes_the_same_bytes(root, tmp_path):
    assert digests(pack(root, tmp_path / "a", workers=1)) == digests(pack(root, tmp_path / "b", workers=5))


def test_existing_shards_are_kept(root, tmp_path):
    target = pack(root, tmp_path / "a")
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    (target / "train-00002.falconet").unlink()
    after = {path.name: path.stat().st_mtime_ns for path in pack(root, target).iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"train-00002.falconet"}


def torn(path):
    path.write_bytes(path.read_bytes()[:-1])


def one_file_changed(path):
    image = path.parent.parent / "folders/train/n01440764/n01440764_0.JPEG"
    image.write_bytes(layouts.encoded(layouts.photo(77)))
    os.utime(path, ns=(0, 0))  # older than the file


@pytest.mark.parametrize("change", [torn, one_file_changed])
def test_a_torn_or_outdated_shard_is_written_again(root, tmp_path, change):
    target = pack(root, tmp_path / "a")
    change(target / "train-00000.falconet")
    pack(root, target)
    assert digests(target) == digests(pack(root, tmp_path / "b"))


def test_another_recipe_writes_every_shard_again(root, tmp_path):
    target = pack(root, tmp_path / "a")
    assert digests(pack(root, target, resize=40)) == digests(pack(root, tmp_path / "b", resize=40))


CONTENTS = {
    "png": layouts.encoded(layouts.photo(1), "PNG"),
    "progressive": layouts.encoded(layouts.photo(1), progressive=True),
    "truncated": layouts.encoded(layouts.photo(1))[:900],
    "empty": b"",
    "html": b"<html>not found</html>",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_files_that_cannot_be_marked_are_stored_unchanged(tmp_path, name):
    path = tmp_path / "x.jpg"
    path.write_bytes(CONTENTS[name])
    outcome = prepared(path, recipe=Recipe(), library=library())
    assert (outcome.data, outcome.marked) == (CONTENTS[name], False)


def library():
    from falconet.data import native

    found = native.library()
    if found is None:
        pytest.skip(native.why_not())
    return found


def test_a_baseline_photo_is_marked_and_has_the_same_pixels(tmp_path):
    path = tmp_path / "x.jpg"
    path.write_bytes(layouts.encoded(layouts.photo(1), quality=92))
    outcome = prepared(path, recipe=Recipe(), library=library())
    assert outcome.marked
    assert b"\xff\xdd" in outcome.data  # the marker that defines the interval
    with Image.open(path) as plain, Image.open(io.BytesIO(outcome.data)) as marked:
        assert np.array_equal(np.asarray(plain), np.asarray(marked))


@pytest.mark.parametrize(
    ("size", "short_side", "expected"),
    [((80, 60), 30, (40, 30)), ((60, 81), 30, (30, 40)), ((80, 60), 60, (80, 60)), ((80, 60), 99, (80, 60))],
)
def test_only_larger_photos_are_shrunk(size, short_side, expected):
    data = layouts.encoded(layouts.photo(1, width=size[0], height=size[1]))
    with Image.open(io.BytesIO(shrunk(data, short_side))) as image:
        assert image.size == expected
    assert (shrunk(data, short_side) == data) is (size == expected)


def test_a_photo_that_stays_too_long_for_a_jpeg_is_unchanged():
    data = layouts.encoded(Image.new("RGB", (4, 90_000)), "PNG")
    assert shrunk(data, 3) == data


def test_a_photo_that_cannot_be_encoded_is_named(root, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("encoder error -2 when writing image file")  # without a number or a file, as Pillow's

    monkeypatch.setattr(Image.Image, "save", fails)
    shard = plan({"train": layout.load_photos(root).train}, shard_size=5)[0]
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError) as caught:
        Packer(tmp_path / "a", recipe=Recipe(resize=3), workers=1).pack(shard, done=lambda: None)
    reason = "cannot be shrunk (encoder error -2 when writing image file)"
    assert str(caught.value) == f"{shard.source.path(0)}: {reason}"


def test_a_vanished_file_is_named_and_leaves_no_partial_shard(root, tmp_path):
    target = pack(root, tmp_path / "a")
    splits = layout.load_photos(root)
    gone = splits.train.path(7)
    gone.unlink()
    shards = plan({"train": splits.train}, shard_size=5)
    with pytest.raises(DataError) as caught:
        Packer(target, recipe=Recipe(), workers=2).pack(shards[1], done=lambda: None)
    assert str(caught.value) == f"{gone}: cannot be read (No such file or directory)"
    assert not list(target.glob(".*"))


FULL = {28: "the disk is full", 122: "the disk quota is exceeded", 27: "a file would exceed the size limit"}


@pytest.mark.parametrize(("number", "words"), FULL.items())
def test_a_full_disk_is_named_and_complete_shards_stay(root, tmp_path, monkeypatch, number, words):
    target = pack(root, tmp_path / "a")
    before = digests(target)

    def full(self, facts):
        raise OSError(number, "full")

    monkeypatch.setattr(packed.Writer, "finish", full)
    shard = plan({"train": layout.load_photos(root).train}, shard_size=5)[0]
    with pytest.raises(DataError, match=f"train-00000.falconet: {words}; the shards before it are whole"):
        Packer(target, recipe=Recipe(), workers=2).pack(shard, done=lambda: None)
    assert digests(target) == before


def test_an_error_without_a_number_is_shown_in_its_words(root, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("cannot seek")

    monkeypatch.setattr(packed.Writer, "finish", fails)
    shard = plan({"train": layout.load_photos(root).train}, shard_size=5)[0]
    with pytest.raises(DataError, match=r"train-00000.falconet: cannot be read or written \(cannot seek\)"):
        Packer(tmp_path, recipe=Recipe(), workers=2).pack(shard, done=lambda: None)


def test_a_folder_that_cannot_be_written_is_reported_in_one_line(root, tmp_path):
    shard = plan({"train": layout.load_photos(root).train}, shard_size=5)[0]
    with pytest.raises(
        DataError, match=r"/gone/.train-00000.falconet.\w+.partial: cannot be read or written \(No such"
    ):
        Packer(tmp_path / "gone", recipe=Recipe(), workers=2).pack(shard, done=lambda: None)


def test_only_one_process_packs_into_a_folder(tmp_path):
    refused = pytest.raises(DataError, match="another `falconet data pack` is writing there")
    with packing.alone(tmp_path), refused, packing.alone(tmp_path):
        pass
