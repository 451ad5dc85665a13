"""The device's resize, run by Triton's interpreter on the CPU, against Pillow's."""

import importlib
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import interpreting
from falconet.data.preprocessing import Preprocessing

RESIZE = "falconet.data.gpu_resize"


@pytest.fixture
def resize_boxes(monkeypatch):
    """The function, with Triton's interpreter in place of its compiler."""
    interpreting.require()
    from falconet import data

    def forget():
        sys.modules.pop(RESIZE, None)
        vars(data).pop("gpu_resize", None)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreting.replace_the_language_once(monkeypatch.setattr)
    forget()
    yield importlib.import_module(RESIZE).resize_boxes
    forget()


CASES = {  # width, height, box, flipped
    "shrunk": (60, 40, (3, 2, 57, 39), False),
    "flipped": (60, 40, (3, 2, 57, 39), True),
    "enlarged": (20, 20, (5.25, 4.5, 11.75, 9.0), False),
    "one way each": (90, 9, (0, 0, 90, 9), False),
    "a pixel": (30, 30, (7, 9, 8, 10), True),
    "the whole of one pixel": (1, 1, (0, 0, 1, 1), False),
}


def made(**facts):
    return Preprocessing(image_size=12, resize=12, mean=(0, 0, 0), std=(1, 1, 1), **facts)


@pytest.mark.run
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_boxes_agree_with_pillow_to_one_level(resize_boxes, interpolation):
    random = np.random.default_rng(0)
    pixels = [random.integers(48, 208, (height, width, 3), dtype=np.uint8) for width, height, *_ in CASES.values()]
    boxes = np.array([box for _, _, box, _ in CASES.values()], np.float64)
    flips = np.array([flip for *_, flip in CASES.values()])
    out = torch.zeros((len(CASES), 12, 12, 3), dtype=torch.uint8)
    planes = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in pixels]
    resize_boxes(planes, boxes, flips, out, preprocessing=made(interpolation=interpolation))
    for name, image, box, flip, found in zip(CASES, pixels, boxes, flips, out.numpy(), strict=True):
        resized = Image.fromarray(image).resize((12, 12), Image.Resampling[interpolation.upper()], box=tuple(box))
        expected = np.asarray(resized)[:, ::-1] if flip else np.asarray(resized)
        assert np.abs(found.astype(int) - expected).max() <= 1, name


def test_bicubic_overshoot_is_limited_to_a_byte(resize_boxes):
    image = np.zeros((24, 24, 3), np.uint8)
    image[:, 12:] = 255
    out = torch.zeros((1, 12, 12, 3), dtype=torch.uint8)
    plane = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    box = np.array([[3.0, 3, 21, 21]])
    resize_boxes([plane], box, np.array([False]), out, preprocessing=made(interpolation="bicubic"))
    expected = np.asarray(Image.fromarray(image).resize((12, 12), Image.Resampling.BICUBIC, box=(3, 3, 21, 21)))
    assert np.abs(out[0].numpy().astype(int) - expected).max() <= 1


def test_without_antialiasing_boxes_agree_with_the_host(resize_boxes):
    from falconet.data import readers

    random = np.random.default_rng(0)
    cases = {name: case for name, case in CASES.items() if name != "enlarged"} | {
        "enlarged": (20, 20, (5, 4, 12, 9), True),
        "at the border": (20, 20, (13, 11, 20, 20), False),
        "evaluation's": (90, 61, (7.25, 3.5, 80.5, 57.75), False),
    }
    pixels = [random.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height, *_ in cases.values()]
    boxes = np.array([box for _, _, box, _ in cases.values()], np.float64)
    flips = np.array([flip for *_, flip in cases.values()])
    out = torch.zeros((len(cases), 12, 12, 3), dtype=torch.uint8)
    planes = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in pixels]
    resize_boxes(planes, boxes, flips, out, preprocessing=made(antialias=False))
    for name, image, box, flip, found in zip(cases, pixels, boxes, flips, out.numpy(), strict=True):
        expected = readers.resized_aliased(image, tuple(box), size=12, flip=bool(flip))
        assert np.abs(found.astype(int) - expected).max() <= 1, name
