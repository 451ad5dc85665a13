"""The published sizes of missing data."""

import pytest

from falconet.data.dataset import published

SIZES = {"imagenet": (1_281_167, 50_000, 1000), "cifar10": (50_000, 10_000, 10), "cifar100": (50_000, 10_000, 100)}


@pytest.mark.parametrize(("kind", "sizes"), SIZES.items())
def test_the_sizes_are_the_published_ones(kind, sizes, tmp_path):
    splits = published(kind, tmp_path / "nowhere")
    assert (len(splits.train), len(splits.validation), len(splits.class_names)) == sizes
    assert splits.layout == f"the published sizes, because {tmp_path / 'nowhere'} does not have them"
    assert set(splits.validation.labels.tolist()) == set(range(sizes[2]))


def test_the_bytes_of_imagenet_are_those_of_its_archives(tmp_path):
    """The archives of ILSVRC 2012 have 147,897,477,120 and 6,744,924,160 bytes."""
    splits = published("imagenet", None)
    assert splits.train.places.sizes.sum(dtype=int) == pytest.approx(147_897_477_120, rel=1e-4)
    assert splits.validation.places.sizes.sum(dtype=int) == pytest.approx(6_744_924_160, rel=1e-4)


@pytest.mark.parametrize("kind", ["folder", "digits", "generated"])
def test_other_data_has_no_published_size(kind, tmp_path):
    assert published(kind, tmp_path / "nowhere") is None


def test_existing_data_is_not_replaced_by_published_sizes(tmp_path):
    assert published("imagenet", tmp_path) is None
    (tmp_path / "data_batch_1.bin").touch()
    assert published("cifar10", tmp_path) is None
