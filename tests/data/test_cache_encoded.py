"""Photos kept encoded in memory: the same batches without the disk, in bounded memory."""

import gc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from falconet.data import native
from falconet.data.buffers import PixelRows
from falconet.data.cache import EncodedCache, can_keep, encoded_bytes
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, Loader, Resources
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import reader_for
from falconet.data.storage import FileSource

pytestmark = pytest.mark.skipif(native.library() is None or not can_keep(), reason="needs the native decoder and memfd")

COUNT = 90
PREPROCESSING = Preprocessing(image_size=12, resize=14, mean=IMAGENET_MEAN, std=IMAGENET_STD)


@pytest.fixture
def source(tmp_path):
    """JPEG files, one of which is a PNG in disguise."""
    (tmp_path / "cat").mkdir()
    random = np.random.default_rng(0)
    names = [f"{number:02}.jpg" for number in range(COUNT)]
    for number, name in enumerate(names):
        pixels = random.integers(0, 256, (20 + number % 9, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "cat" / name, format="PNG" if number == 7 else "JPEG")
    return FileSource.of(tmp_path, names=names, labels=[0] * COUNT, class_names=("cat",))


def reader_of(source):
    bad = BadImages(2, note=lambda message: None)
    return reader_for(source, crops=Crops(preprocessing=PREPROCESSING, augment="crop-flip", seed=3), bad=bad)


def batches(reader, source, epoch):
    shape, resources = BatchShape(micro_batch=45), Resources(workers=3)
    loader = Loader(PixelRows(reader), labels=source.labels, shape=shape, seed=3, resources=resources)
    return [(batch.images.clone(), batch.labels.clone()) for update in loader.updates(epoch) for batch in update]


def assert_equal(found, expected):
    for (images, labels), (expected_images, expected_labels) in zip(found, expected, strict=True):
        assert (images == expected_images).all()
        assert (labels == expected_labels).all()


@pytest.mark.parametrize("most", [1 << 30, 20_000, 0])
def test_the_cache_changes_no_batch(source, most):
    reader = reader_of(source)
    reader.keep(EncodedCache(source, most=most))
    for epoch in range(3):
        assert_equal(batches(reader, source, epoch), batches(reader_of(source), source, epoch))


def test_jpegs_are_not_read_from_the_disk_again(source):
    reader, cache = reader_of(source), EncodedCache(source, most=1 << 30)
    reader.keep(cache)
    batches(reader, source, 0)
    expected = batches(reader_of(source), source, 1)
    assert cache.used == encoded_bytes(source) == sum(source.path(index).stat().st_size for index in range(COUNT))
    for index in range(COUNT):
        if index != 7:  # Pillow reads the PNG from its file
            source.path(index).unlink()
    assert_equal(batches(reader, source, 1), expected)


def test_memory_is_bounded_and_freed(source):
    gc.collect()  # what other tests left
    before = _files_in_memory()
    cache = EncodedCache(source, most=20_000)
    reader = reader_of(source)
    reader.keep(cache)
    batches(reader, source, 0)
    assert 0 < cache.used <= 20_000
    assert _files_in_memory() == before + 1
    del reader, cache
    assert _files_in_memory() == before


def _files_in_memory():
    return sum("falconet-photos" in str(path.resolve()) for path in Path("/proc/self/fd").iterdir())


def test_an_unreadable_file_counts_as_bad_as_without_a_cache(source):
    source.path(3).write_bytes(b"")
    source.path(4).unlink()
    reader = reader_of(source)
    reader.keep(EncodedCache(source, most=1 << 30))
    for epoch in range(2):
        labels = np.concatenate([labels.numpy() for _, labels in batches(reader, source, epoch)])
        assert (labels == -1).sum() == 2
