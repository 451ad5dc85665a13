"""A forged index with a valid checksum: refused in one line and made again, or harmless."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

import layouts
from falconet.data import index
from falconet.data.index import FOLDER, Found
from falconet.data.layout import load_photos
from falconet.data.sources import bounding_boxes

XML = (
    "<a><size><width>9</width><height>9</height></size><object><bndbox>"
    "<xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></object></a>"
)


def old(root):
    """Date everything back: an index is not used if something has just changed."""
    for path in (root, *root.rglob("*")):
        os.utime(path, ns=(10**18, 10**18))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each layout's folder with its index, and the index of boxes."""
    home = tmp_path_factory.mktemp("layouts")
    plain = layouts.class_folders(home / "plain", train=2, validation=1)
    roots = {
        "class folders": layouts.class_folders(home / "folders", train=2, validation=1),
        "TFRecords": layouts.tfrecords(plain, home / "records", boxes=((0.0, 0.0, 0.5, 0.5),)),
        "tar archives": layouts.tar_archives(plain, home / "tar"),
    }
    for name in layouts.CLASSES:
        (roots["class folders"] / "bbox" / name).mkdir(parents=True)
        (roots["class folders"] / "bbox" / name / f"{name}_0.xml").write_text(XML)
    for root in roots.values():
        old(root)
        load_photos(root)
    bounding_boxes.read_boxes(roots["class folders"] / "bbox")
    files = {"class folders": "photos-train", "TFRecords": "tfrecords", "tar archives": "tar"}
    return {name: (root, root / FOLDER / f"{files[name]}.safetensors") for name, root in roots.items()} | {
        "boxes": (roots["class folders"], roots["class folders"] / FOLDER / "boxes-bbox.safetensors")
    }


@pytest.fixture
def forged(made, capfd):
    """A function that opens a layout with a changed index, and returns what it gave and the lines on standard error."""

    def opened(layout, change):
        root, place = made[layout]
        whole = place.read_bytes()
        place.write_bytes(change(whole, root))
        capfd.readouterr()
        try:
            return seen(layout, root), capfd.readouterr().err.splitlines()
        finally:
            place.write_bytes(whole)

    return opened


def seen(layout, root):
    """The images found in a folder, as plain values; every file that would be read must be below it."""
    if layout == "boxes":
        return {name: own.tolist() for name, own in bounding_boxes.read_boxes(root / "bbox").items()}
    splits = load_photos(root)
    every = []
    for source in (splits.train, splits.validation):
        for number in range(len(source)):
            if layout == "class folders":
                assert source.path(number).resolve().is_relative_to(root.resolve())
            else:
                begin, size, skip, length = source._range(number)
                total = source.shards.paths[source.places.shards[number]].stat().st_size
                assert 0 <= begin <= begin + size <= total
                assert 0 <= skip <= skip + length <= size
            every.append((source.name(number), source.class_names[source.labels[number]]))
    return every


def rewritten(**changes):
    """Change arrays and facts in an index, and give it the matching checksum."""

    def change(data, root):
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        arrays, facts = dict(load(data)), json.loads(header["facts"])
        for name, new in changes.items():
            place = facts if name in facts else arrays
            place[name.replace("__", ".")] = new(place[name.replace("__", ".")]) if callable(new) else new
        stamps = json.loads(header["stamps"])
        watched = [root / os.fsdecode(bytes.fromhex(name)) for name, _, _ in stamps]
        return index._coded(Found(arrays, facts, watched), root, int(header["began"]))

    return change


def named(*names):
    """Columns of a folder's training images with other names."""
    block = b"".join(names)
    offsets = np.cumsum([0, *(len(name) for name in names)])
    return rewritten(
        names=np.frombuffer(block, np.uint8),
        offsets=offsets,
        labels=np.zeros(len(names), np.int32),
    )


def at(number, value):
    """A column with one value changed."""

    def change(column):
        column = column.copy()
        column[number] = value
        return column

    return change


def stamped(name):
    """The index of a folder that asks for another file to be looked at."""

    def change(data, root):
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        stamps = json.loads(header["__metadata__"]["stamps"])
        header["__metadata__"]["stamps"] = json.dumps([*stamps, [name.hex(), -1, 0]])
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return change


