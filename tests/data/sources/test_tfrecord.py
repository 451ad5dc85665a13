"""TFRecords written by tensorboard's writer and protobuf itself."""

import struct
import tracemalloc

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

import layouts
from falconet.config.options import Data
from falconet.data import layout
from falconet.data.dataset import open_dataset
from falconet.data.image_files import UnreadableImageError
from falconet.data.sources import tfrecord
from falconet.data.sources.tfrecord import Keys
from falconet.errors import DataError

BOXES = ((0.1, 0.2, 0.5, 0.6), (0.0, 0.0, 1.0, 0.25))


@pytest.fixture
def folders(tmp_path):
    return layouts.class_folders(tmp_path / "folders")


@pytest.fixture
def records(folders, tmp_path):
    return layouts.tfrecords(folders, tmp_path / "records", boxes=BOXES)


def test_images_labels_and_names_are_read_as_written(folders, records):
    splits = layout.load_photos(records)
    assert splits.layout == "TFRecords"
    assert splits.class_names == layouts.CLASSES
    for source, split in ((splits.train, "train"), (splits.validation, "val")):
        written = list(layouts.photos_of(folders, split))
        assert [source.encoded(index) for index in range(len(source))] == [path.read_bytes() for path, _ in written]
        assert source.labels.tolist() == [label for _, label in written]


def test_boxes_are_read(records):
    objects = layout.load_photos(records).train.objects
    assert objects.annotated == 18
    np.testing.assert_allclose(objects[7], BOXES, rtol=1e-6)


@pytest.mark.parametrize("inner", ["imagenet-data", "."])
def test_the_inner_folder_of_the_original_is_searched(records, tmp_path, inner):
    if inner != ".":
        (tmp_path / "outer").mkdir()
        records = records.rename(tmp_path / "outer" / inner).parent
    assert len(layout.load_photos(records).train) == 18


def test_records_may_be_in_one_folder_per_split(records):
    for split in ("train", "validation"):
        (records / split).mkdir()
        for path in records.glob(f"{split}-*"):
            path.rename(records / split / path.name)
    assert len(layout.load_photos(records).train) == 18


def test_what_finder_leaves_beside_records_is_passed_over(records):
    for path in list(records.iterdir()):
        named = path.rename(path.with_name(f"{path.name}.tfrecord"))
        named.with_name(f"._{named.name}").write_bytes(b"\0\5\x16\7" + bytes(4092))
    assert len(layout.load_photos(records).train) == 18


def test_the_image_may_come_first_or_last_and_be_large(tmp_path):
    image = layouts.encoded(layouts.photo(1, width=500, height=400), quality=95)
    assert len(image) > 3 * 4096
    made = layouts.Example()
    for name in ("a", "image/encoded", "zz"):
        made.features.feature[name].bytes_list.value.append(image if "/" in name else b"x" * 5000)
    made.features.feature["image/class/label"].int64_list.value.append(3)
    for split in ("train", "validation"):
        layouts.write_records(tmp_path / f"{split}-00000-of-00001", [made.SerializeToString(deterministic=True)] * 2)
    splits = layout.load_photos(tmp_path)
    assert splits.train.encoded(1) == image
    assert splits.train.labels.tolist() == [2, 2]
    assert splits.class_names == ("0", "1", "2")


def test_a_name_that_no_checkpoint_could_hold_is_refused_when_the_data_is_opened(tmp_path):
    record = layouts.example(layouts.encoded(layouts.photo(1)), 1, synset="n01\0")
    for split in ("train", "validation"):
        layouts.write_records(tmp_path / f"{split}-00000-of-00001", [record])
    data = Data(data="imagenet", data_dir=tmp_path)
    with pytest.raises(DataError, match=r"a class is called 'n01\\x00'; expected text that a file name may have"):
        open_dataset(data, model="resnet18", global_batch=1, seed=0)


def test_names_come_from_a_file_if_records_have_none(tmp_path):
    image = layouts.encoded(layouts.photo(1))
    for split in ("train", "validation"):
        layouts.write_records(tmp_path / f"{split}-00000-of-00001", [layouts.example(image, 2)])
    (tmp_path / "labels.txt").write_text("cat\ndog\nrat\n")
    assert layout.load_photos(tmp_path).class_names == ("cat", "dog", "rat")
    (tmp_path / "labels.txt").write_text("cat\n")
    with pytest.raises(DataError, match=r"labels.txt: names 1 class, but labels go from 0 to 1"):
        layout.load_photos(tmp_path)


