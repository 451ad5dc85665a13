"""Mixup and cutmix: the draws against closed forms, the mixing against plain arithmetic."""

import math

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from falconet.config import rules
from falconet.config.commands import TrainOptions
from falconet.config.options import Augmentation, Data
from falconet.data import mixing
from falconet.data.mixing import Mix
from falconet.errors import ConfigError
from falconet.evaluation.loss import Loss

INDICES = np.arange(20_000, dtype=np.int64)
NO_BOX = torch.zeros(4, dtype=torch.int64)


def apply(images, labels, mix, *, targets):
    """Mixed images and their targets."""
    side = images.shape[-1]
    return mixing.mixed_images(images, mix), mixing.mixed_targets(labels, mix, targets=targets, side=side)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.2, 0.05])
def test_beta_has_the_mean_and_the_variance_of_its_closed_form(alpha):
    drawn = mixing.beta(alpha, indices=INDICES, seed=3, epoch=0)
    variance = 1 / (4 * (2 * alpha + 1))
    assert drawn.mean() == pytest.approx(0.5, abs=5 * math.sqrt(variance / len(drawn)))
    assert drawn.var() == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize(
    ("alpha", "distribution"),
    [(1.0, lambda x: x), (0.5, lambda x: 2 / np.pi * np.arcsin(np.sqrt(x)))],
    ids=["uniform", "arcsine"],
)
def test_beta_follows_its_closed_form_distribution(alpha, distribution):
    drawn = np.sort(mixing.beta(alpha, indices=INDICES, seed=3, epoch=0))
    distance = np.abs(distribution(drawn) - (np.arange(len(drawn)) + 0.5) / len(drawn)).max()
    assert distance < 1.95 / math.sqrt(len(drawn))  # Kolmogorov-Smirnov, 0.1 %


def test_beta_follows_numpys_for_the_originals_alpha():
    drawn = np.sort(mixing.beta(0.2, indices=INDICES, seed=3, epoch=0))
    reference = np.sort(np.random.default_rng(0).beta(0.2, 0.2, len(INDICES)))
    both = np.concatenate((drawn, reference))
    shares = [np.searchsorted(numbers, both, side="right") / len(numbers) for numbers in (drawn, reference)]
    assert np.abs(shares[0] - shares[1]).max() < 1.95 * math.sqrt(2 / len(INDICES))


def test_beta_of_a_tiny_alpha_is_still_a_number():
    drawn = mixing.beta(1e-4, indices=INDICES[:1000], seed=3, epoch=0)
    assert np.isfinite(drawn).all()


def test_beta_depends_on_the_image_not_on_the_batch():
    together = mixing.beta(1.0, indices=INDICES[:100], seed=3, epoch=0)
    alone = mixing.beta(1.0, indices=INDICES[40:41], seed=3, epoch=0)
    assert alone[0] == together[40]


def draw(options, *, micro_batch=0, side=224):
    return mixing.draw(options, indices=INDICES[:64], micro_batch=micro_batch, side=side, seed=3, epoch=1)


def test_an_image_keeps_at_least_half_of_itself_in_mixup():
    weights = draw(Augmentation(mixup_alpha=0.7)).mixup
    assert weights.dtype == torch.float32
    assert weights.min() >= 0.5
    assert weights.max() < 1


@pytest.mark.parametrize("bounds", [(0.0, 0.0), (1.0, 1.0)])
def test_bounds_of_0_and_of_1_disable_cutmix(bounds):
    options = Augmentation(mixup_alpha=0.2, cutmix_lambda_low=bounds[0], cutmix_lambda_high=bounds[1])
    assert draw(options).box.tolist() == [0, 0, 0, 0]


def boxes(**options):
    return [draw(Augmentation(**options), micro_batch=number).box.tolist() for number in range(400)]


def test_a_cutmix_box_is_square_inside_and_as_large_as_its_share():
    sides = []
    for top, bottom, left, right in boxes(cutmix_lambda_low=0.25, cutmix_lambda_high=0.75):
        assert bottom - top == right - left
        assert top >= 0 <= left
        assert bottom <= 224 >= right
        sides.append(bottom - top)
    kept = 1 - (np.array(sides) / 224) ** 2
    assert kept.min() >= 0.25 - 0.005
    assert kept.max() <= 0.75 + 0.005
    assert kept.mean() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(12 * 400))


