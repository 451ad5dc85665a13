"""The inspection calls those photos broken that training cannot read, in every layout, with either decoder."""

import io
import os

import numpy as np
import pytest

import layouts
import odd_photos
from falconet.data import headers, inspection, layout, native
from falconet.data.findings import Limits, Photos, find, kind_of_broken, superfluous
from falconet.data.image_files import UnreadableImageError, open_rgb
from falconet.data.inspection import Mark, inspect
from falconet.data.shards import Shards
from falconet.data.storage import FileSource, Places, ShardSource


@pytest.fixture(params=["native", "pillow"])
def decoder(request, monkeypatch):
    if request.param == "pillow":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.why_not())
    return request.param


def looked_at(path, *, workers=2, limits=None):
    splits = layout.survey(path)
    photos = Photos(splits, splits.train, splits.validation)
    *_, (seen, _) = inspect([splits.train, splits.validation], workers=workers)
    return photos, seen, find(photos, seen, limits or Limits())


def by_kind(findings, root):
    return {
        finding.kind: [os.path.relpath(photo.path, root) for photo in finding.photos]
        for finding in (*findings.broken, *findings.remarks)
    }


def kinds_of(files):
    found = {}
    for path, kind in sorted(files.items()):
        found.setdefault(kind, []).append(path)
    return found


def test_everything_that_is_wrong_is_found_and_nothing_else(tmp_path, decoder):
    root = odd_photos.build(tmp_path / "odd")
    _, seen, findings = looked_at(root)
    expected = kinds_of(odd_photos.BROKEN | odd_photos.REMARKS)
    if decoder == "pillow":
        del expected["damaged-readable"]  # libjpeg's warnings stay within Pillow
    assert by_kind(findings, root) == expected
    assert seen.checked == len(seen)
    assert findings.is_broken


def test_copies_are_grouped_by_what_they_cross(tmp_path, decoder):
    root = odd_photos.build(tmp_path / "odd")
    _, _, findings = looked_at(root)
    found = {
        (copies.is_exact, copies.crosses, copies.conflicts): [
            os.path.relpath(each.path, root) for each in copies.photos
        ]
        for copies in findings.copies
    }
    assert found == {
        (True, False, False): ["train/cat/a.jpg", "train/cat/copy.jpg"],
        (True, True, True): ["train/dog/a.jpg", "val/cat/same-as-train.jpg"],
        (False, True, True): ["train/cat/a.jpg", "train/cat/copy.jpg", "val/dog/near.jpg"],
        (False, False, False): ["train/bird/a.jpg", "train/bird/near.jpg"],
    }
    left = {
        near: [os.path.relpath(each.path, root) for each in superfluous(findings, near=near)] for near in (False, True)
    }
    assert left[False] == ["train/cat/copy.jpg", "train/dog/a.jpg"]
    assert left[True] == ["train/bird/near.jpg", "train/cat/a.jpg", "train/cat/copy.jpg", "train/dog/a.jpg"]


def test_classes_on_one_side_only_and_empty_ones_are_named(tmp_path):
    root = odd_photos.build(tmp_path / "odd")
    (root / "val/fish").mkdir()
    (root / "val/fish/a.jpg").write_bytes(layouts.encoded(layouts.photo(40)))
    _, _, findings = looked_at(root)
    assert (findings.untrained, findings.unvalidated) == (("fish",), ("bird",))
    assert findings.empty == (f"{root}/train/nothing",)
    assert {each.name: (each.train, each.validation) for each in findings.classes} == {
        "bird": (2, 0),
        "cat": (7, 2),  # without those that are broken, which training leaves out
        "dog": (5, 2),
        "fish": (0, 1),
    }
    assert findings.imbalance == 3.5