def flipped(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("native", [True, False])
def test_a_flipped_bit_in_an_image_is_named_when_it_is_read(records, monkeypatch, native):
    if not native:
        monkeypatch.setattr("falconet.data.native.library", lambda: None)
    source = layout.load_photos(records).train
    begin, _, skip, _ = source._range(2)
    flipped(records / "train-00000-of-00003", begin + skip + 40)
    source.encoded(1)
    with pytest.raises(UnreadableImageError, match="checksum mismatch"):
        source.encoded(2)
    assert source.where(2) == f"{records / 'train-00000-of-00003'}: image at byte {begin + skip}"


def record(**features):
    """An Example with these features: bytes, or a label."""
    made = layouts.Example()
    for key, value in features.items():
        feature = made.features.feature[key.replace("__", "/")]
        (feature.bytes_list if isinstance(value, bytes) else feature.int64_list).value.append(value)
    return made.SerializeToString()


@pytest.mark.parametrize("first", [0, 1])
def test_labels_start_at_0_or_1(tmp_path, first):
    for split, labels in (("train", (2, 1, 0)), ("validation", (1, 1))):
        rows = [layouts.example(b"x", label + first, synset="abc"[label]) for label in labels]
        layouts.write_records(tmp_path / f"{split}-00000-of-00001", rows)
    splits = layout.load_photos(tmp_path)
    assert (splits.train.labels.tolist(), splits.validation.labels.tolist()) == ([2, 1, 0], [1, 1])
    assert splits.class_names == ("a", "b", "c")


@pytest.mark.parametrize(
    "name",
    ["flowers-{}.tfrecord-00000-of-00001", "{}.tfrecord", "{}/part.tfrecords", "x_{}-00000-of-00001.tfrecord"],
)
@pytest.mark.parametrize("validation", ["validation", "test", "val"])
def test_records_of_other_makers_are_read_by_their_keys(tmp_path, name, validation):
    for split in ("train", validation):
        rows = [record(img=b"x%d" % label, lbl__id=label, size=7) for label in (0, 1)]
        layouts.write_records(tmp_path / name.format(split), rows)
    splits = layout.load_photos(tmp_path, keys=Keys(image="img", label="lbl/id"))
    assert splits.train.labels.tolist() == splits.validation.labels.tolist() == [0, 1]
    assert splits.train.encoded(1) == b"x1"


def test_records_with_other_keys_show_theirs(tmp_path):
    for split in ("train", "validation"):
        layouts.write_records(tmp_path / f"{split}-00000-of-00001", [record(image=b"x", label=1, size=7)])
    with pytest.raises(DataError) as caught:
        open_dataset(Data(data="folder", data_dir=tmp_path), model="resnet18", global_batch=1, seed=0)
    path = tmp_path / "train-00000-of-00001"
    assert str(caught.value) == (
        f"--tfrecord-keys: {path}: the record at byte 0 has no 'image/encoded', only image, label, size"
    )
    data = Data(data="folder", data_dir=tmp_path, tfrecord_keys="image=image,label=label")
    assert len(open_dataset(data, model="resnet18", global_batch=1, seed=0).train) == 1


FIRST = 12  # bytes before the first record's data


def huge(path):
    length = struct.pack("<Q", 1 << 40)
    path.write_bytes(length + struct.pack("<I", masked_crc32c(length)) + path.read_bytes()[12:])


def text(path):
    layouts.write_records(path, [b"hello, world " * 20])


def unlabelled(path):
    made = layouts.Example()
    made.features.feature["image/encoded"].bytes_list.value.append(b"x")
    layouts.write_records(path, [made.SerializeToString()])


DAMAGE = {
    "the record at byte 0 has a length that does not match its checksum": lambda path: flipped(path, 2),
    "the record at byte 0 has a length that does not match its checksum ": huge,
    "ends within the record at byte 0; cut short?": lambda path: path.write_bytes(path.read_bytes()[:500]),
    "ends within the record at byte 0; cut short? ": lambda path: path.write_bytes(path.read_bytes()[:7]),
    "the record at byte 0 cannot be used: not a tf.train.Example": text,
    "the record at byte 0 has no 'image/class/label', only image/encoded": unlabelled,
    f"the record at byte 0 has the label {2**62}; expected 0 to 1,000,000": lambda path: layouts.write_records(
        path, [layouts.example(b"x", 2**62)]
    ),
    "the record at byte 0 has the label -1; expected 0 to 1,000,000": lambda path: layouts.write_records(
        path, [layouts.example(b"x", -1)]
    ),
}


@pytest.mark.parametrize(("message", "damage"), DAMAGE.items())
def test_damage_is_named(records, message, damage):
    path = records / "train-00001-of-00003"
    damage(path)
    with pytest.raises(DataError) as caught:
        layout.load_photos(records)
    assert str(caught.value) == f"{path}: {message.strip()}"


def test_a_missing_shard_is_named(records):
    (records / "train-00001-of-00003").unlink()
    with pytest.raises(DataError) as caught:
        layout.load_photos(records)
    assert str(caught.value) == f"{records}: no train-00001-of-00003; 2 of 3 are there"


def test_records_without_a_validation_set_are_refused(records):
    (records / "validation-00000-of-00001").unlink()
    with pytest.raises(DataError, match="TFRecords, but none named validation-00000-of-"):
        layout.load_photos(records)


def test_shards_of_two_sets_are_refused(records):
    (records / "train-00003-of-00004").write_bytes(b"")
    with pytest.raises(DataError, match="train shards of several sets: -of-00003 and -of-00004"):
        layout.load_photos(records)


def test_a_duplicate_shard_is_refused(records):
    (records / "train").mkdir()
    (records / "train/train-00001-of-00003").write_bytes((records / "train-00001-of-00003").read_bytes())
    with pytest.raises(DataError) as caught:
        layout.load_photos(records)
    assert str(caught.value) == f"{records}: train shards twice, in {records} and {records}/train"


def test_a_folder_in_place_of_a_shard_is_reported_in_one_line(records):
    (records / "train-00001-of-00003").unlink()
    (records / "train-00001-of-00003").mkdir()
    with pytest.raises(DataError, match=r"cannot be opened \(a folder, not a file\)"):
        layout.load_photos(records)


def test_any_bytes_are_read_as_an_example_or_refused(tmp_path):
    """A thousand random changes of a record give an Example or a MalformedError, nothing else."""
    from falconet.data.sources.tfrecord import MalformedError, parse_example

    record = layouts.example(b"i" * 50, 7, synset="n1", boxes=BOXES)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(1000):
        data = bytearray(record[: rng.integers(1, len(record) + 1)] if rng.random() < 0.3 else record)
        for _ in range(rng.integers(0, 4)):
            data[rng.integers(0, len(data))] = rng.integers(0, 256)
        try:
            found = parse_example(lambda at, count, data=data: bytes(data[at : at + count]), len(data))
            assert 0 <= found.skip <= found.skip + found.length <= len(data)
            seen.add("read")
        except MalformedError:
            seen.add("refused")
    assert seen == {"read", "refused"}


def test_indexing_does_not_read_the_images(records, monkeypatch):
    """Of a record of 500 kB, a few pages are read: ImageNet's 150 GB are not read to index them."""
    image = bytes(500_000)
    layouts.write_records(records / "train-00000-of-00003", [layouts.example(image, 1, synset="n01440764")] * 3)
    read = []
    plain = tfrecord.pread
    monkeypatch.setattr(tfrecord, "pread", lambda *place: read.append(len(plain(*place))) or plain(*place))
    layout.load_photos(records)
    assert sum(read) < 400_000


def delimited(number, data):
    """A protobuf field."""
    length, head = len(data), bytearray([number << 3 | 2])
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*head, length]) + data


def entry(key, feature):
    return delimited(1, delimited(1, delimited(1, key) + delimited(2, feature)))


MANY = 5_000_000  # fields of two bytes
CROWDED = {
    "in the record": b"\x12\x00" * MANY,
    "in the map": delimited(1, b"\x12\x00" * MANY),
    "images": entry(b"image/encoded", delimited(1, b"\x0a\x00" * MANY)),
    "lists of images": entry(b"image/encoded", b"\x12\x00" * MANY),
}


@pytest.mark.parametrize("crowd", CROWDED.values(), ids=CROWDED)
def test_a_record_of_millions_of_fields_takes_little_memory(records, crowd):
    path = records / "train-00001-of-00003"
    layouts.write_records(path, [layouts.example(b"x", 1) + crowd])
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"cannot be used: (more than 100,000 fields|2 images and 1 labels)"):
            layout.load_photos(records)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