FORGERIES = {
    "names that lead up": ("class folders", named(b"../../../../etc/passwd")),
    "names that lead up further on": ("class folders", named(b"a.png", b"b/../../../c.png")),
    "names that end above": ("class folders", named(b"..")),
    "names from the root": ("class folders", named(b"a.png", b"/etc/passwd")),
    "names with a NUL": ("class folders", named(b"a\0.png")),
    "an empty name": ("class folders", named(b"a.png", b"")),
    "a class that leads up": ("class folders", rewritten(folders=["2e2e", *[n.encode().hex() for n in "bc"]])),
    "a class within one": ("class folders", rewritten(folders=[b"a/b".hex(), *[n.encode().hex() for n in "bc"]])),
    "a class without a name": ("class folders", rewritten(folders=["", *[n.encode().hex() for n in "bc"]])),
    "a class twice": ("class folders", rewritten(folders=[n.encode().hex() for n in "bcb"])),
    "classes that are a number": ("class folders", rewritten(folders=7)),
    "a label beyond the classes": ("class folders", rewritten(labels=at(0, 3))),
    "a negative label": ("class folders", rewritten(labels=at(-1, -2))),
    "offsets that go back": ("class folders", rewritten(offsets=at(1, 10**6))),
    "a negative offset": ("class folders", rewritten(offsets=at(1, -(2**62)))),
    "labels of another type": ("class folders", rewritten(labels=lambda a: a.astype(np.float64))),
    "too few labels": ("class folders", rewritten(labels=lambda a: a[1:])),
    "a file above to look at": ("class folders", stamped(b"../../secret")),
    "a file elsewhere to look at": ("class folders", stamped(b"/etc/shadow")),
    "a file by a detour": ("class folders", stamped(b"train/../../x")),
    "a range after the end of the file": ("TFRecords", rewritten(train__begins=at(0, 10**9))),
    "a place before the file": ("tar archives", rewritten(train__begins=at(0, -5))),
    "a place that overflows": ("tar archives", rewritten(train__begins=at(2, 2**63 - 1))),
    "a size beyond the file": ("TFRecords", rewritten(train__sizes=at(1, 2**32 - 1))),
    "an image longer than its record": ("TFRecords", rewritten(train__lengths=at(1, 2**32 - 1))),
    "an image after the end of its record": ("TFRecords", rewritten(train__skips=at(1, 2**32 - 1))),
    "a shard that is not there": ("TFRecords", rewritten(train__shards=at(0, 3))),
    "a shard before the first": ("tar archives", rewritten(validation__shards=at(0, -1))),
    "a column that does not belong": ("tar archives", rewritten(train__checksums=np.zeros(2, np.uint32))),
    "a million million classes": ("TFRecords", rewritten(count=10**12)),
    "classes of another number": ("TFRecords", rewritten(names=lambda names: names[1:])),
    "class names that are numbers": ("tar archives", rewritten(classes=[1, 2, 3])),
    "fewer classes than labels": ("tar archives", rewritten(classes=["a"])),
    "boxes of nan": ("TFRecords", rewritten(train__boxes=at(0, np.nan))),
    "boxes beyond the image": ("boxes", rewritten(boxes=at(0, [0.0, 0.0, 7.0, 7.0]))),
    "boxes with three sides": ("boxes", rewritten(boxes=lambda a: a[:, :3])),
    "more boxes than there are": ("boxes", rewritten(firsts=at(-1, 10**9))),
    "names of another number": ("boxes", rewritten(offsets=lambda a: np.append(a, a[-1:]))),
    "facts that are a list": ("tar archives", lambda data, _: data.replace(b'"facts":"{', b'"facts":"[')),
    "half of it": ("TFRecords", lambda data, _: data[: len(data) // 2]),
    "a header that says it is endless": ("TFRecords", lambda data, _: b"\xff" * 8 + data[8:]),
    "nesting": ("TFRecords", lambda data, _: (10**5).to_bytes(8, "little") + b"[" * 10**5),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "change"), FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_index_is_refused_in_one_line_and_made_again(made, forged, layout, change):
    root, place = made[layout]
    found, lines = forged(layout, change)
    assert found == seen(layout, root)
    assert len(lines) == 1
    assert lines[0].startswith(f"{place}: damaged or not made by falconet (")
    assert lines[0].endswith(f"); searching {root} again")


def test_a_valid_index_is_used_silently(made, forged):
    for layout, (root, _) in made.items():
        assert forged(layout, rewritten()) == (seen(layout, root), [])


@pytest.mark.parametrize("kind", ["a pipe", "a link to a device", "a folder"])
def test_an_index_that_is_not_a_file_is_ignored(made, tmp_path, kind):
    root = shutil.copytree(made["tar archives"][0], tmp_path / "tar")
    place = root / FOLDER / "tar.safetensors"
    place.unlink()
    {"a pipe": os.mkfifo, "a link to a device": lambda p: p.symlink_to("/dev/zero"), "a folder": Path.mkdir}[kind](
        place
    )
    assert seen("tar archives", root)


def test_an_index_larger_than_memory_is_not_read(made, forged, monkeypatch):
    monkeypatch.setattr(index, "available", lambda: 1000)
    _, lines = forged("tar archives", lambda data, _: data)
    assert len(lines) == 1


NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 0, 1, 2, 3, 255, 2**31 - 1, 2**32 - 1]))
QUIET = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


@pytest.mark.run
@pytest.mark.parametrize("layout", ["class folders", "TFRecords", "tar archives", "boxes"])
@QUIET
@given(data=st.data())
def test_no_numbers_in_an_index_cause_reads_beyond_the_data(made, forged, layout, data):
    """`seen` checks every place against the files; the checksum matches the numbers."""
    arrays = sorted(load(made[layout][1].read_bytes()).items())
    name, column = data.draw(st.sampled_from(arrays))
    bits = np.array(data.draw(st.lists(NUMBERS, min_size=1, max_size=8)), np.int64)
    kept = data.draw(st.integers(0, len(column)))

    def change(old):
        new = old[:kept].copy()
        flat = new.reshape(-1).view(np.uint8)
        odd = bits.view(np.uint8)[: len(flat)]
        begin = data.draw(st.integers(0, (len(flat) - len(odd)) // old.itemsize)) * old.itemsize
        flat[begin : begin + len(odd)] = odd
        return new

    forged(layout, rewritten(**{name.replace(".", "__"): change}))


@pytest.mark.run
@pytest.mark.parametrize("layout", ["class folders", "TFRecords"])
@QUIET
@given(data=st.data())
def test_no_bytes_in_an_index_change_the_images_found(made, forged, layout, data):
    whole = made[layout][1].read_bytes()
    begin = data.draw(st.integers(0, len(whole) - 1))
    odd = data.draw(st.binary(min_size=1, max_size=20))
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    found, _ = forged(layout, lambda old, _: (old[:begin] + odd + old[begin + len(odd) :])[:cut])
    assert found == seen(layout, made[layout][0])
