"""A share of the training images: spread evenly, and each image with its own label, name, place and boxes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from falconet.data.dataset import share_of
from falconet.data.shards import Shards
from falconet.data.source import ArraySource, FileSource, Names, Objects, Places, ShardSource, Splits
from falconet.errors import DataError

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


def test_all_of_them_are_left_alone_and_validation_always_is():
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


def test_none_at_all_is_a_mistake():
    with pytest.raises(DataError, match="--dataset-percentage: 1 % of 50 training images is none of them"):
        share_of(splits(ArraySource(IMAGES[:50], LABELS[:50], NAMES)), percentage=1)