CONTENTS = {
    "cut JPEG": layouts.encoded(layouts.photo(1))[:-300],
    "JPEG without its last two bytes": layouts.encoded(layouts.photo(1))[:-2],
    "JPEG cut, with an end": layouts.encoded(layouts.photo(1))[:-300] + b"\xff\xd9",
    "JPEG with a part missing": odd_photos.garbled(
        layouts.encoded(layouts.photo(1, width=300, height=200), quality=95)
    ),
    "cut progressive JPEG": layouts.encoded(layouts.photo(1), progressive=True)[:-300],
    "cut PNG": layouts.encoded(layouts.photo(1), "PNG")[:-300],
    "cut WebP": layouts.encoded(layouts.photo(1), "WEBP")[:-300],
    "cut GIF": layouts.encoded(layouts.photo(1), "GIF")[:-300],
    "text": b"hello",
    "zeros": bytes(3000),
    "whole": layouts.encoded(layouts.photo(1)),
    "bytes after the end": layouts.encoded(layouts.photo(1)) + bytes(5000),
}


@pytest.mark.parametrize("data", CONTENTS.values(), ids=CONTENTS.keys())
def test_photos_that_training_cannot_read_are_broken(tmp_path, decoder, data):
    (tmp_path / "c").mkdir()
    path = tmp_path / "c/x.jpg"
    path.write_bytes(data)
    source = FileSource.of(tmp_path, names=["x.jpg"], labels=[0], class_names=("c",))
    ((seen, _),) = inspect([source], workers=1)
    (checked,) = headers.read_headers([source], home=tmp_path, workers=1)
    try:
        open_rgb(path)
        is_read = True
    except UnreadableImageError:
        is_read = False
    assert bool(seen.marks[0] & Mark.BROKEN) == (bool(checked.reasons) or not is_read)


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_every_layout_is_inspected_alike(tmp_path, decoder, name):
    root = layouts.class_folders(tmp_path / "folders")
    bad = root / "train" / layouts.CLASSES[0] / f"{layouts.CLASSES[0]}_0.JPEG"
    copied = root / "val" / layouts.CLASSES[2] / f"{layouts.CLASSES[2]}_0.JPEG"
    copied.write_bytes((root / "train" / layouts.CLASSES[1] / f"{layouts.CLASSES[1]}_0.JPEG").read_bytes())
    if name != "packed shards":  # which leave broken photos out
        bad.write_bytes(bad.read_bytes()[:-300])
    _, seen, findings = looked_at(layouts.LAYOUTS[name](root, tmp_path / "target"))
    assert len(seen) == 24
    assert [finding.kind for finding in findings.broken] == ([] if name == "packed shards" else ["truncated"])
    exact = [copies for copies in findings.copies if copies.is_exact]
    assert [(len(each.photos), each.crosses, each.conflicts) for each in exact] == [(2, True, True)]


def test_a_flipped_bit_of_a_shard_is_broken(tmp_path):
    target = layouts.pack(layouts.class_folders(tmp_path / "folders"), tmp_path / "packed")
    path = target / "train-00001.falconet"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    _, _, findings = looked_at(target)
    ((photo,),) = [finding.photos for finding in findings.broken]
    assert photo.detail == "checksum mismatch"
    assert photo.path.startswith(f"{path}: ")


def test_the_number_of_threads_changes_nothing(tmp_path):
    root = odd_photos.build(tmp_path / "odd")
    results = [looked_at(root, workers=workers)[1] for workers in (1, 5)]
    assert np.array_equal(results[0].marks, results[1].marks)
    assert np.array_equal(results[0].digests, results[1].digests)
    assert np.array_equal(results[0].prints.prints, results[1].prints.prints)
    assert results[0].details == results[1].details