def test_a_constant_share_gives_a_constant_box_at_uniform_offsets():
    placed = np.array(boxes(cutmix_lambda_low=0.75, cutmix_lambda_high=0.75))
    assert set((placed[:, 1] - placed[:, 0]).tolist()) == {112}
    assert placed[:, 0].mean() == pytest.approx(56, abs=5 * 112 / math.sqrt(12 * 400))
    assert placed[:, 2].mean() == pytest.approx(56, abs=5 * 112 / math.sqrt(12 * 400))


def test_cutmix_is_skipped_as_often_as_asked():
    drawn = boxes(cutmix_lambda_low=0.5, cutmix_lambda_high=0.5, cutmix_disable_prob=0.35)
    skipped = sum(box == [0, 0, 0, 0] for box in drawn) / len(drawn)
    assert skipped == pytest.approx(0.35, abs=5 * math.sqrt(0.35 * 0.65 / 400))


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 1),
        ({"mixup_alpha": 0.2}, 2),
        ({"cutmix_lambda_low": 0.5, "cutmix_lambda_high": 1.0}, 2),
        ({"mixup_alpha": 0.2, "cutmix_lambda_low": 0.5, "cutmix_lambda_high": 1.0}, 2),
    ],
)
def test_the_rules_ask_for_as_many_images_as_mixing_needs(options, least):
    augmentation = Augmentation(**options)
    rules.check(TrainOptions(augmentation=augmentation, data=Data(micro_batch_size=least)))
    assert (
        len(mixing.draw(augmentation, indices=INDICES[:least], micro_batch=0, side=8, seed=3, epoch=0).mixup) == least
    )
    if least > 1:
        with pytest.raises(ConfigError, match=f"expected at least {least}"):
            rules.check(TrainOptions(augmentation=augmentation, data=Data(micro_batch_size=least - 1)))
        with pytest.raises(AssertionError):
            mixing.draw(augmentation, indices=INDICES[: least - 1], micro_batch=0, side=8, seed=3, epoch=0)


def batch(count=5, side=10):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, side, side, generator=generator).to(memory_format=torch.channels_last)
    return images, torch.tensor([2, 0, 3, 1, 2])[:count]


def test_half_and_half_is_the_mean_with_the_batch_rolled_by_one():
    images, labels = batch()
    mixed, targets = apply(images, labels, Mix(torch.full((5,), 0.5), NO_BOX), targets=Loss(4).targets)
    torch.testing.assert_close(mixed, (images + images.roll(1, 0)) / 2)
    assert targets.tolist() == [[0, 0, 1, 0], [0.5, 0, 0.5, 0], [0.5, 0, 0, 0.5], [0, 0.5, 0, 0.5], [0, 0.5, 0.5, 0]]


def test_cutmix_pastes_the_box_of_the_batch_rolled_by_two():
    images, labels = batch()
    mix = Mix(torch.ones(5), torch.tensor([1, 6, 4, 9]))
    mixed, targets = apply(images, labels, mix, targets=Loss(4).targets)
    expected = images.clone()
    expected[:, :, 1:6, 4:9] = images.roll(2, 0)[:, :, 1:6, 4:9]
    assert torch.equal(mixed, expected)
    one_hot = torch.eye(4)[labels]
    torch.testing.assert_close(targets, 0.75 * one_hot + 0.25 * one_hot.roll(2, 0))


def test_cutmix_of_two_images_pastes_each_into_the_other():
    """The TensorFlow original does the same: it rolls a batch of two by one."""
    images, labels = batch(2)
    mix = Mix(torch.ones(2), torch.tensor([1, 6, 4, 9]))
    mixed, targets = apply(images, labels, mix, targets=Loss(4).targets)
    expected = images.clone()
    expected[:, :, 1:6, 4:9] = images.flip(0)[:, :, 1:6, 4:9]
    assert torch.equal(mixed, expected)
    one_hot = torch.eye(4)[labels]
    torch.testing.assert_close(targets, 0.75 * one_hot + 0.25 * one_hot.flip(0))


