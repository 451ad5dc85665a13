"""Sources by name."""

import pytest

from falconet.data.dataset import KINDS, RandomImages, open_source
from falconet.errors import ConfigError, DataError

RANDOM = {"data_dir": None, "random": RandomImages(image_size=12, classes=7, images=40, seed=1)}


@pytest.mark.parametrize(("kind", "classes", "count", "side"), [("digits", 10, 1437, 8), ("generated", 7, 40, 12)])
def test_a_kind_gives_its_splits(kind, classes, count, side):
    splits = open_source(kind, **RANDOM)
    assert (len(splits.class_names), len(splits.train), splits.native_size) == (classes, count, side)


def test_synthetic_has_the_labels_of_generated():
    assert open_source("synthetic", **RANDOM).train.labels.tolist() == [number % 7 for number in range(40)]


def test_an_unknown_kind_is_answered_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        open_source("cifar-10", **RANDOM)
    assert str(caught.value) == f"data: got 'cifar-10', wanted one of {', '.join(KINDS)}; did you mean 'cifar10'?"


def test_a_folder_source_wants_a_folder():
    with pytest.raises(DataError, match="folder: no data folder given; --data-dir"):
        open_source("folder", **RANDOM)
