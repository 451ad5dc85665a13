"""The cache: the same pixels without reading them again, in bounded memory."""

import numpy as np
import pytest
from PIL import Image

from falconet.data.buffers import PixelRows
from falconet.data.cache import PixelCache
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, EvaluationLoader, Resources
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import reader_for
from falconet.data.storage import FileSource

COUNT = 21
PREPROCESSING = Preprocessing(image_size=12, resize=14, mean=IMAGENET_MEAN, std=IMAGENET_STD)


class Counting:
    """A reader that notes which images it is asked for."""

    def __init__(self, reader):
        self.reader, self.size, self.rows, self.asked = reader, reader.size, reader.rows, []

    def read(self, indices, *, epoch, out):
        self.asked += indices.tolist()
        return self.reader.read(indices, epoch=epoch, out=out)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    (root / "cat").mkdir()
    random = np.random.default_rng(0)
    for number in range(COUNT):
        pixels = random.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "cat" / f"{number:02}.jpg")
    (root / "cat" / "05.jpg").write_bytes(b"not a photo")
    names = [f"{number:02}.jpg" for number in range(COUNT)]
    return FileSource.of(root, names=names, labels=[0] * COUNT, class_names=("cat",))


def counting(source):
    bad = BadImages(1, note=lambda message: None)
    return Counting(reader_for(source, crops=Crops(preprocessing=PREPROCESSING, augment="none", seed=0), bad=bad))


def batches(reader, source, workers=2):
    shape, resources = BatchShape(micro_batch=4), Resources(workers=workers)
    loader = EvaluationLoader(PixelRows(reader), labels=source.labels, shape=shape, resources=resources)
    return [(batch.images.clone(), batch.labels.clone()) for batch in loader.batches()]


@pytest.mark.parametrize("most", [COUNT, 10, 1])
def test_every_pass_has_the_pixels_and_labels_of_one_without_a_cache(source, most):
    expected = batches(counting(source), source)
    cached = PixelCache(counting(source), images=COUNT, most=most)
    for _ in range(3):
        for (images, labels), (expected_images, expected_labels) in zip(batches(cached, source), expected, strict=True):
            assert (images == expected_images).all()
            assert (labels == expected_labels).all()


def test_cached_images_are_not_read_again_nor_bad_ones(source):
    inner = counting(source)
    cached = PixelCache(inner, images=COUNT, most=COUNT)
    batches(cached, source)
    assert sorted(inner.asked) == list(range(COUNT))
    batches(cached, source)
    assert len(inner.asked) == COUNT


def test_images_that_do_not_fit_are_read_every_time(source):
    inner = counting(source)
    cached = PixelCache(inner, images=COUNT, most=10)
    batches(cached, source, workers=0)
    inner.asked.clear()
    batches(cached, source, workers=0)
    assert sorted(inner.asked) == list(range(11, COUNT))  # the first ten good ones, and number 5, which is bad


def test_an_image_that_two_epochs_read_at_once_takes_one_place(source):
    inner = counting(source)
    cached = PixelCache(inner, images=COUNT, most=COUNT)
    first, all_others, read = np.arange(4), np.arange(4, COUNT), inner.read

    def overtaken(indices, **given):  # by the next epoch, while this one decodes
        inner.read = read
        cached.read(indices, epoch=1, out=np.empty((len(indices), 12, 12, 3), np.uint8))
        return read(indices, **given)

    inner.read = overtaken
    for indices in (first, all_others):
        cached.read(indices, epoch=0, out=np.empty((len(indices), 12, 12, 3), np.uint8))
    inner.asked.clear()
    cached.read(np.arange(COUNT), epoch=2, out=np.empty((COUNT, 12, 12, 3), np.uint8))
    assert inner.asked == []
