"""Sources as values."""

from pathlib import Path

import numpy as np

from falconet.data.storage import FileSource, proper


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


def test_boxes_are_clipped_and_empty_ones_left_out():
    found = proper(np.array([[-0.5, 0, 2, 1], [0.5, 0.2, 0.5, 0.9], [0.9, 0.1, 0.2, 0.8], [np.nan, 0, 1, 1]]))
    assert found.tolist() == [[0, 0, 1, 1]]
