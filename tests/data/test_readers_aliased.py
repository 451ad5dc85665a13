"""Resizing without antialiasing against TensorFlow 1's formula, output by output, in every decoder."""

import io

import numpy as np
import pytest
from PIL import Image

from falconet.data import native, readers
from falconet.data.crops import evaluation_box
from falconet.data.native.binding import Filter, Status, Workspace

BOXES = {  # width, height, box: whole pixels, as training crops them
    "shrunk": (60, 40, (3, 2, 57, 39)),
    "shrunk far": (400, 300, (10, 20, 390, 290)),
    "enlarged": (20, 20, (5, 4, 12, 9)),
    "at the border": (20, 20, (13, 11, 20, 20)),
    "one way each": (90, 9, (0, 0, 90, 9)),
    "a pixel": (30, 30, (7, 9, 8, 10)),
    "the whole of one pixel": (1, 1, (0, 0, 1, 1)),
}
SIZE = 12


def tensorflows(image, size):  # H x W x 3 -> size x size x 3
    """tf.image.resize_images(image, size, BILINEAR, align_corners=False) of TensorFlow 1, one output at a time."""
    height, width = image.shape[:2]
    out = np.zeros((size[0], size[1], 3))
    for i in range(size[0]):
        for j in range(size[1]):
            y, x = i * height / size[0], j * width / size[1]
            top, left = int(y), int(x)
            bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
            above = image[top, left] * (1 - (x - left)) + image[top, right] * (x - left)
            below = image[bottom, left] * (1 - (x - left)) + image[bottom, right] * (x - left)
            out[i, j] = above * (1 - (y - top)) + below * (y - top)
    return out


def noise(width, height):
    return np.random.default_rng(width * height).integers(0, 256, (height, width, 3)).astype(np.uint8)


def cropped(image, box, *, flip):
    """Crop, then mirror, then resize, in the original's order."""
    x0, y0, x1, y1 = (int(side) for side in box)
    crop = image[y0:y1, x0:x1].astype(float)
    return tensorflows(crop[:, ::-1] if flip else crop, (SIZE, SIZE))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("case", BOXES)
def test_a_crop_equals_tensorflows_up_to_rounding(case, flip):
    width, height, box = BOXES[case]
    image = noise(width, height)
    found = readers.resized_aliased(image, box, size=SIZE, flip=flip)
    assert np.abs(found - cropped(image, box, flip=flip)).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("shape", [(90, 61), (61, 90), (64, 64), (333, 200)])
def test_evaluation_resizes_the_image_and_crops_its_centre(shape):
    width, height = shape
    resize, crop = 36, 32
    image = noise(width, height)
    short = min(shape)
    whole = tensorflows(image.astype(float), (int(height * resize / short), int(width * resize / short)))
    top, left = round((whole.shape[0] - crop) / 2), round((whole.shape[1] - crop) / 2)
    box = evaluation_box(width, height, resize=resize, crop=crop)
    found = readers.resized_aliased(image, box, size=crop, flip=False)
    assert np.abs(found - whole[top : top + crop, left : left + crop]).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:0"])
@pytest.mark.parametrize("flip", [False, True])
def test_the_native_decoder_samples_the_same_pixels(tmp_path, sampling, flip):
    library = native.library()
    if library is None:
        pytest.skip("the native decoder is not built")
    for case, (width, height, box) in BOXES.items():
        # No colour near the ends of the scale: it is cut off after the resizing here, before it in Pillow.
        soft = Image.fromarray(noise(6, 5) // 2 + 64).resize((width, height), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        soft.save(buffer, "JPEG", quality=95, subsampling=sampling)
        (tmp_path / "image.jpg").write_bytes(buffer.getvalue())
        workspace, out = Workspace(library), np.zeros((1, SIZE, SIZE, 3), np.uint8)
        workspace.open([bytes(tmp_path / "image.jpg")])
        statuses = workspace.decode(np.array([box], float), np.array([flip]), out, filter=Filter.SAMPLED)
        assert statuses[0] == Status.OK
        image = np.asarray(Image.open(buffer).convert("RGB"))
        assert np.abs(out[0] - cropped(image, box, flip=flip)).max() <= 3, case  # of two roundings and their colours
        assert np.abs(out[0] - cropped(image, box, flip=flip)).mean() <= 0.7, case


def test_pixels_between_distant_outputs_are_ignored():
    """Antialiasing makes a grid of single bright lines grey; sampling finds all of a line or nothing."""
    image = np.zeros((96, 96, 3), np.uint8)
    image[:, ::8] = 255
    found = readers.resized_aliased(image, (0, 0, 96, 96), size=12, flip=False)
    assert found.min() == 255
    shifted = readers.resized_aliased(np.roll(image, 3, axis=1), (0, 0, 96, 96), size=12, flip=False)
    assert shifted.max() == 0
