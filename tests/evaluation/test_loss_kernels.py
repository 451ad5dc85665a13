"""The score of a micro-batch by the kernels: against torch in float64, and against the plain one on a GPU."""

from pathlib import Path

import pytest
import torch

import interpreting
from falconet.data.mixing import Mix
from falconet.evaluation.loss import Loss, WeightedLoss

CASES = [
    *(
        f"{classes} classes, {mixed}smoothing {smoothing}"
        for classes in (1, 2, 10, 17, 1000, 5000)
        for mixed in ("", "mixed, ")
        for smoothing in (0.0, 0.2)
    ),
    *("weights", "weights, mixed", "one image", "more programs than are merged at a time"),
    *("constant", "huge", "tiny", "no labels"),
]
ROUNDED = {"fp16": 5e-4, "bf16": 5e-3}  # the gradient is rounded to the format of the logits
SAME = ["ties", *(f"{value}, smoothing {smoothing}" for value in ("nan", "inf", "-inf") for smoothing in (0.0, 0.2))]


@pytest.fixture(scope="module")
def interpreted():
    """The kernels' errors by case, from Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_loss.py"))


@pytest.mark.run
def test_all_cases_are_known(interpreted):
    assert sorted(interpreted) == sorted([*CASES, *ROUNDED, *SAME])


@pytest.mark.run
@pytest.mark.parametrize("case", CASES)
def test_scores_are_as_exact_as_fp32(case, interpreted):
    for what, error in interpreted[case].items():
        assert error < 1e-6, what


@pytest.mark.run
@pytest.mark.parametrize("case", ROUNDED)
def test_logits_in_half_precision_round_nothing_but_their_gradient(case, interpreted):
    errors = interpreted[case]
    assert errors.pop("gradient") < ROUNDED[case]
    assert max(errors.values()) < 1e-6


@pytest.mark.run
@pytest.mark.parametrize("case", SAME)
def test_equal_and_non_finite_logits_are_scored_as_by_torch(case, interpreted):
    assert set(interpreted[case].values()) == {0}


def scored(loss, logits, labels, mix, *, scale):
    """The score and the gradient of the logits, of a loss multiplied by a tensor."""
    leaf = logits.clone().requires_grad_()
    score = loss.scored(leaf, labels, mix, side=32, images=2 * len(labels))
    assert [each.requires_grad for each in score] == [True, False, False, False]
    (score.loss * scale).backward()
    return [*(each.detach() for each in score), leaf.grad]


@pytest.mark.gpu
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize(("images", "classes"), [(1, 1), (2000, 10), (257, 1000), (31, 21_843)])
def test_a_score_on_a_gpu_is_that_on_the_cpu(images, classes, is_mixed):
    noise = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(images, classes, generator=noise)
    labels = torch.randint(-1, classes, (images,), generator=noise)
    mix = Mix(torch.rand(images, generator=noise), torch.tensor([3, 20, 5, 30])) if is_mixed else None
    mix_there = mix and Mix(*(each.cuda() for each in mix))
    weights, scale = torch.rand(classes, generator=noise) + 0.5, torch.tensor(1024.0)
    for here, there in (
        (Loss(classes, 0.2), Loss(classes, 0.2)),
        (Loss(classes), Loss(classes)),
        (WeightedLoss(classes, 0.1, weights=weights), WeightedLoss(classes, 0.1, weights=weights.cuda())),
    ):
        # In float64: of 21,843 classes, torch's own gradient in fp32 on a CPU is wrong by 4e-5.
        expected = scored(here, logits.double(), labels, mix, scale=scale)
        found = scored(there, logits.cuda(), labels.cuda(), mix_there, scale=scale.cuda())
        again = scored(there, logits.cuda(), labels.cuda(), mix_there, scale=scale.cuda())
        for a, b, c in zip(found, expected, again, strict=True):
            assert (a.dtype, a.shape) == (torch.float32 if b.is_floating_point() else b.dtype, b.shape)
            torch.testing.assert_close(a.cpu().to(b.dtype), b, rtol=1e-5, atol=1e-6 * max(1.0, b.abs().max().item()))
            assert torch.equal(a, c)


@pytest.mark.gpu
def test_equal_and_non_finite_logits_are_scored_on_a_gpu_as_by_torch():
    logits = torch.randint(-1, 2, (900, 7), generator=torch.Generator().manual_seed(0)).float().cuda()
    labels, loss = torch.arange(900, device="cuda") % 7, Loss(7, 0.1)
    for value in (0.0, torch.nan, torch.inf, -torch.inf):
        logits[::9, 3] = logits[5::9, 1] = value
        score = loss.scored(logits, labels, None, side=32, images=900)
        plain = loss(logits, loss.targets(labels)).sum() / 900
        torch.testing.assert_close(score.loss, plain, equal_nan=True)
        assert score.correct == loss.correct(logits, labels)
