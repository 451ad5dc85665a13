"""Changes of pixels: every operation, magnitude and policy against torchvision's; draws that depend on the image."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import interpreting
from falconet.config.options import Augmentation
from falconet.data import augment
from falconet.data.augment import NUMBERS, OPERATIONS, Chain, PixelChanges, erased_boxes
from falconet.data.buffers import PixelRows
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, Loader, Resources
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import reader_for
from falconet.data.storage import ArraySource
from tiny import TINY

SIDE = 40
MANY = np.arange(20_000)
EVERYTHING = Augmentation(
    auto_augment="randaugment", color_jitter=0.4, random_erasing=0.5, vertical_flip=0.5, repeated_augmentation=3
)


@pytest.fixture(scope="module")
def photos():
    """Smooth colours with noise, and one flat image; N x 3 x S x S, channels-last."""
    noise = np.random.default_rng(0)
    down, right = np.mgrid[0:SIDE, 0:SIDE]
    waves = [np.sin(down / (3 + n)) + np.cos(right / (4 + n)) for n in range(12)]
    levels = np.stack(waves).reshape(4, 3, SIDE, SIDE) * 50 + 120 + noise.normal(0, 8, (4, 3, SIDE, SIDE))
    levels[3] = 77
    pixels = torch.from_numpy(levels.clip(0, 255).astype(np.uint8))
    return pixels.contiguous(memory_format=torch.channels_last)


def done(images, name, magnitude):
    """Apply one operation to all images, as a chain does."""
    operations = np.full(len(images), NUMBERS[name])
    values = torch.from_numpy(augment._values(operations, np.full(len(images), magnitude), SIDE))
    return augment.APPLY[name](images.permute(0, 2, 3, 1), values).permute(0, 3, 1, 2)


def by_torchvision(images, name, magnitude):
    return v2.RandAugment()._apply_image_or_video_transform(
        images, name, magnitude, interpolation=v2.InterpolationMode.NEAREST, fill={}
    )


def test_the_mean_that_contrast_uses_comes_from_an_integer_sum():
    levels = np.random.default_rng(1).integers(0, 256, (8, 1, 700, 700), dtype=np.uint8)
    grey = torch.from_numpy(levels).expand(-1, 3, -1, -1)
    whole = augment._grey(grey).double().sum((1, 2, 3))
    assert (whole > 2**24).all()  # where not every whole number is a float
    assert torch.equal(augment._mean_grey(grey).flatten(), whole.float() / torch.tensor(700.0**2))


STRENGTHS = {
    **dict.fromkeys(("ShearX", "ShearY"), (0.0, 0.05, -0.3, 0.99)),
    **dict.fromkeys(("TranslateX", "TranslateY"), (0.0, 3.7, -12.2, 32.0)),
    "Rotate": (0.0, 4.5, -30.0, 135.0),
    **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), (0.0, 0.27, -0.9, 0.99)),
    "Posterize": (2, 5, 8),
    "Solarize": (0.0, 0.7, 1.0),
    **dict.fromkeys(("Identity", "AutoContrast", "Equalize", "Invert"), (0.0,)),
}
CASES = [(name, magnitude) for name, magnitudes in STRENGTHS.items() for magnitude in magnitudes]


@pytest.mark.parametrize(("name", "magnitude"), CASES)
def test_every_operation_equals_torchvisions(photos, name, magnitude):
    found, expected = done(photos, name, magnitude), by_torchvision(photos, name, magnitude)
    difference = (found.int() - expected.int()).abs()
    if name in augment.GEOMETRIC:  # a tie between two pixels may go either way
        assert (difference > 0).float().mean() < 0.003
    else:  # one level, where a float product is next to a whole number
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.01


def test_every_operation_is_tested_against_torchvision():
    assert {*STRENGTHS} == {*OPERATIONS} - {"VerticalFlip", "Erase"}


@pytest.mark.parametrize(
    ("found", "space", "bins"),
    [
        (augment.randaugment_magnitudes(SIDE), v2.RandAugment._AUGMENTATION_SPACE, 31),
        (augment.trivialaugment_magnitudes(), v2.TrivialAugmentWide._AUGMENTATION_SPACE, 31),
        (augment.randaugment_magnitudes(SIDE, 10), v2.AutoAugment._AUGMENTATION_SPACE, 10),
    ],
    ids=["randaugment", "trivialaugment", "autoaugment"],
)
def test_operations_and_magnitudes_are_torchvisions(found, space, bins):
    if bins == 31:
        assert set(augment.COMMON) == set(space)
    for name, (magnitudes, signed) in space.items():
        expected = magnitudes(bins, SIDE, SIDE)
        assert (name in augment.SIGNED) == signed
        if expected is None:
            assert name not in found
        else:
            np.testing.assert_allclose(found[name], expected.numpy(), atol=2e-6)


def rounds(asked, indices=MANY, *, epoch=1, seed=3, side=SIDE):
    return list(PixelChanges(augmentation=asked, seed=seed)._rounds(indices, epoch, side))


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_every_operation_is_as_likely_as_the_others(policy):
    for operations, _ in rounds(Augmentation(auto_augment=policy)):
        shares = np.bincount(operations, minlength=len(OPERATIONS)) / len(MANY)
        assert np.flatnonzero(shares).tolist() == [NUMBERS[name] for name in augment.COMMON]
        assert shares[shares > 0] == pytest.approx(1 / len(augment.COMMON), abs=0.008)


def test_randaugment_has_one_strength_with_both_signs():
    (first, second) = rounds(Augmentation(auto_augment="randaugment", randaugment_magnitude=12))
    turned = first.magnitudes[first.operations == NUMBERS["Rotate"]]
    assert set(turned.tolist()) == {-12.0, 12.0}
    assert (turned > 0).mean() == pytest.approx(0.5, abs=0.05)
    assert not np.array_equal(first.operations, second.operations)
    assert len(rounds(Augmentation(auto_augment="randaugment", randaugment_ops=5))) == 5


def test_autoaugment_follows_its_policy():
    (first, second) = rounds(Augmentation(auto_augment="autoaugment"))
    pairs = v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET)._policies
    for place, (operations, _) in enumerate((first, second)):
        for name in OPERATIONS[1:]:
            expected = sum(pair[place][1] for pair in pairs if pair[place][0] == name) / len(pairs)
            assert (operations == NUMBERS[name]).mean() == pytest.approx(expected, abs=0.012), name
    bits = set(first.magnitudes[first.operations == NUMBERS["Posterize"]].tolist())
    assert bits == {4.0, 5.0, 6.0}  # bins 8, 7 and 5 of 10


def test_colour_jitter_draws_factors_and_an_order_for_each_image():
    found = rounds(Augmentation(color_jitter=0.4))
    orders = np.stack([each.operations for each in found])
    assert len({tuple(order) for order in orders.T.tolist()}) == 6
    for each in found:
        assert (each.magnitudes >= -0.4).all()
        assert (each.magnitudes < 0.4).all()
        assert each.magnitudes.mean() == pytest.approx(0, abs=0.01)
    strong = np.concatenate([each.magnitudes for each in rounds(Augmentation(color_jitter=1.5))])
    assert strong.min() >= -1.0  # a factor is never negative
    assert strong.max() > 1.4


def test_erased_boxes_have_torchvisions_shares_and_ratios():
    draws = np.random.default_rng(0).random((3 + 2 * augment.ATTEMPTS, len(MANY)))
    erased, boxes = erased_boxes(draws, 224, share=0.25)
    assert erased.mean() == pytest.approx(0.25, abs=0.01)
    top, bottom, left, right = boxes.T
    assert (top >= 0).all() and (left >= 0).all() and (bottom <= 224).all() and (right <= 224).all()  # noqa: PT018
    torch.manual_seed(0)
    image = torch.zeros(3, 224, 224)
    params = [v2.RandomErasing(p=1.0).make_params([image]) for _ in range(4000)]
    theirs = np.array([(each["h"], each["w"]) for each in params])
    ours = np.stack((bottom - top, right - left), axis=1)
    for mine, other in zip(ours.T, theirs.T, strict=True):
        assert mine.mean() == pytest.approx(other.mean(), rel=0.03)
        assert mine.std() == pytest.approx(other.std(), rel=0.05)


def test_erased_pixels_are_the_datasets_mean_and_the_others_unchanged(photos):
    changes = PixelChanges(augmentation=Augmentation(random_erasing=1.0), fill=IMAGENET_MEAN)
    found = augment.apply(photos, changes.draw(np.arange(4), epoch=0, side=SIDE))
    same = (found == photos).all(dim=1)
    filled = (found == torch.tensor([124, 116, 104])[:, None, None]).all(dim=1)
    assert (same | filled).all()
    assert (filled.flatten(1).float().mean(1) > 0.01).all()
    assert (filled.flatten(1).float().mean(1) < 0.4).all()


def test_a_vertical_flip_mirrors_images_top_to_bottom(photos):
    changes = PixelChanges(augmentation=Augmentation(vertical_flip=1.0))
    found = augment.apply(photos, changes.draw(np.arange(4), epoch=0, side=SIDE))
    assert torch.equal(found, photos.flip(2))
    assert found.is_contiguous(memory_format=torch.channels_last)
    (half,) = rounds(Augmentation(vertical_flip=0.3))
    assert (half.operations > 0).mean() == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment", "autoaugment"])
def test_changes_of_an_image_do_not_depend_on_its_batch(photos, policy):
    changes = PixelChanges(augmentation=Augmentation(auto_augment=policy, color_jitter=0.4, random_erasing=0.5), seed=4)
    images, indices = photos[torch.arange(32) % 4].contiguous(memory_format=torch.channels_last), np.arange(32) * 7
    before = images.clone()
    together = augment.apply(images, changes.draw(indices, epoch=2, side=SIDE))
    assert torch.equal(images, before)
    for row in (0, 13, 31):
        alone = augment.apply(images[row : row + 1], changes.draw(indices[row : row + 1], epoch=2, side=SIDE))
        assert torch.equal(alone[0], together[row])
    another = augment.apply(images, changes.draw(indices, epoch=3, side=SIDE))
    assert not torch.equal(another, together)


def test_a_chain_does_its_rounds_in_order(photos):
    """One round brightens and the next inverts, with images in different orders."""
    operations = [[NUMBERS[name] for name in names] for names in (
        ("Brightness", "Identity", "Brightness", "Invert"),
        ("Invert", "Brightness", "Identity", "Invert"),
    )]  # fmt: skip
    values = torch.zeros(2, 4, augment.VALUES)
    values[:, :, :2] = torch.tensor([1.5, -0.5])  # of the image and of black
    found = augment.apply(photos, Chain(torch.tensor(operations, dtype=torch.int32), values))
    bright = functional.adjust_brightness(photos, 1.5)
    expected = [255 - bright[0], bright[1], bright[2], photos[3]]
    assert torch.equal(found, torch.stack(expected))


@pytest.mark.run
@pytest.mark.skipif(interpreting.ROUNDS_TWICE, reason="the interpreter of Triton 3.6 rounds tl.fma twice")
def test_the_kernels_change_pixels_to_the_same_bytes_as_torch():
    found = interpreting.errors(Path(__file__).with_name("interpreted_augment.py"))
    assert len(found) == 2 * (len(OPERATIONS) + 3)
    assert all(wrong == {"pixels": 0} for wrong in found.values()), found


# The loader.

PREPROCESSING = Preprocessing(image_size=8, resize=8, mean=IMAGENET_MEAN, std=IMAGENET_STD)
COUNT = 70


def loader(augmentation, *, workers=0, **shape):
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8)
    source = ArraySource(images, np.arange(COUNT), tuple(map(str, range(COUNT))))
    crops = Crops(preprocessing=PREPROCESSING, augment="shift-flip", seed=6)
    reader = reader_for(source, crops=crops, bad=BadImages(0, note=print))
    return Loader(
        PixelRows(reader, rows=4),
        labels=source.labels,
        shape=BatchShape(**({"micro_batch": 6, "accumulation": 2} | shape)),
        seed=6,
        augmentation=augmentation,
        resources=Resources(workers=workers),
        fill=IMAGENET_MEAN,
    )


def batches(loading, epoch=1, skip=0):
    return [(batch.images, batch.labels) for update in loading.updates(epoch, skip=skip) for batch in update]


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_augmented_batches_do_not_depend_on_workers_or_restarts():
    straight = batches(loader(EVERYTHING))
    assert_same(batches(loader(EVERYTHING, workers=3)), straight)
    assert_same(batches(loader(EVERYTHING), skip=2), straight[4:])


def test_replicas_share_what_one_process_augments():
    straight = batches(loader(EVERYTHING, accumulation=4))
    halves = [batches(loader(EVERYTHING, accumulation=2, replicas=2, replica=rank)) for rank in range(2)]
    updates = zip(*map(pairs, halves), strict=True)
    assert_same([batch for update in updates for half in update for batch in half], straight)


def pairs(items):
    return [items[place : place + 2] for place in range(0, len(items), 2)]


def test_an_update_has_each_image_as_often_as_asked_with_different_draws():
    repeated = batches(loader(Augmentation(repeated_augmentation=3, auto_augment="trivialaugment")))
    assert len(repeated) == 2 * (COUNT // 12)  # as many updates as without
    seen = []
    for update in pairs(repeated):
        images, labels = torch.cat([pair[0] for pair in update]), torch.cat([pair[1] for pair in update])
        assert labels.tolist() == labels[:4].tolist() * 3
        assert not torch.equal(images[:4], images[4:8])
        seen += labels[:4].tolist()
    assert len(set(seen)) == len(seen) == 4 * (COUNT // 12)


def test_copies_of_an_image_are_cropped_differently():
    repeated = batches(loader(Augmentation(repeated_augmentation=2)))
    images = torch.cat([repeated[0][0], repeated[1][0]])
    assert not torch.equal(images[:6], images[6:])
    plain = batches(loader(Augmentation()))
    assert torch.equal(images[:6], plain[0][0])  # the first copy is the image as it is without others


def test_copies_that_do_not_divide_an_update_fill_it():
    first = batches(loader(Augmentation(repeated_augmentation=5)))[:2]
    labels = torch.cat([pair[1] for pair in first]).tolist()
    assert labels == (labels[:3] * 4)[:12]  # ceil(12 / 5) = 3 images


def test_without_augmentation_batches_have_no_chain():
    assert all(batch.chain is None for update in loader(Augmentation()).streamed(0) for batch in update)


# Runs.

AUGMENTED = (
    "--auto-augment trivialaugment --color-jitter 0.3 --random-erasing 0.5 --vertical-flip 0.5"
    " --repeated-augmentation 2 --mixup-alpha 0.2"
)


def test_an_augmented_run_continues_bit_for_bit(falconet, monkeypatch, tmp_path):
    from runs import assert_bitwise, stop_at

    assert falconet(f"train {TINY} {AUGMENTED} --run-dir straight").code == 0
    with monkeypatch.context() as stopping:
        stop_at(stopping, 3)
        assert falconet(f"train {TINY} {AUGMENTED} --run-dir r").code == 130
    assert falconet("restore --checkpoint-input-path r --dataloader-workers 2").code == 0
    assert_bitwise(tmp_path / "r", tmp_path / "straight")


def test_the_plan_names_what_happens_to_pixels(falconet):
    answer = falconet(f"train {TINY} --plan --auto-augment randaugment")
    assert answer.code == 0, answer.err
    assert "augment none, randaugment (2 of magnitude 9)\n" in answer.out
    answer = falconet(f"train {TINY} --plan {AUGMENTED}")
    words = "trivialaugment, colour jitter 0.3, random erasing 0.5, 2 copies of each image in an update"
    assert f"augment none, vertical flip 0.5, {words}\n" in answer.out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--auto-augment rand", "--auto-augment: got 'rand', expected none, randaugment, trivialaugment or "),
        ("--random-erasing 1.5", "--random-erasing: got '1.5', expected a number, from 0 to 1"),
        ("--repeated-augmentation 0", "--repeated-augmentation: got '0', expected a whole number, at least 1"),
        ("--randaugment-magnitude 31", "--randaugment-magnitude: got '31', expected a whole number, from 0 to 30"),
        (
            "--color-jitter 0.4 --no-eight-bit-io",
            "--color-jitter: changes pixels as bytes, and --no-eight-bit-io copies values; expected --eight-bit-io",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(falconet, line, message):
    answer = falconet(f"train {TINY} {line}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err


def test_options_without_effect_are_noted(falconet):
    answer = falconet(f"train {TINY} --plan --data synthetic --auto-augment randaugment --randaugment-ops 3")
    assert "note: --auto-augment has no effect without data from the host" in answer.out
    answer = falconet(f"train {TINY} --plan --randaugment-ops 3")
    assert "note: --randaugment-ops has no effect without --auto-augment randaugment" in answer.out


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment", "autoaugment"])
def test_the_device_changes_pixels_to_the_same_bytes_as_the_host_without_waiting(photos, policy):
    asked = Augmentation(auto_augment=policy, color_jitter=0.4, random_erasing=0.5, vertical_flip=0.5)
    changes, indices = PixelChanges(augmentation=asked, fill=IMAGENET_MEAN), np.arange(64)
    images = photos[torch.arange(64) % 4].contiguous(memory_format=torch.channels_last)
    chain, there = changes.draw(indices, epoch=0, side=SIDE), images.cuda()
    augment.apply(there, chain.to(there.device))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = augment.apply(there, chain.to(there.device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found.cpu(), augment.apply(images, chain))


@pytest.mark.gpu
def test_a_loader_augments_on_the_device():
    on_host = batches(loader(EVERYTHING))
    loading = loader(EVERYTHING)
    loading._resources = Resources(device=torch.device("cuda"))
    on_device = batches(loading)
    assert_same([(images.cpu(), labels.cpu()) for images, labels in on_device], on_host)


def test_cutout_erases_a_square_of_each_image_at_any_place():
    changes = PixelChanges(augmentation=Augmentation(cutout=3), seed=2, fill=(0.5, 0.25, 1.0))
    indices = np.arange(400)
    images = torch.full((400, 3, 8, 8), 7, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    found = augment.apply(images, changes.draw(indices, epoch=1, side=8)).permute(0, 2, 3, 1)
    erased = (found != 7).any(-1)  # N x S x S
    assert (erased.sum((1, 2)) == 9).all()
    assert (found[erased] == torch.tensor([128, 64, 255], dtype=torch.uint8)).all()
    corners = {tuple(each.nonzero()[0].tolist()) for each in erased}
    assert corners == {(top, left) for top in range(6) for left in range(6)}
    assert all((each.any(0).sum(), each.any(1).sum()) == (3, 3) for each in erased)
