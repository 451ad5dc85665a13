"""Each optimizer against float64 arithmetic, combined SGD against torch's, and LARS against timm's."""

import copy

import numpy as np
import pytest
import torch
from timm.optim.lars import Lars as TimmLars
from torch import nn

from falconet.config.options import Optimizer
from falconet.numerics.kernels.update_rules import trust_ratios
from falconet.optim.ema import Ema
from falconet.optim.half_optimizers import HalfRMSpropTF
from falconet.optim.optimizers import (
    CombinedSGD,
    Lars,
    Treatment,
    build_optimizer,
    decay_groups,
    norms,
    set_lr,
    undecayed_names,
)

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
    return w - lr * decay * w - lr * m / (np.sqrt(v) + rule.optimizer_eps)


def rmsprop(w, g, s, lr, rule, decay):
    """eps outside the root, the average from 0, no rate in the momentum buffer."""
    g = g + decay * w
    s["v"] = rule.rmsprop_decay * s.get("v", 0.0) + (1 - rule.rmsprop_decay) * g**2
    s["m"] = rule.momentum * s.get("m", 0.0) + g / (np.sqrt(s["v"]) + rule.optimizer_eps)
    return w - lr * s["m"]


def rmsprop_tf(w, g, s, lr, rule, decay):
    """eps inside the root, the average from 1, the rate in the momentum buffer."""
    g = g + decay * w
    v = s.get("v", 1.0)
    s["v"] = v + (g**2 - v) * (1 - rule.rmsprop_decay)
    s["m"] = rule.momentum * s.get("m", 0.0) + lr * g / np.sqrt(s["v"] + rule.optimizer_eps)
    return w - s["m"]


