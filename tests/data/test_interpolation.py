"""Bicubic resizing against Pillow's, in every decoder, and validation's input against timm's transform."""

import io

import numpy as np
import pytest
import timm
import timm.data
import torch
from PIL import Image

from falconet.config import rules
from falconet.config.commands import TrainOptions
from falconet.config.options import Data
from falconet.data import native
from falconet.data.dataset import open_dataset
from falconet.data.image_files import BadImages
from falconet.data.native.binding import Filter, Status, Workspace
from falconet.data.preprocessing import normaliser, short_side
from falconet.data.readers import reader_for
from falconet.errors import ConfigError

BOXES = {  # width, height, box
    "shrunk": (300, 260, (20, 30, 280, 250)),
    "shrunk far": (900, 700, (10, 20, 890, 690)),
    "enlarged": (40, 30, (5.25, 4.5, 31.75, 29.0)),
    "at the border": (120, 90, (60, 40, 120, 90)),
    "as it is": (96, 96, (0, 0, 48, 48)),
    "a pixel": (30, 30, (7, 9, 8, 10)),
}
SIZE = 48


def soft(width, height, seed=0, *, low=64, high=192):
    """Smooth noise away from black and white: we clip colours after resizing, Pillow before it."""
    noise = np.random.default_rng(seed).integers(low, high, (max(2, height // 24), max(2, width // 24), 3))
    return Image.fromarray(noise.astype(np.uint8)).resize((width, height), Image.Resampling.BILINEAR)


def encoded(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **({"quality": 92} | options))
    return buffer.getvalue()


def decoded(folder, data, box, *, flip=False, portable=False):
    library = native.library()
    if library is None:
        pytest.skip("the native decoder is not built")
    path = folder / "image.jpg"
    path.write_bytes(data)
    workspace, out = Workspace(library, portable=portable), np.zeros((1, SIZE, SIZE, 3), np.uint8)
    workspace.open([bytes(path)])
    statuses = workspace.decode(np.array([box], float), np.array([flip]), out, filter=Filter.BICUBIC)
    assert statuses[0] == Status.OK
    return out[0]


def pillows(data, box, *, flip=False):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    pixels = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box)).astype(int)
    return pixels[:, ::-1] if flip else pixels


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:0"])
@pytest.mark.parametrize("case", BOXES)
def test_the_native_decoder_agrees_with_pillow_to_two_levels(tmp_path, case, sampling):
    width, height, box = BOXES[case]
    data = encoded(soft(width, height), subsampling=sampling)
    for flip in (False, True):
        found = decoded(tmp_path, data, box, flip=flip)
        assert np.abs(found - pillows(data, box, flip=flip)).max() <= 2
        np.testing.assert_array_equal(found, decoded(tmp_path, data, box, flip=flip, portable=True))


@pytest.mark.parametrize("side", [24, 70, 150])
def test_overshoot_at_hard_edges_is_limited_as_in_pillow(tmp_path, side):
    """The squares are less than four times the output: larger photos are reduced while decoding."""
    squares = np.indices((side, side)).sum(axis=0) // max(1, side // 5) % 2 * 255
    data = encoded(Image.fromarray(squares.astype(np.uint8), "L"), quality=100)
    for box in ((0, 0, side, side), (1.5, 2.25, side - 3, side - 4.5)):
        found = decoded(tmp_path, data, box)
        assert np.abs(found - pillows(data, box)).max() <= 2
        np.testing.assert_array_equal(found, decoded(tmp_path, data, box, portable=True))


def test_bicubic_differs_from_bilinear(tmp_path):
    data = encoded(soft(300, 260))
    box = (20, 30, 280, 250)
    bilinear = Image.open(io.BytesIO(data)).resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
    assert np.abs(decoded(tmp_path, data, box).astype(int) - np.asarray(bilinear)).max() > 4


def test_bicubic_needs_antialiasing():
    with pytest.raises(ConfigError, match="--interpolation bicubic: contradicts --no-antialias; expected bilinear"):
        rules.check(TrainOptions(data=Data(interpolation="bicubic", antialias=False)))


def test_the_short_side_is_that_of_the_originals_and_of_timm():
    assert all(short_side(size) == int(size * 256 / 224) for size in range(1, 4097))
    assert [short_side(240, ratio=0.882), short_side(260, ratio=0.89), short_side(224, ratio=1.0)] == [272, 292, 224]


WEIGHTS = ("resnet50.tv_in1k", "tf_efficientnet_lite1.in1k", "resnet18.a1_in1k", "mobilenetv3_large_100.ra_in1k")
PHOTOS = {"wide": (400, 301), "tall": (233, 517), "square": (256, 256), "small": (90, 71), "large": (1500, 1100)}


@pytest.mark.parametrize("tag", WEIGHTS)
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_validation_prepares_photos_as_timm_does(tmp_path, tag, ending):
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        for name, (width, height) in PHOTOS.items():
            soft(width, height, seed=width).save(tmp_path / part / "a" / f"{name}.{ending}", quality=92)
    config = timm.data.resolve_data_config(timm.get_pretrained_cfg(tag).to_dict())
    data = Data(
        data="folder",
        data_dir=tmp_path,
        image_size=config["input_size"][-1],
        interpolation=config["interpolation"],
        validation_crop_ratio=config["crop_pct"],
        pixel_mean=config["mean"],
        pixel_deviation=config["std"],
    )
    images = open_dataset(data, model="resnet50", global_batch=1, seed=0)
    reader = reader_for(images.validation, crops=images.validation_crops(), bad=BadImages(0, note=print))
    size = images.preprocessing.image_size
    pixels = np.zeros((len(PHOTOS), size, size, 3), np.uint8)
    assert reader.read(np.arange(len(PHOTOS)), epoch=0, out=pixels).all()
    found = normaliser(images.preprocessing)(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    level = 1 / (255 * min(config["std"]))
    transform = timm.data.create_transform(**config)
    for index, one in enumerate(found):
        expected = transform(Image.open(images.validation.path(index)).convert("RGB"))
        assert (one - expected).abs().max() <= 2 * level + 1e-5
