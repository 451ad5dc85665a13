"""Readers against torchvision: gather or decode, crop, resize, flip."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as reference

from falconet.config.options import Augmentation
from falconet.data import crops, native
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import ArrayReader, NativeReader, PillowReader, reader_for, shifted
from falconet.data.storage import ArraySource, FileSource
from falconet.errors import ConfigError, DataError

INDICES = np.array([3, 0, 11, 7, 5, 2], dtype=np.int64)


def preprocessing(image_size, resize):
    return Preprocessing(image_size=image_size, resize=resize, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def array_source(side=16):
    images = np.random.default_rng(0).integers(0, 256, (12, side, side, 3), dtype=np.uint8)
    return ArraySource(images, np.arange(12) % 3, ("a", "b", "c"))


def read(reader, indices=INDICES, *, epoch=4):
    out = np.full((len(indices), reader.size, reader.size, 3), 77, np.uint8)
    return out, reader.read(indices, epoch=epoch, out=out)


def array_reader(augment, *, side=16, image_size=16, seed=5):
    crops = Crops(preprocessing=preprocessing(image_size, image_size), augment=augment, seed=seed)
    return ArrayReader(array_source(side), crops=crops)


def channels_first(image):
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)


def test_without_augmentation_images_are_unchanged():
    images, ok = read(array_reader("none"))
    np.testing.assert_array_equal(images, array_source().images[INDICES])
    assert ok.all()


@pytest.mark.parametrize("kind", ["shift", "shift-flip"])
def test_a_shift_equals_torchvisions_pad_crop_and_flip(kind):
    images, _ = read(array_reader(kind))
    shifts = crops.shifts(INDICES, side=16, seed=5, epoch=4)
    flips = crops.flips(kind, INDICES, seed=5, epoch=4)
    assert kind == "shift" or 0 < flips.sum() < len(flips)
    for image, index, (down, right), flip in zip(images, INDICES, shifts.tolist(), flips, strict=True):
        expected = reference.pad(channels_first(array_source().images[index]), [2, 2, 2, 2])
        expected = reference.crop(expected, 2 - down, 2 - right, 16, 16)
        expected = reference.hflip(expected) if flip else expected
        assert torch.equal(channels_first(image), expected)


def test_a_shift_of_zero_changes_nothing():
    images = array_source().images
    np.testing.assert_array_equal(shifted(images, np.zeros((12, 2), np.int64)), images)


@pytest.mark.parametrize("image_size", [8, 24, 33])
def test_another_size_equals_pillows_antialiased_resize(image_size):
    images, _ = read(array_reader("none", image_size=image_size))
    for image, index in zip(images, INDICES, strict=True):
        original = Image.fromarray(array_source().images[index])
        expected = reference.resize(original, [image_size, image_size], reference.InterpolationMode.BILINEAR)
        np.testing.assert_array_equal(image, np.asarray(expected))


def test_a_random_crop_of_an_array_resizes_its_box():
    images, _ = read(array_reader("crop-flip", side=32, image_size=24))
    draws = crops.crop_draws(INDICES, seed=5, epoch=4)
    boxes = crops.random_resized_crop(np.full(6, 32), np.full(6, 32), draws)
    flips = crops.flips("crop-flip", INDICES, seed=5, epoch=4)
    for image, index, (x0, y0, x1, y1), flip in zip(images, INDICES, boxes.tolist(), flips, strict=True):
        original = Image.fromarray(array_source(32).images[index])
        expected = reference.resized_crop(original, y0, x0, y1 - y0, x1 - x0, [24, 24])
        expected = reference.hflip(expected) if flip else expected
        # Enlarging takes no pixel from outside the box beyond the outermost half pixel's neighbours.
        scale = 24 / (x1 - x0), 24 / (y1 - y0)
        edge = int(np.ceil(max(scale))) + 1
        inside = (slice(edge, -edge), slice(edge, -edge))
        difference = image[inside].astype(int) - np.asarray(expected)[inside].astype(int)
        assert difference.size == 0 or np.abs(difference).max() <= 1


@pytest.mark.parametrize("kind", get_args(crops.Augment))
def test_reading_an_image_does_not_depend_on_the_batch(kind):
    together, _ = read(array_reader(kind))
    for row, index in enumerate(INDICES):
        alone, _ = read(array_reader(kind), np.array([index]))
        np.testing.assert_array_equal(alone[0], together[row])


def photo(path, *, width, height, number):
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin((rows * (channel + 1) + columns * number) / 9) for channel in range(3)]
    pixels = (127 + 120 * np.stack(waves, axis=2)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "cat").mkdir()
    sizes = [(60, 40), (40, 60), (50, 50), (33, 91)]
    for number, (width, height) in enumerate(sizes):
        photo(tmp_path / "cat" / f"{number}.png", width=width, height=height, number=number)
    names = [f"{number}.png" for number in range(len(sizes))]
    return FileSource.of(tmp_path, names=names, labels=[0] * len(sizes), class_names=("cat",))


def file_reader(source, augment="none", *, allowed=0, note=lambda message: None, size=28):
    bad = BadImages(allowed, note=note)
    crops = Crops(preprocessing=preprocessing(size, size * 8 // 7), augment=augment, seed=5)
    return reader_for(source, crops=crops, bad=bad)


@pytest.mark.parametrize("size", [28, 56])
def test_evaluation_equals_torchvisions_resize_and_centre_crop(photos, size):
    images, ok = read(file_reader(photos, size=size), np.arange(4))
    assert ok.all()
    for index, image in enumerate(images):
        resized = reference.resize(Image.open(photos.path(index)), size * 8 // 7)
        expected = np.asarray(reference.center_crop(resized, [size, size]))
        # The same filter; Pillow may begin with the other direction, which rounds differently between the two.
        assert np.abs(image.astype(int) - expected.astype(int)).max() <= 1


def test_a_random_crop_of_a_file_equals_torchvisions_except_at_its_border(photos):
    images, _ = read(file_reader(photos, "crop-flip"), np.arange(4))
    draws = crops.crop_draws(np.arange(4), seed=5, epoch=4)
    flips = crops.flips("crop-flip", np.arange(4), seed=5, epoch=4)
    for index, image in enumerate(images):
        original = Image.open(photos.path(index))
        size = np.array([original.width]), np.array([original.height])
        x0, y0, x1, y1 = crops.random_resized_crop(*size, draws[index : index + 1])[0].tolist()
        expected = reference.resized_crop(original, y0, x0, y1 - y0, x1 - x0, [28, 28])
        expected = np.asarray(reference.hflip(expected) if flips[index] else expected).astype(int)
        assert np.abs(image[3:-3, 3:-3] - expected[3:-3, 3:-3]).max() <= 1


def test_a_bad_file_is_black_marked_and_noted(photos):
    photos.path(1).write_bytes(b"")
    notes = []
    images, ok = read(file_reader(photos, "crop-flip", allowed=1, note=notes.append), np.arange(4))
    assert ok.tolist() == [True, False, True, True]
    assert not images[1].any()
    assert images[0].any()
    expected = f"{photos.path(1)}: cannot be decoded (empty file); skipped, bad image 1 of 1 allowed"
    assert notes == [expected]


def test_a_bad_file_over_the_limit_ends_the_run(photos):
    photos.path(2).write_text("not an image")
    with pytest.raises(DataError, match=r"cat/2.png: cannot be decoded \(not an image\); 1 bad image"):
        read(file_reader(photos), np.arange(4))


def test_a_one_pixel_image_is_read(tmp_path):
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (1, 1), (9, 8, 7)).save(tmp_path / "cat" / "dot.png")
    source = FileSource.of(tmp_path, names=["dot.png"], labels=[0], class_names=("cat",))
    for kind in ("none", "crop-flip"):
        images, ok = read(file_reader(source, kind), np.array([0]))
        assert ok.all()
        assert (images == [9, 8, 7]).all()


@pytest.mark.parametrize("kind", ["in memory", "in a file"])
def test_a_crop_area_of_1_gives_the_whole_image(kind, photos):
    source = array_source() if kind == "in memory" else photos
    size, indices = preprocessing(16, 16), np.array([2])  # both are square
    bad = BadImages(0, note=lambda message: None)
    random = Crops(preprocessing=size, augment="crop-flip", seed=5)
    whole = reader_for(source, crops=replace(random, augmentation=Augmentation(crop_area=1.0)), bad=bad)
    free = reader_for(source, crops=random, bad=bad)
    fixed = read(reader_for(source, crops=Crops(preprocessing=size), bad=bad), indices)[0]
    for epoch in range(5):
        flips = crops.flips("crop-flip", indices, seed=5, epoch=epoch)
        expected = fixed[:, :, ::-1] if flips[0] else fixed
        assert np.array_equal(read(whole, indices, epoch=epoch)[0], expected)
        assert not np.array_equal(read(free, indices, epoch=epoch)[0], expected)


def test_photos_cannot_be_shifted(photos):
    with pytest.raises(ConfigError, match="augmentation of photos: got 'shift', expected 'crop-flip' or 'none'"):
        file_reader(photos, "shift")


def test_each_kind_of_source_has_its_reader(photos):
    bad = BadImages(0, note=lambda message: None)
    options = {"crops": Crops(preprocessing=preprocessing(16, 16)), "bad": bad}
    assert isinstance(reader_for(array_source(), **options), ArrayReader)
    assert isinstance(reader_for(photos, **options), PillowReader if native.library() is None else NativeReader)
