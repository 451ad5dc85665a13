"""The same photos give the same batches, byte for byte, however they are stored, read and continued."""

import hashlib

import numpy as np
import pytest

import layouts
from falconet.data import readers
from falconet.data.buffers import PixelRows
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.layout import load_photos
from falconet.data.loader import BatchShape, EvaluationLoader, Loader, Resources
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import reader_for
from falconet.data.sources import bounding_boxes

PREPROCESSING = Preprocessing(image_size=24, resize=27, mean=IMAGENET_MEAN, std=IMAGENET_STD)
SHAPE = BatchShape(micro_batch=4)
BOXES = ((0.0, 0.0, 0.2, 0.2),)
CSV = "imagenet_2012_bounding_boxes.csv"


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Each layout's folder, with boxes beside it or in it."""
    home = tmp_path_factory.mktemp("layouts")
    folders = layouts.class_folders(home / "folders")
    made = {}
    for name, make in layouts.LAYOUTS.items():
        made[name] = make(folders, home / name, boxes=BOXES) if name == "TFRecords" else make(folders, home / name)
        rows = [f"{path.name},0,0,0.2,0.2\n" for path, _ in layouts.photos_of(folders, "train")]
        (made[name] / CSV).write_text("".join(rows))
    return made


def reader(splits, split, augment):
    def refuse(message):
        raise AssertionError(message)

    bad = BadImages(0, note=refuse)
    source = splits.train if split == "train" else splits.validation
    objects = source.objects if split == "train" else None
    crops = Crops(preprocessing=PREPROCESSING, augment=augment, seed=3, objects=objects)
    return reader_for(source, crops=crops, bad=bad), source.labels


def training(splits, *, workers=2, skip=0, epochs=(0, 1)):
    """Digests of each update's batches."""
    found, labels = reader(splits, "train", "crop-flip")
    loader = Loader(PixelRows(found), labels=labels, shape=SHAPE, seed=3, resources=Resources(workers=workers))
    digests = []
    for epoch in epochs:
        for update in loader.updates(epoch, skip=skip):
            total = hashlib.sha256()
            for batch in update:
                total.update(np.ascontiguousarray(batch.images.numpy()).tobytes() + batch.labels.numpy().tobytes())
            digests.append(total.hexdigest())
    return digests


def validation(splits, *, workers=2):
    found, labels = reader(splits, "validation", "none")
    total = hashlib.sha256()
    loader = EvaluationLoader(PixelRows(found), labels=labels, shape=SHAPE, resources=Resources(workers=workers))
    for batch in loader.batches():
        total.update(np.ascontiguousarray(batch.images.numpy()).tobytes() + batch.labels.numpy().tobytes())
    return total.hexdigest()


@pytest.fixture(params=["native", "Pillow"])
def decoder(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(readers.native, "library", lambda: None)
    elif readers.native.library() is None:
        pytest.skip(readers.native.why_not())
    return request.param


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_every_layout_gives_the_batches_of_class_folders(roots, decoder, name):
    plain, other = load_photos(roots["class folders"]), load_photos(roots[name])
    plain, other = bounding_boxes.without_objects(plain), bounding_boxes.without_objects(other)
    assert training(other) == training(plain)
    assert validation(other) == validation(plain)


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_object_crops_are_the_same_in_every_layout(roots, decoder, name):
    plain, other = (
        bounding_boxes.with_objects(load_photos(roots[layout]), roots[layout]) for layout in ("class folders", name)
    )
    assert training(other) == training(plain)
    assert training(other) != training(bounding_boxes.without_objects(plain))


@pytest.mark.parametrize("workers", [0, 1, 5])
@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_any_number_of_threads_gives_the_same_batches(roots, name, workers):
    splits = load_photos(roots[name])
    assert training(splits, workers=workers) == training(splits, workers=2)
    assert validation(splits, workers=workers) == validation(splits, workers=2)


@pytest.mark.parametrize(("before", "after"), [("class folders", "packed shards"), ("TFRecords", "tar archives")])
def test_a_run_continues_with_the_same_batches_from_another_layout(roots, before, after):
    straight = training(bounding_boxes.without_objects(load_photos(roots[before])), epochs=(1,))
    continued = training(bounding_boxes.without_objects(load_photos(roots[after])), epochs=(1,), skip=2)
    assert straight[2:] == continued
    assert len(continued) == 2
