"""Cross-entropy against torch's, the originals' formula and the closed form of the gradient."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from falconet.evaluation.loss import Loss, WeightedLoss

SMOOTHINGS = [0.0, 0.1, 0.9, 1.0]


def random_logits(classes, *, seed=0, images=7):
    return 5 * torch.randn(images, classes, generator=torch.Generator().manual_seed(seed))


def one_hot(labels, classes):
    return F.one_hot(labels, classes).float()


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@given(classes=st.integers(2, 30), seed=st.integers(0, 1000))
def test_hard_labels_equal_torch_cross_entropy(smoothing, classes, seed):
    logits = random_logits(classes, seed=seed)
    labels = torch.randint(classes, (7,), generator=torch.Generator().manual_seed(seed))
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(Loss(classes, smoothing)(logits, one_hot(labels, classes)), expected)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@given(classes=st.integers(2, 30), seed=st.integers(0, 1000))
def test_soft_targets_equal_torch_cross_entropy(smoothing, classes, seed):
    logits, targets = random_logits(classes, seed=seed), random_logits(classes, seed=seed + 1).softmax(1)
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(Loss(classes, smoothing)(logits, targets), expected)


def test_four_mixed_labels_follow_the_originals_formula():
    # Inventory 3.6: (1 - s) of the weighted NLL of the labels, plus s of the mean of -log p over all classes.
    logits, smoothing, classes = random_logits(9), 0.1, 9
    labels, weights = [3, 3, 0, 8], [0.4, 0.3, 0.2, 0.1]
    targets = sum(w * one_hot(torch.full((7,), label), classes) for label, w in zip(labels, weights, strict=True))
    z = logits.double().numpy()
    minus_log_p = np.log(np.exp(z).sum(1, keepdims=True)) - z
    nll = sum(w * minus_log_p[:, label] for label, w in zip(labels, weights, strict=True))
    expected = (1 - smoothing) * nll + smoothing * minus_log_p.mean(1)
    np.testing.assert_allclose(Loss(classes, smoothing)(logits, targets).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0])])
def test_the_part_of_smoothing_follows_the_originals_formula(smoothing, weights):
    """s of the mean of -log p; the rest is (1 - s) of the NLL."""
    logits, labels = random_logits(5).double().requires_grad_(), torch.arange(7) % 5
    loss = Loss(5, smoothing) if weights is None else WeightedLoss(5, smoothing, weights=weights.double())
    losses, part = loss.parts(logits, one_hot(labels, 5).double())
    each = torch.ones(5).double() if weights is None else weights.double()
    minus_log_p = -logits.detach().log_softmax(1)
    torch.testing.assert_close(part, smoothing * (each * minus_log_p).mean(1).sum())
    nll = (each[labels] * minus_log_p[torch.arange(7), labels]).sum()
    torch.testing.assert_close(losses.detach().sum() - part, (1 - smoothing) * nll)
    assert not part.requires_grad


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_the_gradient_is_the_softmax_minus_the_smoothed_target(smoothing):
    logits, labels = random_logits(5).double().requires_grad_(), torch.arange(7) % 5
    Loss(5, smoothing)(logits, one_hot(labels, 5).double()).sum().backward()
    smoothed = (1 - smoothing) * one_hot(labels, 5).double() + smoothing / 5
    torch.testing.assert_close(logits.grad, logits.detach().softmax(1) - smoothed)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_a_row_of_zeros_has_no_loss_and_no_gradient(smoothing):
    logits, targets = random_logits(5).requires_grad_(), one_hot(torch.arange(7) % 5, 5)
    targets[2] = 0
    losses = Loss(5, smoothing)(logits, targets)
    losses.sum().backward()
    assert losses[2] == 0
    assert torch.equal(logits.grad[2], torch.zeros(5))
    assert (losses[[0, 1, 3, 4, 5, 6]] > 0).all()


def test_large_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    assert Loss(3, 0.1)(logits, one_hot(torch.tensor([1]), 3)).item() == pytest.approx(0.9 * 2e4 + 0.1 * 1e4)
