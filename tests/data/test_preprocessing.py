"""Preprocessing as a stored value, and normalisation against torchvision's."""

import json
import math

import pytest
import torch
from torchvision.transforms.functional import normalize

from falconet.data.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normalise,
    Preprocessing,
    normaliser,
    short_side,
    standardise_pixels,
)
from falconet.errors import CheckpointError, ConfigError

PHOTOS = Preprocessing(image_size=224, resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def every_pixel_value():
    values = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 16, 16)
    return values.to(memory_format=torch.channels_last)


def test_preprocessing_survives_json():
    assert Preprocessing.from_json(json.loads(json.dumps(PHOTOS.to_json()))) == PHOTOS


MISTAKES = {
    "preprocessing: unknown entry 'image_sise'; did you mean 'image_size'?": {"image_sise": 1},
    "preprocessing: image_size: got '224', expected a whole number, 1 to 4096": {"image_size": "224"},
    "preprocessing: image_size: got 1000000, expected a whole number, 1 to 4096": {"image_size": 10**6},
    "preprocessing: resize: got 0, expected a whole number, 1 to 4096": {"resize": 0},
    "preprocessing: mean: got [0.5], expected three numbers, -1e+06 to 1e+06": {"mean": [0.5]},
    "preprocessing: mean: got [0, 0, nan], expected three numbers, -1e+06 to 1e+06": {"mean": [0, 0, math.nan]},
    "preprocessing: mean: got [0, 0, inf], expected three numbers, -1e+06 to 1e+06": {"mean": [0, 0, math.inf]},
    "preprocessing: std: got [1, 1, 0], expected three numbers, 1e-06 to 1e+06": {"std": [1, 1, 0]},
    "preprocessing: std: got [1, 1, -1], expected three numbers, 1e-06 to 1e+06": {"std": [1, 1, -1]},
    "preprocessing: std: got [1, 1, nan], expected three numbers, 1e-06 to 1e+06": {"std": [1, 1, math.nan]},
    "preprocessing: std: got [1, 1, inf], expected three numbers, 1e-06 to 1e+06": {"std": [1, 1, math.inf]},
    "preprocessing: std: got [1, 1, 1e-300], expected three numbers, 1e-06 to 1e+06": {"std": [1, 1, 1e-300]},
    "preprocessing: std: got [1, 1, 1, 1], expected three numbers, 1e-06 to 1e+06": {"std": [1] * 4},
    "preprocessing: std: got [1, 1, True], expected three numbers, 1e-06 to 1e+06": {"std": [1, 1, True]},
    "preprocessing: std: got [1, 1, {}], expected three numbers, 1e-06 to 1e+06": {"std": [1, 1, {}]},
    "preprocessing: interpolation: got 'cubic', expected 'bilinear' or 'bicubic'": {"interpolation": "cubic"},
}


@pytest.mark.parametrize(("message", "change"), MISTAKES.items())
def test_a_wrong_entry_is_named(message, change):
    with pytest.raises(CheckpointError) as caught:
        Preprocessing.from_json(PHOTOS.to_json() | change)
    assert str(caught.value) == message


def test_a_missing_entry_is_named():
    stored = PHOTOS.to_json()
    del stored["std"]
    with pytest.raises(CheckpointError, match="no entry 'std'"):
        Preprocessing.from_json(stored)


def test_a_crop_larger_than_the_resized_image_is_refused():
    with pytest.raises(ConfigError, match="resize 200 is less than the image size 224"):
        Preprocessing(image_size=224, resize=200, mean=IMAGENET_MEAN, std=IMAGENET_STD)


@pytest.mark.parametrize(("size", "side"), [(224, 256), (160, 182), (380, 434), (32, 36)])
def test_the_short_side_scales_as_256_to_224(size, side):
    assert short_side(size) == side


def test_normalising_equals_torchvision_for_every_pixel_value():
    images = every_pixel_value()
    expected = normalize(images.double() / 255, IMAGENET_MEAN, IMAGENET_STD)
    torch.testing.assert_close(Normalise(PHOTOS)(images).double(), expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    images = every_pixel_value()
    assert torch.equal(Normalise(PHOTOS, dtype=dtype)(images), Normalise(PHOTOS)(images).to(dtype))


def test_normalising_keeps_channels_last_and_adds_nothing_to_the_state():
    normalise = Normalise(PHOTOS)
    assert normalise(every_pixel_value()).is_contiguous(memory_format=torch.channels_last)
    assert normalise.state_dict() == {}


def test_centred_pixels_equal_the_tensorflow_originals():
    pixels = every_pixel_value()
    mean = torch.tensor([123.68, 116.78, 103.94], dtype=torch.float64).view(1, 3, 1, 1)
    torch.testing.assert_close(Normalise(PHOTOS.centred)(pixels).double(), pixels.double() - mean, rtol=0, atol=2e-5)
    assert Preprocessing.from_json(json.loads(json.dumps(PHOTOS.centred.to_json()))) == PHOTOS.centred


def standardised(image):
    """TensorFlow's per_image_standardization by its formula, value by value, in Python's floats."""
    values = [float(value) for value in image.reshape(-1)]
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    divisor = max(deviation, 1 / math.sqrt(len(values)))
    return torch.tensor([(value - mean) / divisor for value in values], dtype=torch.float64).view(image.shape)


def images_to_standardise():
    drawn = torch.randint(0, 256, (5, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    drawn[1] //= 8  # dark
    drawn[2] = 255  # of one colour: its deviation is 0
    drawn[3] = 7
    drawn[3, 1, 4, 5] = 8  # a single level apart: its deviation is just below 1 / sqrt(values)
    return drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_standardised_images_equal_tensorflows(dtype):
    images = images_to_standardise()
    expected = torch.stack([standardised(image) for image in images])
    found = normaliser(PHOTOS.by_image, dtype=dtype)(images.contiguous(memory_format=torch.channels_last))
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    # A mean of 7.0003 is off by at most 5e-7, over a deviation of 0.018; a half has 11 bits.
    torch.testing.assert_close(found.double(), expected, rtol=2e-6 if dtype == torch.float32 else 1e-3, atol=3e-5)
    assert not found[2].any()


def test_images_standardised_on_the_host_equal_tensorflows():
    images = images_to_standardise()
    expected = torch.stack([standardised(image) for image in images])
    found = torch.from_numpy(standardise_pixels(images.permute(0, 2, 3, 1).numpy())).permute(0, 3, 1, 2)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=3e-5)


def test_standardising_does_not_depend_on_the_batch():
    images = images_to_standardise()
    together = normaliser(PHOTOS.by_image)(images)
    assert all(torch.equal(together[row], normaliser(PHOTOS.by_image)(images[row : row + 1])[0]) for row in range(5))


def test_standardising_is_stored_and_off_in_older_checkpoints():
    stored = json.loads(json.dumps(PHOTOS.by_image.to_json()))
    assert stored["standardised"] is True
    assert Preprocessing.from_json(stored) == PHOTOS.by_image
    older = {name: value for name, value in PHOTOS.to_json().items() if name != "standardised"}
    assert Preprocessing.from_json(older) == PHOTOS
    with pytest.raises(CheckpointError, match="standardised: got 'no', expected true or false"):
        Preprocessing.from_json(stored | {"standardised": "no"})


@pytest.mark.gpu
def test_images_standardised_on_cuda_equal_tensorflows():
    images = images_to_standardise()
    expected = torch.stack([standardised(image) for image in images])
    found = normaliser(PHOTOS.by_image).cuda()(images.cuda())
    torch.testing.assert_close(found.double().cpu(), expected, rtol=2e-6, atol=3e-5)
