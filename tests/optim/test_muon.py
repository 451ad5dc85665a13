"""Muon against singular value decompositions in float64, torch's Nesterov momentum, and torch's Muon."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from falconet.config.options import Optimizer
from falconet.models.depth import orthogonal_names
from falconet.numerics.rounding import Rounding
from falconet.optim import optimizer_state
from falconet.optim.muon import Muon, orthogonalised
from falconet.optim.optimizers import Treatment, build_optimizer, build_scaled_optimizer, set_lr

RULE = Optimizer(
    optimizer="muon", momentum=0.85, weight_decay=0.01, weight_decay_exclude="nothing", muon_momentum=0.6, muon_steps=3
)


class Net(nn.Module):
    """Two filters of one shape, one of another, a vector, a classifier."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, bias=True)
        self.layer1 = nn.Conv2d(8, 8, 3, bias=False)
        self.layer2 = nn.Conv2d(8, 8, 3, bias=False)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.layer2(torch.relu(self.layer1(torch.relu(self.conv1(x))))).mean((2, 3)))


def network(seed=0):
    torch.manual_seed(seed)
    return Net().to(memory_format=torch.channels_last)


def gradients(model, update):
    drawn = torch.Generator().manual_seed(100 + update)
    for p in model.parameters():
        # Of p's strides, as those of a backward pass are.
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=drawn))


def build(model, rule=RULE, **treatment):
    found = Treatment(undecayed=frozenset(), orthogonal=orthogonal_names(model), **treatment)
    return build_optimizer(model, rule, treatment=found)


def quintic(matrix, steps):
    """Singular values after the published iteration, in float64: U p(S) V^T."""
    u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    s = s / np.linalg.norm(matrix)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt, s


@pytest.mark.parametrize("shape", [(8, 8), (16, 72), (72, 16), (1, 5)])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_iteration_equals_its_polynomial_of_singular_values(shape, steps):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    for found, given in zip(orthogonalised(matrices, steps=steps), matrices, strict=True):
        expected, _ = quintic(given.numpy(), steps)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=2e-5)


def test_five_steps_bring_singular_values_near_one_and_keep_the_directions():
    matrix = torch.randn(1, 64, 576, generator=torch.Generator().manual_seed(2))
    found = orthogonalised(matrix, steps=5)[0].double()
    u, s, vt = torch.linalg.svd(matrix[0].double(), full_matrices=False)
    values = torch.linalg.svdvals(found)
    assert 0.68 < values.min() <= values.max() < 1.21
    aligned = u.T @ found @ vt.T  # diagonal if the singular vectors are the same
    assert (aligned - torch.diag(aligned.diagonal())).abs().max() < 1e-4
    assert (s > 0).all()


def test_weights_of_one_shape_are_moved_as_if_each_were_alone():
    stacked = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(3))
    alone = torch.cat([orthogonalised(one[None], steps=5) for one in stacked])
    torch.testing.assert_close(orthogonalised(stacked, steps=5), alone)


def test_a_gradient_of_zeros_moves_nothing():
    assert torch.equal(orthogonalised(torch.zeros(1, 4, 9), steps=5), torch.zeros(1, 4, 9))


@pytest.mark.parametrize("rescales", [False, True])
def test_filters_follow_the_published_rule_in_float64(rescales):
    model = network()
    optimizer = build(model, Optimizer(**{**vars(RULE), "muon_rescale": rescales}))
    names = sorted(orthogonal_names(model))
    weights = {name: model.get_parameter(name).detach().double().numpy().copy() for name in names}
    velocities = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for update, lr in enumerate((0.2, 0.1, 0.05)):
        gradients(model, update)
        set_lr(optimizer, lr)
        for name in names:
            grad = model.get_parameter(name).grad.double().numpy()
            velocities[name] = 0.6 * velocities[name] + grad
            direction = (grad + 0.6 * velocities[name]).reshape(len(grad), -1)
            move = quintic(direction, 3)[0].reshape(grad.shape)
            if rescales:
                weights[name] *= np.sqrt(len(grad)) / np.linalg.norm(weights[name])
            else:
                move = move + 0.01 * weights[name]
            weights[name] = weights[name] - lr * move
        optimizer.step()
        for name in names:
            np.testing.assert_allclose(model.get_parameter(name).detach().numpy(), weights[name], atol=2e-6, rtol=0)


def test_the_rest_moves_as_torchs_nesterov_momentum_with_a_decay_of_the_whole_rate():
    model = network()
    copied = copy.deepcopy(model)
    shares = {"fc.weight": 4.0, "fc.bias": 0.5, "conv1.bias": 0.5}
    optimizer = build(model, shares=shares)
    reference = torch.optim.SGD(
        [{"params": [copied.get_parameter(n)], "lr": 0.0, "weight_decay": 0.01 / s} for n, s in shares.items()],
        momentum=0.85,
        nesterov=True,
    )
    for update, lr in enumerate((0.2, 0.1, 0.05)):
        for each in (model, copied):
            gradients(each, update)
        set_lr(optimizer, lr)
        for group, share in zip(reference.param_groups, shares.values(), strict=True):
            group["lr"] = lr * share
        optimizer.step()
        reference.step()
    for name in shares:
        torch.testing.assert_close(model.get_parameter(name), copied.get_parameter(name))