def test_both_at_once_weigh_four_labels_by_products():
    images, labels = batch()
    own = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5])
    mixed, targets = apply(images, labels, Mix(own, torch.tensor([0, 5, 0, 5])), targets=Loss(4).targets)
    for row in range(5):
        first = own[row] * images[row] + (1 - own[row]) * images[row - 1]
        pasted = own[row - 2] * images[row - 2] + (1 - own[row - 2]) * images[row - 3]
        first[:, :5, :5] = pasted[:, :5, :5]
        torch.testing.assert_close(mixed[row], first)
        target = torch.zeros(4)
        target[labels[row]] += 0.75 * own[row]
        target[labels[row - 1]] += 0.75 * (1 - own[row])
        target[labels[row - 2]] += 0.25 * own[row - 2]
        target[labels[row - 3]] += 0.25 * (1 - own[row - 2])
        torch.testing.assert_close(targets[row], target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ones_and_an_empty_box_change_no_bit(dtype):
    images, labels = batch()
    images = images.to(dtype)
    mixed, targets = apply(images, labels, Mix(torch.ones(5), NO_BOX), targets=Loss(4).targets)
    assert torch.equal(mixed, images)
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(targets, torch.eye(4)[labels])


def test_without_a_mix_targets_are_one_hot_and_zero_for_minus_one():
    images, _ = batch(3)
    same, targets = apply(images, torch.tensor([1, -1, 0]), None, targets=Loss(2).targets)
    assert same is images
    assert targets.tolist() == [[0, 1], [0, 0], [1, 0]]


def test_an_image_labelled_minus_one_has_no_effect():
    images, _ = batch(4)
    mix = Mix(torch.full((4,), 0.75), NO_BOX)
    _, targets = apply(images, torch.tensor([0, -1, 1, 1]), mix, targets=Loss(2).targets)
    assert targets.tolist() == [[0.75, 0.25], [0, 0], [0, 0.75], [0, 1]]


def test_applying_can_be_traced_as_one_graph():
    # No branch on a tensor's value and no question to the device: what a captured step needs.
    images, labels = batch()
    mix = Mix(torch.full((5,), 0.75), torch.tensor([1, 6, 4, 9]))

    def applied(images, labels, own, box):
        return apply(images, labels, Mix(own, box), targets=Loss(4).targets)

    traced = make_fx(applied, tracing_mode="fake")(images, labels, *mix)
    for given, expected in zip(traced(images, labels, *mix), applied(images, labels, *mix), strict=True):
        assert torch.equal(given, expected)


def test_three_images_are_enough_for_mixup_and_cutmix_together():
    """Image i is (1-m) of i-1 and m of itself; the pasted quarter is m of i-2 and, with three, (1-m) of itself."""
    images = torch.arange(3.0)[:, None, None, None].expand(3, 3, 4, 4).contiguous()
    own, box = torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0, 2, 0, 2])
    mixed, targets = apply(images, torch.arange(3), Mix(own, box), targets=Loss(3).targets)
    for i in range(3):
        expected = np.zeros(3)
        expected[i] += 0.75 * own[i].item() + 0.25 * (1 - own[i - 2].item())
        expected[i - 1] += 0.75 * (1 - own[i].item())
        expected[i - 2] += 0.25 * own[i - 2].item()
        np.testing.assert_allclose(targets[i].numpy(), expected, atol=1e-6)
        np.testing.assert_allclose(mixed[i].mean().item(), expected @ np.arange(3), atol=1e-6)


def test_the_exponential_draw_of_cutmix_follows_its_closed_form():
    """1 + ln(u) / 4, u uniform from e**-4 to 1, is at most k with chance (e**(4 (k - 1)) - e**-4) / (1 - e**-4)."""
    rule = Augmentation(cutmix_lambda_low=0.0, cutmix_lambda_high=1.0, cutmix_draw="exponential")
    side, count = 1000, 2000
    boxes = np.array(
        [
            mixing.draw(rule, indices=INDICES[:4], micro_batch=number, side=side, seed=7, epoch=0).box.numpy()
            for number in range(count)
        ]
    )
    kept = np.sort(1 - (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / side**2)
    least = math.exp(-4)
    chance = (np.exp(4 * (kept - 1)) - least) / (1 - least)
    distance = np.abs(chance - (np.arange(count) + 0.5) / count).max()
    assert distance < 1.95 / math.sqrt(count) + 0.004  # Kolmogorov-Smirnov, 0.1 %; boxes are whole pixels
