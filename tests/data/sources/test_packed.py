"""Packed shards are read as written, and changes are named."""

import hashlib
import io
import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load, save

import layouts
from falconet.data import layout
from falconet.data.image_files import UnreadableImageError
from falconet.data.shards import crc32c
from falconet.data.sources import packed
from falconet.errors import DataError
from layouts import pack


@pytest.fixture
def folders(tmp_path):
    return layouts.class_folders(tmp_path / "folders")


@pytest.fixture
def root(folders, tmp_path):
    return pack(folders, tmp_path / "packed")


def test_pixels_labels_and_names_are_those_of_the_files(folders, root):
    splits = layout.load_photos(root)
    assert splits.class_names == layouts.CLASSES
    for source, split in ((splits.train, "train"), (splits.validation, "val")):
        written = list(layouts.photos_of(folders, split))
        assert len(source) == len(written)
        for index, (path, label) in enumerate(written):
            with Image.open(path) as plain, Image.open(io.BytesIO(source.encoded(index))) as stored:
                assert np.array_equal(np.asarray(plain), np.asarray(stored))
            assert (source.labels[index], source.name(index)) == (label, f"{path.parent.name}/{path.name}")


def test_the_index_is_where_the_documentation_says(root):
    """Read the format without our code."""
    data = (root / "train-00001.falconet").read_bytes()
    assert data[:16] == data[-16:] == b"falconet shard 1"
    begin, size = struct.unpack("<QQ", data[-72:-56])
    index = load(data[begin : begin + size])
    assert begin + size + 72 == len(data)
    assert hashlib.sha256(data[:-72]).digest() == data[-48:-16]
    place, length = int(index["begins"][0]), int(index["sizes"][0])
    with Image.open(io.BytesIO(data[place : place + length])) as image:
        image.load()
    names = index["names"].tobytes()[: index["offsets"][1]]
    assert names == b"n01440764/n01440764_5.JPEG"
    assert index["labels"].tolist() == [0, 1, 1, 1, 1]


def flipped(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_of_an_image_is_named(root):
    path = root / "train-00002.falconet"
    source = layout.load_photos(root).train
    flipped(path, source._range(11)[0] + 30)
    assert packed.verify(path) == [f"{path}: n01443537/n01443537_5.JPEG: checksum mismatch"]
    with pytest.raises(UnreadableImageError, match="checksum mismatch"):
        source.encoded(11)
    assert source.where(11) == f"{path}: n01443537/n01443537_5.JPEG"


@pytest.mark.parametrize("path", ["train-00000.falconet", "validation-00000.falconet"])
def test_any_changed_byte_of_a_shard_is_noticed(root, path):
    """A hundred bits are flipped, one at a time, anywhere: each is refused on opening or found by verify."""
    whole = (root / path).read_bytes()
    for at in np.random.default_rng(0).integers(0, len(whole), 100).tolist():
        (root / path).write_bytes(whole)
        flipped(root / path, at)
        try:
            problems = packed.verify(root / path)
        except DataError as error:
            problems = [str(error)]
        assert problems, at
    (root / path).write_bytes(whole)
    assert packed.verify(root / path) == []


@pytest.mark.parametrize("length", [0, 10, 71, 500])
def test_a_shard_that_was_cut_short_is_refused(root, length):
    path = root / "train-00001.falconet"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == (
        f"{path}: not a complete packed shard of this version; recreate it with `falconet data pack`"
    )


def test_a_changed_label_is_noticed(root):
    path = root / "train-00000.falconet"
    flipped(path, path.stat().st_size - 72 - 10)  # within the index
    with pytest.raises(DataError, match="its index is damaged"):
        layout.load_photos(root)


def test_a_missing_shard_is_named(root):
    (root / "train-00001.falconet").unlink()
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root}: no train-00001.falconet; 3 of 4 are there"


def test_shards_of_two_sets_do_not_mix(root):
    path = root / "train-00001.falconet"
    head = packed.read_head(path)
    with path.open("wb") as file:
        writer = packed.Writer(file)
        writer.add(b"x", label=0, name="a")
        writer.finish({**head.facts, "classes": ["cat"]})
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{path}: belongs to a different set from the other shards"


def test_a_renamed_shard_is_refused(root):
    path = root / "train-00001.falconet"
    path.write_bytes((root / "train-00002.falconet").read_bytes())
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{path}: its index names it train-00002.falconet; was it renamed or copied?"


