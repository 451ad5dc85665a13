"""Where batches land: the same pixels, or the values the device would have made of them; never too many."""

import numpy as np
import pytest
import torch

from falconet.data.landing import Allowance, PixelLanding, ValueLanding
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Normalise, Preprocessing

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
