"""Trust ratios against float64 arithmetic, and LARS against timm's where the two must agree."""

import copy

import numpy as np
import torch
from timm.optim.lars import Lars as TimmLars

from falconet.optim.half_optimizers import Lars, norms, trust_ratios


def test_trust_ratios_follow_the_formula_and_are_1_where_a_norm_is_zero():
    noise = np.random.default_rng(0)
    weights = [noise.normal(size=(3, 4)), np.zeros((2, 2)), noise.normal(size=(5, 2))]
    grads = [noise.normal(size=(3, 4)), np.ones((2, 2)), np.zeros((5, 2))]
    w, g = np.linalg.norm(weights[0]), np.linalg.norm(grads[0])
    sizes = (norms([torch.tensor(x) for x in tensors]) for tensors in (weights, grads))
    got = trust_ratios(*sizes, coefficient=0.01, decay=0.1, eps=0.5)
    np.testing.assert_allclose(got.numpy(), [0.01 * w / (g + 0.1 * w + 0.5), 1.0, 1.0], rtol=1e-12)


def test_lars_equals_timms_while_the_rate_is_constant(network, accumulate):
    """timm keeps the rate outside the velocity, which makes no difference until the rate changes."""
    ours = network()
    theirs = copy.deepcopy(ours)
    groups = [
        [{"params": [p for p in m.parameters() if p.ndim > 1]}, {"params": [p for p in m.parameters() if p.ndim == 1]}]
        for m in (ours, theirs)
    ]
    groups[0][0] |= {"weight_decay": 0.01}
    groups[0][1] |= {"adapts": False}
    groups[1][0] |= {"weight_decay": 0.01, "always_adapt": True}
    optimizers = [
        Lars(groups[0], lr=0.3, momentum=0.9, trust=0.02, eps=1e-8),
        TimmLars(groups[1], lr=0.3, momentum=0.9, trust_coeff=0.02, eps=1e-8),
    ]
    for update in range(10):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            accumulate(model, update)
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_lars_leaves_the_gradients_as_they_were(network, accumulate):
    model = network()
    optimizer = Lars(model.parameters(), lr=0.3, momentum=0.9, trust=0.02, eps=1e-8)
    accumulate(model, 0)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