@pytest.mark.parametrize("facts", [{"shards": "4"}, {"classes": "abc"}, {"classes": [1]}, {"split": None}])
def test_facts_of_other_types_are_refused_even_with_a_valid_checksum(root, facts):
    path = root / "train-00001.falconet"
    head = packed.read_head(path)
    with path.open("wb") as file:
        writer = packed.Writer(file)
        writer.add(b"x", label=0, name="a")
        writer.finish({**head.facts, **facts})
    with pytest.raises(DataError, match="its index is damaged"):
        layout.load_photos(root)


def test_columns_of_other_types_are_refused_even_with_a_valid_checksum(root, monkeypatch):
    path = root / "train-00001.falconet"
    head = packed.read_head(path)
    plain = packed.save
    monkeypatch.setattr(
        packed, "save", lambda arrays, facts: plain({**arrays, "sizes": arrays["sizes"].astype(np.float64)}, facts)
    )
    with path.open("wb") as file:
        writer = packed.Writer(file)
        writer.add(b"x", label=0, name="a")
        writer.finish(head.facts)
    with pytest.raises(DataError, match="its index is damaged"):
        layout.load_photos(root)


def forge(path, *, arrays=None, facts=None):
    """Give the shard another index with a valid checksum; opening does not check the digest of the whole."""
    data, head = path.read_bytes(), packed.read_head(path)
    begin = struct.unpack("<Q", data[-72:-64])[0]
    made = bytes(save({**head.arrays, **(arrays or {})}, {"facts": json.dumps({**head.facts, **(facts or {})})}))
    place = packed.PLACE.pack(begin, len(made), crc32c(made), 0)
    path.write_bytes(data[:begin] + made + place + data[-48:])


COUNTS = {
    "a number before the first": {"number": -1},
    "a number beyond the shards": {"number": 4},
    "a number that is a truth": {"number": True},
    "no shards": {"shards": 0},
    "a million million shards": {"shards": 10**12},
    "fewer classes than labels": {"classes": []},
    "a million and one classes": {"classes": ["a"] * 1_000_001},
}


@pytest.mark.parametrize("facts", COUNTS.values(), ids=COUNTS.keys())
def test_counts_out_of_range_are_refused_even_with_a_valid_checksum(root, facts):
    path = root / "train-00001.falconet"
    forge(path, facts=facts)
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{path}: its index is damaged; recreate it with `falconet data pack`"


def test_an_index_larger_than_memory_is_not_read(root, monkeypatch):
    monkeypatch.setattr(packed, "available", lambda: 1000)
    with pytest.raises(DataError, match="its index is damaged"):
        layout.load_photos(root)


NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 0, 1, 16, 255, 2**31 - 1, 2**32 - 1]))


@pytest.mark.run
@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_numbers_in_an_index_cause_reads_beyond_the_shard(root, data):
    path = root / "train-00001.falconet"
    whole = path.read_bytes()
    name = data.draw(st.sampled_from(sorted(packed.COLUMNS)))
    column = packed.read_head(path).arrays[name][: data.draw(st.integers(0, 9))].copy()
    flat = column.view(np.uint8)
    odd = np.array(data.draw(st.lists(NUMBERS, min_size=1, max_size=4)), np.int64).view(np.uint8)[: len(flat)]
    begin = data.draw(st.integers(0, (len(flat) - len(odd)) // column.itemsize)) * column.itemsize
    flat[begin : begin + len(odd)] = odd
    forge(path, arrays={name: column})
    try:
        source = layout.load_photos(root).train
    except DataError as error:
        assert "its index is damaged" in str(error)  # noqa: PT017, or it is harmless: another name, label or checksum
    else:
        for number in range(len(source)):
            place, size, _, _ = source._range(number)
            assert 0 <= place <= place + size <= source.shards.paths[source.places.shards[number]].stat().st_size
            assert isinstance(source.where(number), str)
    finally:
        path.write_bytes(whole)


@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damaged_tail_is_refused_in_one_line(root, data):
    path = root / "train-00001.falconet"
    whole = path.read_bytes()
    odd = data.draw(st.binary(min_size=1, max_size=24))
    at = data.draw(st.integers(len(whole) - 72, len(whole) - len(odd)))
    changed = whole[:at] + odd + whole[at + len(odd) :]
    path.write_bytes(changed)
    try:
        packed.read_head(path)
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:  # nothing but the digest of the whole, which `verify` looks at, or the four zeros
        assert changed[: -72 + 20] == whole[: -72 + 20]
    finally:
        path.write_bytes(whole)