def lars(w, g, s, lr, rule, decay):
    """TensorFlow's: the trust ratio and the rate in the velocity; plain momentum for one dimension."""
    trust = 1.0
    w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
    if w.ndim > 1 and w_norm > 0 and g_norm > 0:
        trust = rule.lars_eeta * w_norm / (g_norm + decay * w_norm + rule.optimizer_eps)
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
    """Add a gradient as a backward pass does, in the parameter's layout."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    p.grad += gradient


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_six_updates_follow_the_formula(name, decay, momentum, network):
    rule = Optimizer(
        optimizer=name, momentum=momentum, weight_decay=decay, optimizer_eps=1e-3, rmsprop_decay=0.9, lars_eeta=0.05
    )
    model = network()
    optimizer = build_optimizer(model, rule)
    expected = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    state = {n: {} for n in expected}
    for update, lr in enumerate([0.0, 0.1, 0.2, 0.2, 0.05, 0.01]):
        set_lr(optimizer, lr)
        optimizer.zero_grad()
        for n, g in gradients(model, update).items():
            give(model.get_parameter(n), g)
            own_decay = decay if expected[n].ndim > 1 else 0.0
            expected[n] = REFERENCES[name](expected[n], g.double().numpy(), state[n], lr, rule, own_decay)
        optimizer.step()
    for n, p in model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), expected[n], rtol=2e-5, atol=2e-6, err_msg=n)


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_shrinks_matrices_but_not_vectors(name, network):
    model = network()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, Optimizer(optimizer=name, weight_decay=0.1, lars_eeta=1.0))
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
    optimizer = build_optimizer(model, Optimizer(optimizer="lars", weight_decay=0.5, optimizer_eps=0.0))
    set_lr(optimizer, 0.1)
    model.weight.grad = torch.full((2, 2), 0.0 if zero == "gradient" else 1.0)
    optimizer.step()
    # With trust 1: 0 - 0.1 * 1, and 1 - 0.1 * (0 + 0.5 * 1).
    assert torch.equal(model.weight, torch.full((2, 2), -0.1 if zero == "weight" else 0.95))


def test_adamw_keeps_torchs_betas_whatever_the_momentum(network):
    optimizer = build_optimizer(network(), Optimizer(optimizer="adamw", momentum=0.3))
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
def test_model_without_vectors_or_matrices_can_be_trained(name):
    for model in (nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)):
        before = model.weight.detach().clone()
        optimizer = build_optimizer(model, Optimizer(optimizer=name))
        set_lr(optimizer, 0.5)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert not torch.equal(model.weight, before)


def test_rate_on_the_device_is_filled_not_replaced(network):
    optimizer = build_optimizer(network(), Optimizer(optimizer="sgd"))
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
    optimizer, ema = build_optimizer(model, Optimizer(optimizer=name)), Ema(model, 0.9)
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
def test_weight_decay_spares_excluded_parameters(exclude, spared):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Linear(4, 2))
    rule = Optimizer(optimizer="sgd", momentum=0.0, weight_decay=0.5)
    before = {name: p.detach().clone().add_(1.0) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
            p.grad = torch.zeros_like(p)
    optimizer = build_optimizer(model, rule, treatment=Treatment(undecayed=undecayed_names(model, exclude)))
    set_lr(optimizer, 1.0)
    optimizer.step()
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert same == spared


RATES = [0.01 * (1 + update % 7) for update in range(20)]


def pair(model):
    other = copy.deepcopy(model)
    options = {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.01}
    return (model, CombinedSGD(model.parameters(), **options)), (other, torch.optim.SGD(other.parameters(), **options))


def train(model, optimizer, accumulate, updates):
    for update in updates:
        for group in optimizer.param_groups:
            group["lr"] = RATES[update]
        optimizer.zero_grad()
        for micro_batch in range(3):
            accumulate(model, 3 * update + micro_batch)
        optimizer.step()


def test_combined_sgd_equals_torchs_over_twenty_updates(network, accumulate):
    (ours, combined), (theirs, separate) = pair(network())
    train(ours, combined, accumulate, range(20))
    train(theirs, separate, accumulate, range(20))
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=name)
        torch.testing.assert_close(p.grad, separate.state[q]["momentum_buffer"], rtol=1e-5, atol=1e-5)


def test_first_update_of_combined_sgd_equals_torchs_exactly(network, accumulate):
    (ours, combined), (theirs, separate) = pair(network())
    train(ours, combined, accumulate, range(1))
    train(theirs, separate, accumulate, range(1))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_gradient_and_velocity_share_their_memory(network, accumulate):
    model = network()
    optimizer = CombinedSGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, accumulate, range(1))
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    train(model, optimizer, accumulate, range(1, 4))
    assert [p.grad.data_ptr() for p in model.parameters()] == addresses
    assert [optimizer.state[p]["velocity"].data_ptr() for p in model.parameters()] == addresses


def test_combined_sgd_continues_bit_for_bit_from_a_state_dict(network, accumulate):
    (straight, optimizer), _ = pair(network())
    train(straight, optimizer, accumulate, range(5))
    restored = copy.deepcopy(straight)
    saved = copy.deepcopy(optimizer.state_dict())
    train(straight, optimizer, accumulate, range(5, 10))

    again = CombinedSGD(restored.parameters(), lr=0.0, momentum=0.9, weight_decay=0.01)
    again.load_state_dict(saved)
    for index, p in enumerate(restored.parameters()):
        assert torch.equal(p.grad, saved["state"][index]["velocity"])
    train(restored, again, accumulate, range(5, 10))
    for p, q in zip(straight.parameters(), restored.parameters(), strict=True):
        assert torch.equal(p, q)


def test_dropped_gradients_do_not_lose_the_velocity(network, accumulate):
    (kept, combined), _ = pair(network())
    (dropped, other), _ = pair(network())
    train(kept, combined, accumulate, range(3))
    train(dropped, other, accumulate, range(2))
    dropped.zero_grad(set_to_none=True)
    train(dropped, other, accumulate, range(2, 3))
    for p, q in zip(kept.parameters(), dropped.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_combined_sgd_without_momentum_is_plain_sgd(set_to_none):
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = CombinedSGD([weight], lr=0.5, momentum=0.0)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        (2.0 * weight.sum()).backward()
        optimizer.step()
    assert weight.tolist() == [-2.0, -1.0]
    assert not optimizer.state


def test_second_zero_grad_without_an_update_is_refused(network, accumulate):
    model = network()
    optimizer = CombinedSGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, accumulate, range(1))
    optimizer.zero_grad()
    with pytest.raises(AssertionError, match="one tensor"):
        optimizer.zero_grad()


def test_trust_ratios_follow_the_formula_and_are_1_where_a_norm_is_zero():
    noise = np.random.default_rng(0)
    weights = [noise.normal(size=(3, 4)), np.zeros((2, 2)), noise.normal(size=(5, 2))]
    grads = [noise.normal(size=(3, 4)), np.ones((2, 2)), np.zeros((5, 2))]
    w, g = np.linalg.norm(weights[0]), np.linalg.norm(grads[0])
    sizes = (norms([torch.tensor(x) for x in tensors]) for tensors in (weights, grads))
    found = trust_ratios(*sizes, coefficient=0.01, decay=0.1, eps=0.5)
    np.testing.assert_allclose(found.numpy(), [0.01 * w / (g + 0.1 * w + 0.5), 1.0, 1.0], rtol=1e-12)


def test_lars_equals_timms_while_the_rate_is_constant(network, accumulate):
    """timm has the rate outside the velocity, which makes no difference while it is constant."""
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


def trained(model, optimizer, accumulate, updates=6):
    for update in range(updates):
        set_lr(optimizer, 0.01 * (update + 1))
        optimizer.zero_grad()
        for key in (2 * update, 2 * update + 1):
            accumulate(model, key)
        optimizer.step()
    return model


def test_the_rule_that_replaces_timms_rmsprop_on_cuda_equals_it(network, accumulate):
    rule = Optimizer(optimizer="rmsprop_tf", optimizer_eps=1e-3, weight_decay=0.01)
    ours, theirs = network(), network()
    groups = build_optimizer(ours, rule).param_groups
    plain = {"lr": 0.0, "alpha": rule.rmsprop_decay, "eps": rule.optimizer_eps, "momentum": rule.momentum}
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
    trained(ours, HalfRMSpropTF(groups, rounding=None, **plain), accumulate)
    trained(theirs, build_optimizer(theirs, rule), accumulate)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_combined_sgd_with_its_rate_in_a_tensor_is_the_same(network, accumulate):
    rule = Optimizer(optimizer="sgd_combined", weight_decay=0.01)
    ours, theirs = network(), network()
    optimizer = build_optimizer(ours, rule)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros(())
    trained(ours, optimizer, accumulate)
    trained(theirs, build_optimizer(theirs, rule), accumulate)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_gpu_makes_the_updates_of_the_cpu(name, network):
    def on_the_device(model, key):
        noise, device = torch.Generator().manual_seed(key), next(model.parameters()).device
        images = torch.randn(4, 3, 6, 6, generator=noise).to(device, memory_format=torch.channels_last)
        nn.functional.cross_entropy(model(images), torch.randint(5, (4,), generator=noise).to(device)).backward()

    rule = Optimizer(optimizer=name, optimizer_eps=1e-3, weight_decay=0.01)
    here, there = network(), network().cuda()
    for model in (here, there):
        trained(model, build_optimizer(model, rule), on_the_device)
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-3, atol=1e-5)


def test_lars_leaves_the_gradients_unchanged(network, accumulate):
    model = network()
    optimizer = Lars(model.parameters(), lr=0.3, momentum=0.9, trust=0.02, eps=1e-8)
    accumulate(model, 0)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
