"""Where batches land: the same pixels, or the values the device would have made of them; never too many."""

import numpy as np
import pytest
import torch

from falconet.data import crops
from falconet.data.buffers import Allowance, PixelLanding, StandardLanding, ValueLanding
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Normalise, Preprocessing, normaliser
from falconet.data.readers import ArrayReader
from falconet.data.source import ArraySource

PREPROCESSING = Preprocessing(image_size=16, resize=18, mean=IMAGENET_MEAN, std=IMAGENET_STD)


class Levels:
    """A reader whose image n has every level somewhere, shifted by n."""

    size, rows = 16, 4

    def read(self, indices, *, epoch, out):
        out[:] = (np.arange(16 * 16 * 3).reshape(16, 16, 3) + indices[:, None, None, None] + epoch) % 256
        return indices != 2


def filled(landing, count=6):
    indices = np.arange(count)
    room = landing.room(len(indices), size=16)
    read = landing.fill(room.images, Levels(), indices, epoch=1)
    return room.images, read


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("preprocessing", [PREPROCESSING, PREPROCESSING.unnormalised], ids=["normalised", "as is"])
def test_values_made_on_the_host_are_those_of_the_device_bit_for_bit(preprocessing, dtype):
    normalise = Normalise(preprocessing, dtype=dtype)
    pixels, read = filled(PixelLanding())
    values, also_read = filled(ValueLanding(normalise))
    wanted = normalise(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    assert values.dtype == dtype
    assert torch.equal(values, wanted)
    assert read.tolist() == also_read.tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pixels_as_they_are_are_whole_numbers_in_every_format(dtype):
    values, _ = filled(ValueLanding(Normalise(PREPROCESSING.unnormalised, dtype=dtype)))
    pixels, _ = filled(PixelLanding())
    assert torch.equal(values.double(), pixels.double())


def test_a_part_may_be_smaller_than_the_one_before():
    landing = ValueLanding(Normalise(PREPROCESSING))
    filled(landing, 5)
    few, _ = filled(landing, 2)
    assert torch.equal(few, filled(landing, 2)[0])
    assert len(few) == 2


@pytest.mark.parametrize(
    ("most", "images", "ahead"), [(1 << 30, 100, 100), (768 * 10, 100, 10), (768 * 10 - 1, 100, 9), (1, 100, 1)]
)
def test_as_many_images_are_read_ahead_as_the_memory_holds(most, images, ahead):
    assert PixelLanding(Allowance(most=most)).ahead(images, size=16) == ahead
    half = ValueLanding(Normalise(PREPROCESSING, dtype=torch.float16), Allowance(most=2 * most))
    assert half.ahead(images, size=16) == ahead


def test_a_portion_replaces_what_the_reader_likes():
    assert PixelLanding().rows(Levels()) == 4
    assert PixelLanding(Allowance(portion=7)).rows(Levels()) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_images_in_memory_are_standardised_before_they_are_shifted(dtype):
    images = np.random.default_rng(2).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    source = ArraySource(images, np.arange(12) % 3, ("a", "b", "c"))
    whole = Preprocessing(image_size=16, resize=16, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    reader = ArrayReader(source, preprocessing=whole, augment="shift-flip", seed=3)
    landing, indices = StandardLanding(dtype), np.array([4, 0, 11, 7, 2])
    room = landing.room(5, size=16)
    assert landing.fill(room.images, reader, indices, epoch=2).all()

    double = images.astype(np.float64)
    wanted = (double - double.mean((1, 2, 3), keepdims=True)) / double.std((1, 2, 3), keepdims=True)
    moves = crops.shifts(indices, side=16, seed=3, epoch=2).tolist()
    mirrored = crops.flips("shift-flip", indices, seed=3, epoch=2).tolist()
    assert True in mirrored
    for found, index, (down, right), flip in zip(room.images, indices, moves, mirrored, strict=True):
        padded = np.pad(wanted[index], ((2, 2), (2, 2), (0, 0)))[2 - down : 18 - down, 2 - right : 18 - right]
        expected = torch.from_numpy(np.ascontiguousarray(padded[:, ::-1] if flip else padded))
        accuracy = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=accuracy, atol=2e-6)
        assert found.count_nonzero() < found.numel() or (down, right) == (0, 0)


def test_what_is_read_otherwise_is_standardised_as_it_was_read():
    pixels, read = filled(PixelLanding())
    values, also_read = filled(StandardLanding(torch.float32))
    wanted = normaliser(PREPROCESSING.by_image)(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=1e-6)
    assert read.tolist() == also_read.tolist()