def test_both_decoders_give_nearly_the_same_fingerprint(tmp_path, monkeypatch):
    if native.library() is None:
        pytest.skip(native.why_not())
    (tmp_path / "c").mkdir()
    names = ["astronaut", "chelsea", "coffee", "rocket"]
    for name in names:
        (tmp_path / f"c/{name}.jpg").write_bytes(layouts.encoded(odd_photos.sample(name)))
    source = FileSource.of(tmp_path, names=[f"{name}.jpg" for name in names], labels=[0] * 4, class_names=("c",))
    ((first, _),) = inspect([source], workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        ((second, _),) = inspect([source], workers=1)
    assert np.array_equal(first.digests, second.digests)
    assert np.array_equal(first.sizes, second.sizes)
    assert np.bitwise_count(first.prints.prints ^ second.prints.prints).sum(axis=1).max() <= 8


def test_a_phones_photo_with_two_pictures_is_not_animated(tmp_path):
    (tmp_path / "c").mkdir()
    layouts.photo(1).save(tmp_path / "c/x.jpg", "MPO", save_all=True, append_images=[layouts.photo(2)])
    source = FileSource.of(tmp_path, names=["x.jpg"], labels=[0], class_names=("c",))
    ((seen, _),) = inspect([source], workers=1)
    assert Mark(int(seen.marks[0])) == Mark.CHECKED


def test_sixteen_bits_of_three_channels_are_noted(tmp_path):
    """Pillow reduces them to 8 bits, which its mode does not show."""
    (tmp_path / "c").mkdir()
    rows = b"".join(b"\0" + np.random.default_rng(row).bytes(64 * 6) for row in range(64))
    (tmp_path / "c/x.png").write_bytes(odd_photos.png(64, 64, bits=16, rows=rows))
    source = FileSource.of(tmp_path, names=["x.png"], labels=[0], class_names=("c",))
    ((seen, _),) = inspect([source], workers=1)
    assert seen.details == {(0, Mark.WIDE): "16 bits per channel"}


JPEG, WEBP = layouts.encoded(layouts.photo(1)), layouts.encoded(layouts.photo(1), "WEBP")
KINDS = {
    "cut JPEG": (JPEG[:-300], "truncated"),
    "cut WebP": (WEBP[:-20], "truncated"),
    "empty": (b"", "empty"),
    "text": (b"hello", "not-an-image"),
    "WebP of zeros": (WEBP[:20] + bytes(len(WEBP) - 20), "damaged"),
    "texture of no known kind": (b"DDS " + (124).to_bytes(4, "little") + bytes(120), "damaged"),
    "PNG of 20,000 x 20,000": (odd_photos.png(20_000, 20_000), "too-large"),
}


@pytest.mark.parametrize(("data", "kind"), KINDS.values(), ids=KINDS)
def test_every_reason_of_a_decoder_has_its_kind(data, kind):
    with pytest.raises(UnreadableImageError) as caught:
        open_rgb(io.BytesIO(data))
    assert kind_of_broken(str(caught.value)) == kind


def test_every_reason_of_the_check_of_headers_has_its_kind(tmp_path):
    large, gone = tmp_path / "large.png", tmp_path / "gone.jpg"
    large.write_bytes(odd_photos.png(20_000, 20_000))
    reasons = headers.look([os.fsencode(large), os.fsencode(gone), os.fsencode(tmp_path)]).reasons
    assert [kind_of_broken(reasons[number]) for number in range(3)] == ["too-large", "missing", "unreadable"]


@pytest.mark.parametrize(("size", "checksum"), [(len(JPEG) + 1, 0), (len(JPEG), 0)], ids=["cut short", "changed"])
def test_every_reason_of_a_shard_has_its_kind(tmp_path, size, checksum):
    path = tmp_path / "shard"
    path.write_bytes(JPEG)
    places = Places(
        shards=np.zeros(1, np.int32),
        begins=np.zeros(1, np.int64),
        sizes=np.array([size], np.uint32),
        checksums=np.array([checksum], np.uint32),
    )
    with pytest.raises(UnreadableImageError) as caught:
        ShardSource(Shards([path]), places, np.zeros(1, np.int64), ("c",)).encoded(0)
    assert kind_of_broken(str(caught.value)) == "damaged"


def test_an_error_of_a_thread_ends_the_inspection(tmp_path, monkeypatch):
    root = layouts.class_folders(tmp_path / "folders")

    def fails(*_):
        raise AssertionError("a bug")

    monkeypatch.setattr(inspection, "fingerprints", fails)
    with pytest.raises(AssertionError, match="a bug"):
        looked_at(root)
