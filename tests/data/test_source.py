"""Sources as values."""

from pathlib import Path

import numpy as np

from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from falconet.data.source import ArraySource, FileSource, Splits


def test_a_file_source_gives_back_each_path():
    names = ["7.jpg", "b/8.png", "\u00fc.jpeg", "odd \udcff.jpg"]
    source = FileSource.of(Path("root"), names=names, labels=[0, 0, 1, 1], class_names=("cat", "dog"))
    assert len(source) == 4
    assert [source.path(index) for index in range(4)] == [
        Path("root/cat/7.jpg"),
        Path("root/cat/b/8.png"),
        Path("root/dog/\u00fc.jpeg"),
        Path("root/dog/odd \udcff.jpg"),
    ]


def splits_of(native_size):
    source = ArraySource(np.zeros((1, 32, 32, 3), np.uint8), np.zeros(1, np.int64), ("only",))
    return Splits(train=source, validation=source, native_size=native_size, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def test_arrays_are_resized_whole_and_photographs_cropped():
    assert splits_of(32).preprocessing(224).resize == 224
    assert splits_of(None).preprocessing(224).resize == 256
