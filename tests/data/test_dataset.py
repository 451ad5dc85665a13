"""The data of a run: opened by its options, and a share of its training images."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from falconet.config.options import Data
from falconet.data.dataset import open_dataset, prepared, require_local, share_of
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from falconet.data.shards import Shards
from falconet.data.storage import ArraySource, FileSource, Names, Objects, Places, ShardSource, Splits
from falconet.errors import ConfigError, DataError


def opened(kind, **options):
    data = Data(data=kind, iterations=10, classes=7, **options)
    return open_dataset(data, model="resnet8-cifar", global_batch=4, seed=1)


@pytest.mark.parametrize(
    ("kind", "image_size", "classes", "count", "side"),
    [("digits", "auto", 10, 1437, 8), ("generated", 12, 7, 40, 12)],
)
def test_the_options_open_their_data(kind, image_size, classes, count, side):
    dataset = opened(kind, image_size=image_size)
    assert (dataset.classes, len(dataset.train), dataset.native_size) == (classes, count, side)
    assert dataset.preprocessing.image_size == side


def test_synthetic_data_has_the_labels_of_generated_data():
    assert opened("synthetic", image_size=12).train.labels.tolist() == [number % 7 for number in range(40)]


def test_photos_need_a_folder():
    with pytest.raises(ConfigError, match="folder: no data folder given"):
        opened("folder")


def test_local_data_is_required_of_what_could_be_downloaded(tmp_path):
    require_local(Data(data="digits"))
    require_local(Data(data="folder", data_dir=tmp_path))
    with pytest.raises(DataError, match=f"cifar10: not found under {tmp_path}"):
        require_local(Data(data="cifar10", data_dir=tmp_path))
    (tmp_path / "data_batch_1.bin").touch()
    require_local(Data(data="cifar10", data_dir=tmp_path))


def only(native_size):
    source = ArraySource(np.zeros((1, 32, 32, 3), np.uint8), np.zeros(1, np.int64), ("only",))
    return Splits(train=source, validation=source, native_size=native_size, mean=IMAGENET_MEAN, std=IMAGENET_STD)


@pytest.mark.parametrize(
    ("native_size", "crop", "resize"),
    [(32, "auto", 224), (None, "auto", 256), (32, "centre", 256), (None, "whole", 224)],
)
def test_arrays_are_resized_whole_and_photos_cropped_unless_asked_otherwise(native_size, crop, resize):
    assert prepared(only(native_size), Data(validation_crop=crop), size=224).preprocessing.resize == resize


UNSAVABLE = {
    "NUL": (("a", "b\0c"), r"a class is called 'b\\x00c'; expected text that a file name may have"),
    "half a character": (("\ud800",), r"a class is called '\\ud800'; expected text"),
    "long": (("x" * (11 << 20),), "1 class names of 11,534,340 bytes; expected at most 1,000,000 names"),
    "many": (("a",) * 1_000_001, "1,000,001 class names"),
}


@pytest.mark.parametrize(("names", "message"), UNSAVABLE.values(), ids=UNSAVABLE)
def test_class_names_that_no_checkpoint_could_hold_are_refused(names, message):
    source = ArraySource(np.zeros((1, 8, 8, 3), np.uint8), np.zeros(1, np.int64), names)
    with pytest.raises(DataError, match=message) as caught:
        prepared(splits(source), Data(data="folder", data_dir=Path("photos")), size=8)
    assert str(caught.value).startswith("photos: ")


def test_a_class_folder_whose_name_is_not_utf8_is_opened(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    for split in ("train", "val"):
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / split / name / "1.png")
    data = Data(data="folder", data_dir=tmp_path)
    assert open_dataset(data, model="resnet8-cifar", global_batch=1, seed=0).class_names == (name,)


COUNT = 200
NAMES = ("a", "b")
LABELS = np.repeat([0, 1], COUNT // 2)
IMAGES = np.arange(COUNT, dtype=np.uint8).reshape(COUNT, 1, 1, 1).repeat(3, axis=3)
ARRAY = ArraySource(IMAGES, LABELS, NAMES)


def splits(train):
    return Splits(train=train, validation=ARRAY, native_size=None, mean=(0, 0, 0), std=(1, 1, 1))


@pytest.mark.parametrize("percentage", [1, 10, 33.3, 50, 99])
def test_every_class_keeps_its_share(percentage):
    train = share_of(splits(ARRAY), percentage=percentage).train
    assert len(train) == int(COUNT * percentage / 100)
    assert abs(np.count_nonzero(train.labels == 0) - len(train) / 2) <= 1
    chosen = train.images[np.arange(len(train))][:, 0, 0, 0]
    np.testing.assert_array_equal(train.labels, LABELS[chosen])
    assert np.ptp(np.diff(chosen)) <= 1  # evenly, up to a step


def test_all_images_are_left_alone_and_validation_always_is():
    whole = splits(ARRAY)
    assert share_of(whole, percentage=100) is whole
    assert share_of(whole, percentage=10).validation is ARRAY


def test_a_file_keeps_its_name_its_class_and_its_boxes():
    files = FileSource.of(
        Path("root"), names=[f"{index}.jpg" for index in range(COUNT)], labels=LABELS, class_names=NAMES
    )
    boxes = Objects.of([np.full((index % 3, 4), index, np.float32) for index in range(COUNT)])
    train = share_of(splits(replace(files, objects=boxes)), percentage=10).train
    assert [train.name(index) for index in range(20)] == [f"{'ab'[k >= 100]}/{k}.jpg" for k in range(9, COUNT, 10)]
    assert [len(train.objects[index]) for index in range(20)] == [k % 3 for k in range(9, COUNT, 10)]


def test_an_image_in_a_shard_is_read_from_its_place(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(COUNT)))
    sizes = np.ones(COUNT, np.uint32)
    places = Places(np.zeros(COUNT, np.int32), np.arange(COUNT), sizes, skips=sizes * 0, lengths=sizes)
    names = Names.of([str(index) for index in range(COUNT)])
    train = share_of(splits(ShardSource(Shards([path]), places, LABELS, NAMES, names)), percentage=10).train
    assert [train.encoded(index)[0] for index in range(20)] == list(range(9, COUNT, 10))
    assert train.name(1) == "19"


def test_a_share_without_an_image_is_refused():
    with pytest.raises(DataError, match="1 % of 50 training images leaves none"):
        share_of(splits(ArraySource(IMAGES[:50], LABELS[:50], NAMES)), percentage=1)


def test_other_names_or_labels_are_other_images(image_folder):
    dataset = open_dataset(Data(data="folder", data_dir=image_folder), model="resnet18", global_batch=4, seed=1)
    saved = dataset.fingerprint()
    assert (saved["training"], saved["validation"]) == (24, 8)
    moved = image_folder.rename(image_folder.with_name("moved"))
    again = open_dataset(Data(data="folder", data_dir=moved), model="resnet18", global_batch=4, seed=1)
    assert again.changes_since(saved) is None
    for older in (None, {}, {"training": "24", "validation": 8, "digest": ""}):
        assert again.changes_since(older) is None
    swapped = replace(again, train=replace(again.train, labels=again.train.labels[::-1].copy()))
    fewer = replace(again, train=again.train.subset(np.arange(20)))
    assert "moved has changed" in swapped.changes_since(saved)
    assert "24 to train and 8 to validate then, as many others now" in swapped.changes_since(saved)
    assert "24 to train and 8 to validate then, 20 and 8 now" in fewer.changes_since(saved)