def test_a_matrix_moves_as_by_torchs_muon_but_for_its_half_products():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(12, 20, bias=False))
    theirs = copy.deepcopy(ours)
    rule = Optimizer(optimizer="muon", weight_decay=0.1, muon_momentum=0.9)
    optimizer = build_optimizer(ours, rule, treatment=Treatment(orthogonal=frozenset({"0.weight"})))
    reference = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=True)
    scale = (20 / 12) ** 0.5  # of torch's rate, by the shape; its momentum is an average, which scales nothing
    set_lr(optimizer, 0.02)
    gradients(ours, 0)
    gradients(theirs, 0)
    before = ours[0].weight.detach().clone()
    optimizer.step()
    reference.step()
    own = (before * (1 - 0.02 * 0.1) - ours[0].weight) * scale
    other = before * (1 - 0.02 * 0.1) - theirs[0].weight
    torch.testing.assert_close(own, other, rtol=0, atol=0.02 * 0.03)  # bf16


def test_state_is_saved_and_restored_bit_for_bit():
    def trained(model, optimizer, updates):
        for update in updates:
            gradients(model, update)
            set_lr(optimizer, 0.1)
            optimizer.step()

    whole, first = network(), network()
    trained(whole, build(whole), range(4))
    optimizer = build(first)
    trained(first, optimizer, range(2))
    stored = {name: t.clone() for name, t in optimizer_state.state_tensors(optimizer, first).items()}
    assert len(stored) == len(list(first.parameters()))
    second = network(seed=9)
    second.load_state_dict(first.state_dict())
    restored = build(second)
    optimizer_state.load_state_tensors(restored, second, stored)
    trained(second, restored, range(2, 4))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_scale_changes_nothing_and_a_skipped_update_nothing_at_all():
    plain, scaled = network(), network()
    treatment = Treatment(undecayed=frozenset(), orthogonal=orthogonal_names(plain))
    one = build_optimizer(plain, RULE, treatment=treatment)
    other = build_scaled_optimizer(scaled, RULE, rounding=None, treatment=treatment)
    other.scale, other.found = torch.tensor(1024.0), torch.tensor(False)
    for update in range(2):
        gradients(plain, update)
        gradients(scaled, update)
        for p in scaled.parameters():
            p.grad.mul_(1024.0)
        for each in (one, other):
            set_lr(each, 0.1)
            each.step()
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(a, b)
    before = [p.detach().clone() for p in scaled.parameters()]
    velocities = [other.state[p]["momentum_buffer"].clone() for p in scaled.parameters()]
    for p in scaled.parameters():
        p.grad.fill_(float("nan"))
    other.found = torch.tensor(True)
    other.step()
    for p, weight, velocity in zip(scaled.parameters(), before, velocities, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(other.state[p]["momentum_buffer"], velocity)


def test_half_weights_are_rounded_once_and_at_random_if_asked():
    def moved(rounding):
        model = network().half()
        treatment = Treatment(undecayed=frozenset(), orthogonal=orthogonal_names(model))
        optimizer = build_scaled_optimizer(model, RULE, rounding=rounding, treatment=treatment)
        gradients(model, 0)
        set_lr(optimizer, 0.1)
        optimizer.at(0)
        optimizer.step()
        return model

    nearest, random, again = moved(None), moved(Rounding(1)), moved(Rounding(1))
    exact = network().half().float()
    optimizer = build(exact)
    gradients(exact, 0)
    for p in exact.parameters():
        p.grad = p.grad.half().float()
    set_lr(optimizer, 0.1)
    optimizer.step()
    for name, p in exact.named_parameters():
        assert torch.equal(nearest.get_parameter(name), p.half())
        assert torch.equal(random.get_parameter(name), again.get_parameter(name))
        spacing = 2.0**-10 * p.abs().max()
        assert (random.get_parameter(name).float() - p).abs().max() <= spacing
    assert not torch.equal(nearest.layer1.weight, random.layer1.weight)


def test_a_rate_on_the_device_is_read_there():
    model = network()
    optimizer = build(model)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros(())
    rates = [group["lr"] for group in optimizer.param_groups]
    other, plain = network(), None
    plain = build(other)
    for each in (optimizer, plain):
        set_lr(each, 0.3)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    for each, rule in ((model, optimizer), (other, plain)):
        gradients(each, 0)
        rule.step()
    assert isinstance(optimizer, Muon)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
