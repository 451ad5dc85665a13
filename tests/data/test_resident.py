"""Images kept on the device give the same batches, bit for bit, as images that the host reads."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import interpreting
from falconet.cli import main
from falconet.config.options import Augmentation, Data
from falconet.data.crops import Crops, alternating_flips, flips, shifts
from falconet.data.dataset import Dataset
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.data.order import OrderAhead, balanced, shuffled
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import shifted
from falconet.data.resident import picked
from falconet.data.storage import ArraySource
from falconet.numerics.precision import REGIMES
from falconet.parallel.world import ALONE

SIDE, COUNT = 8, 50
PREPROCESSING = Preprocessing(image_size=SIDE, resize=SIDE, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def source(count=COUNT):
    images = np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)
    return ArraySource(images, np.arange(count) % 5, tuple("abcde"))


def batches(location, augmentation, *, augment="shift-flip", order=None, **shape):
    reading = Input(
        data=Data(dataset_location=location, dataloader_workers=2),
        regime=REGIMES["32.32"],
        world=ALONE,
        note=lambda _: None,
    )
    crops = Crops(preprocessing=PREPROCESSING, augment=augment, augmentation=augmentation, seed=4)
    given = Dataset.__new__(Dataset)  # only what a loader looks at
    object.__setattr__(given, "train", source())
    object.__setattr__(given, "check", type("Nothing", (), {"training": ()}))
    made = reading.training_loader(given, crops=crops, shape=BatchShape(micro_batch=6, **shape), order=order)
    try:
        found = [made.updates(epoch, skip=skip) for epoch, skip in ((0, 0), (1, 2), (2, 0))]
        return list(itertools.chain.from_iterable(itertools.chain.from_iterable(found)))
    finally:
        made.close()


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(),
        Augmentation(shift_reach=2, shift_padding="reflect", flip="alternating"),
        Augmentation(shift_reach=7, shift_padding="reflect"),
        Augmentation(repeated_augmentation=3, flip="alternating"),
        Augmentation(cutout=3, mixup_alpha=0.2, auto_augment="randaugment"),
    ],
)
@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip"])
def test_batches_are_those_of_the_host_bit_for_bit(augmentation, augment):
    host, device = (batches(place, augmentation, augment=augment, accumulation=2) for place in ("host", "device"))
    assert len(host) == len(device) > 10
    for a, b in zip(host, device, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
        assert (a.mix is None) == (b.mix is None)
        assert all(map(torch.equal, a.mix or (), b.mix or ()))
    pixels = torch.cat([batch.images.flatten(1) for batch in host])
    assert len(pixels.unique(dim=0)) > COUNT / 2


def test_replicas_and_balanced_orders_get_the_same_too():
    labels = source().labels
    for shape in ({"replicas": 2, "replica": 1}, {"accumulation": 2}):
        host, device = (
            batches(place, Augmentation(), order=balanced(labels, seed=1), **shape) for place in ("host", "device")
        )
        assert all(torch.equal(a.images, b.images) for a, b in zip(host, device, strict=True))


@pytest.mark.parametrize("reflects", [False, True])
def test_picked_images_are_shifted_then_mirrored(reflects):
    images = source().images
    indices = np.array([7, 0, 49, 7])
    moves = np.array([[2, -3], [0, 0], [-5, 4], [7, 7]])
    mirrored = np.array([True, False, True, False])
    expected = shifted(images[indices], moves, reflects=reflects)
    expected[mirrored] = expected[mirrored, :, ::-1]
    staged = torch.from_numpy(np.column_stack((indices, moves, mirrored)))
    found = picked(torch.from_numpy(images), staged, reflects=reflects)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.run
def test_the_kernel_picks_the_same_pixels_as_torch():
    found = interpreting.errors(Path(__file__).with_name("interpreted_pixels.py"))
    assert len(found) == 4
    assert all(wrong == {"pixels": 0} for wrong in found.values()), found


def test_reflected_shifts_are_crops_of_torchs_reflection():
    images, moves = source(4).images, np.array([[2, -1], [0, 3], [-3, -3], [1, 0]])
    padded = torch.nn.functional.pad(torch.from_numpy(images).permute(0, 3, 1, 2).float(), (3, 3, 3, 3), "reflect")
    found = shifted(images, moves, reflects=True)
    for image, whole, (down, right) in zip(found, padded, moves.tolist(), strict=True):
        crop = whole[:, 3 - down : 3 - down + SIDE, 3 - right : 3 - right + SIDE]
        np.testing.assert_array_equal(image, crop.permute(1, 2, 0).numpy())


def test_alternating_flips_show_each_image_once_each_way_in_two_epochs():
    indices = np.arange(1000)
    drawn = [alternating_flips("shift-flip", indices, seed=1, epoch=epoch) for epoch in range(4)]
    assert 0.4 < drawn[0].mean() < 0.6
    assert np.array_equal(drawn[0], flips("shift-flip", indices, seed=1, epoch=0))
    assert np.array_equal(drawn[1], ~drawn[0])
    assert np.array_equal(drawn[2], drawn[0])
    assert np.array_equal(drawn[3], ~drawn[0])
    copies = alternating_flips("shift-flip", indices, seed=1, epoch=1 << 32)
    assert not np.array_equal(copies, drawn[0])
    assert not alternating_flips("shift", indices, seed=1, epoch=1).any()


def test_a_reach_bounds_shifts_and_uses_all_of_it():
    moves = shifts(np.arange(2000), side=32, seed=1, epoch=0, reach=2)
    assert set(moves.ravel().tolist()) == {-2, -1, 0, 1, 2}
    crops = Crops(preprocessing=PREPROCESSING, augment="shift", augmentation=Augmentation(shift_reach=8))
    with pytest.raises(Exception, match="--shift-reach: got 8, expected less than the image's side of 8 pixels"):
        crops.shifts(np.arange(3), side=8, epoch=0)


def test_an_order_drawn_ahead_is_the_same_order():
    plain, ahead = shuffled(100, seed=3), OrderAhead(shuffled(100, seed=3))
    for epoch in (0, 1, 2, 7, 8, 3):
        np.testing.assert_array_equal(ahead(epoch), plain(epoch))
    ahead.close()
    np.testing.assert_array_equal(ahead(5), plain(5))
    ahead.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data cifar10 --augment crop-flip", "--augment: got 'crop-flip', which resizes"),
        ("--data cifar10 --no-eight-bit-io", "which keeps bytes; expected --eight-bit-io"),
        ("--data imagenet --data-dir nowhere", "is decoded photo by photo"),
        ("--data digits --image-size 16 --epoch 1 --device cpu", "keeps images of 8 x 8 as they are"),
        ("--data digits --image-size 16 --plan --device cpu", "keeps images of 8 x 8 as they are"),
        ("--data digits --validation-crop centre --device cpu", "as they are; expected --validation-crop whole, or"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line_before_anything_is_printed(arguments, message, capsys, tmp_path):
    command = ["train", *arguments.split(), "--dataset-location", "device", "--run-dir", str(tmp_path / "run")]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_the_device_equals_one_from_the_host(tmp_path):
    from safetensors.torch import load_file

    for place in ("host", "device"):
        command = (
            f"train --data digits --epoch 1 --micro-batch-size 128 --augment shift-flip --flip alternating --threads 1"
            f" --device cpu --no-report --dataset-location {place} --run-dir {tmp_path / place}"
        )
        assert main(command.split()) == 0
    a, b = (
        load_file(next((tmp_path / place / "checkpoints").glob("*")) / "model.safetensors")
        for place in ("host", "device")
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
