"""Each update rule against float64 arithmetic written from its formula."""

import numpy as np
import pytest
import torch
from torch import nn

from falconet.optim.ema import Ema
from falconet.optim.optimizers import UpdateRule, build_optimizer, decay_groups, set_lr, undecayed_names

NAMES = ["sgd", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars"]


def sgd(w, g, s, lr, rule, decay):
    g = g + decay * w
    s["v"] = rule.momentum * s.get("v", 0.0) + g
    return w - lr * s["v"]


def adamw(w, g, s, lr, rule, decay):
    s["t"] = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * g**2
    m, v = s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])
    return w - lr * decay * w - lr * m / (np.sqrt(v) + rule.eps)


def rmsprop(w, g, s, lr, rule, decay):
    """eps outside the root, the average from 0, no rate in the momentum buffer."""
    g = g + decay * w
    s["v"] = rule.rmsprop_decay * s.get("v", 0.0) + (1 - rule.rmsprop_decay) * g**2
    s["m"] = rule.momentum * s.get("m", 0.0) + g / (np.sqrt(s["v"]) + rule.eps)
    return w - lr * s["m"]


def rmsprop_tf(w, g, s, lr, rule, decay):
    """eps inside the root, the average from 1, the rate in the momentum buffer."""
    g = g + decay * w
    v = s.get("v", 1.0)
    s["v"] = v + (g**2 - v) * (1 - rule.rmsprop_decay)
    s["m"] = rule.momentum * s.get("m", 0.0) + lr * g / np.sqrt(s["v"] + rule.eps)
    return w - s["m"]


def lars(w, g, s, lr, rule, decay):
    """TensorFlow's: the trust ratio and the rate in the velocity; plain momentum for one dimension."""
    trust = 1.0
    w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
    if w.ndim > 1 and w_norm > 0 and g_norm > 0:
        trust = rule.lars_trust * w_norm / (g_norm + decay * w_norm + rule.eps)
    s["v"] = rule.momentum * s.get("v", 0.0) + lr * trust * (g + decay * w)
    return w - s["v"]


REFERENCES = {
    "sgd": sgd,
    "sgd_combined": sgd,
    "adamw": adamw,
    "rmsprop": rmsprop,
    "rmsprop_tf": rmsprop_tf,
    "lars": lars,
}


def gradients(model, update):
    noise = torch.Generator().manual_seed(update)
    return {name: torch.randn(p.shape, generator=noise) for name, p in model.named_parameters()}


def give(p, gradient):
    """As a backward pass does: onto what is there, else in the parameter's own layout."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    p.grad += gradient


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_six_updates_follow_the_formula(name, decay, momentum, network):
    rule = UpdateRule(name=name, momentum=momentum, weight_decay=decay, eps=1e-3, rmsprop_decay=0.9, lars_trust=0.05)
    model = network()
    optimizer = build_optimizer(model, rule)
    wanted = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    state = {n: {} for n in wanted}
    for update, lr in enumerate([0.0, 0.1, 0.2, 0.2, 0.05, 0.01]):
        set_lr(optimizer, lr)
        optimizer.zero_grad()
        for n, g in gradients(model, update).items():
            give(model.get_parameter(n), g)
            own_decay = decay if wanted[n].ndim > 1 else 0.0
            wanted[n] = REFERENCES[name](wanted[n], g.double().numpy(), state[n], lr, rule, own_decay)
        optimizer.step()
    for n, p in model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), wanted[n], rtol=2e-5, atol=2e-6, err_msg=n)


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_shrinks_matrices_and_leaves_vectors_alone(name, network):
    model = network()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, UpdateRule(name=name, weight_decay=0.1, lars_trust=1.0))
    set_lr(optimizer, 1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for n, p in model.named_parameters():
        if p.ndim > 1:
            assert p.norm() < before[n].norm(), n
        else:
            assert torch.equal(p, before[n]), n


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_lars_does_not_adapt_where_a_norm_is_zero(zero):
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, 0.0 if zero == "weight" else 1.0)
    optimizer = build_optimizer(model, UpdateRule(name="lars", weight_decay=0.5, eps=0.0))
    set_lr(optimizer, 0.1)
    model.weight.grad = torch.full((2, 2), 0.0 if zero == "gradient" else 1.0)
    optimizer.step()
    # With trust 1: 0 - 0.1 * 1, and 1 - 0.1 * (0 + 0.5 * 1).
    assert torch.equal(model.weight, torch.full((2, 2), -0.1 if zero == "weight" else 0.95))


def test_adamw_keeps_the_librarys_betas_whatever_the_momentum(network):
    optimizer = build_optimizer(network(), UpdateRule(name="adamw", momentum=0.3))
    assert all(group["betas"] == (0.9, 0.999) for group in optimizer.param_groups)


def test_groups_hold_each_trainable_parameter_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "norm": nn.LayerNorm(3)})
    model["b"].weight = model["a"].weight  # tied
    model["norm"].weight.requires_grad_(False)
    model.register_parameter("scalar", nn.Parameter(torch.ones(())))
    decayed, plain = decay_groups(model)
    assert [id(p) for p in decayed] == [id(model["a"].weight)]
    assert {id(p) for p in plain} == {
        id(p) for p in (model["a"].bias, model["b"].bias, model["norm"].bias, model.scalar)
    }
    assert len(plain) == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_vectors_or_without_matrices_can_be_trained(name):
    for model in (nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)):
        before = model.weight.detach().clone()
        optimizer = build_optimizer(model, UpdateRule(name=name))
        set_lr(optimizer, 0.5)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert not torch.equal(model.weight, before)


def test_a_rate_kept_on_the_device_is_filled_not_replaced(network):
    optimizer = build_optimizer(network(), UpdateRule(name="sgd"))
    rate = torch.zeros(())
    for group in optimizer.param_groups:
        group["lr"] = rate
    set_lr(optimizer, 0.25)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate.item() == 0.25


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_updates_and_averages_never_wait_for_the_device(name, network):
    model = network().cuda()
    optimizer, ema = build_optimizer(model, UpdateRule(name=name)), Ema(model, 0.9)
    images = torch.randn(4, 3, 6, 6, device="cuda")
    update(model, optimizer, images, 0.01)  # the first may allocate, and wait
    ema.update(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lr in (0.02, 0.03):
            update(model, optimizer, images, lr)
            ema.update(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in ema.model.parameters())


def update(model, optimizer, images, lr):
    set_lr(optimizer, lr)
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()


EXCLUDED = {
    "vectors": {"0.bias", "1.weight", "1.bias", "2.bias"},
    "norms": {"1.weight", "1.bias"},
    "nothing": set(),
}


@pytest.mark.parametrize(("exclude", "spared"), EXCLUDED.items())
def test_weight_decay_spares_what_was_asked_for(exclude, spared):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Linear(4, 2))
    rule = UpdateRule(name="sgd", momentum=0.0, weight_decay=0.5, undecayed=undecayed_names(model, exclude))
    before = {name: p.detach().clone().add_(1.0) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
            p.grad = torch.zeros_like(p)
    optimizer = build_optimizer(model, rule)
    set_lr(optimizer, 1.0)
    optimizer.step()
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert same == spared
