"""Half-precision update rules against float64 arithmetic, and skipped updates."""

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from falconet.config.options import Optimizer
from falconet.numerics.rounding import Rounding
from falconet.optim import half_optimizers
from falconet.optim.half_optimizers import HalfAdamW, HalfLars, HalfRMSprop, HalfRMSpropTF, HalfSGD
from falconet.optim.optimizer_state import load_state_tensors, slot_names, state_tensors
from falconet.optim.optimizers import build_optimizer, decay_groups, set_lr

DECAY, MOMENTUM, EPS = 0.1, 0.9, 1e-3


def sgd(w, g, s, lr, decay):
    s["momentum_buffer"] = MOMENTUM * s.get("momentum_buffer", 0.0) + g + decay * w
    return w - lr * s["momentum_buffer"]


def rmsprop_tf(w, g, s, lr, decay):
    g = g + decay * w
    s["square_avg"] = 0.9 * s.get("square_avg", 1.0) + 0.1 * g**2
    s["momentum_buffer"] = MOMENTUM * s.get("momentum_buffer", 0.0) + lr * g / np.sqrt(s["square_avg"] + EPS)
    return w - s["momentum_buffer"]


def rmsprop(w, g, s, lr, decay):
    g = g + decay * w
    s["root_square_avg"] = np.sqrt(0.9 * s.get("root_square_avg", np.zeros(())) ** 2 + 0.1 * g**2)
    s["momentum_buffer"] = MOMENTUM * s.get("momentum_buffer", 0.0) + g / (s["root_square_avg"] + EPS)
    return w - lr * s["momentum_buffer"]


def adamw(w, g, s, lr, decay):
    s["step"] = s.get("step", 0) + 1
    s["exp_avg"] = 0.9 * s.get("exp_avg", 0.0) + 0.1 * g
    square = 0.999 * s.get("root_exp_avg_sq", np.zeros(())) ** 2 + 0.001 * g**2
    s["root_exp_avg_sq"] = np.sqrt(square)
    m, v = s["exp_avg"] / (1 - 0.9 ** s["step"]), square / (1 - 0.999 ** s["step"])
    return w - lr * (decay * w + m / (np.sqrt(v) + EPS))


def lars(w, g, s, lr, decay):
    trust = 1.0
    if w.ndim > 1:
        w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
        trust = 0.05 * w_norm / (g_norm + decay * w_norm + EPS)
    s["velocity"] = MOMENTUM * s.get("velocity", 0.0) + lr * trust * (g + decay * w)
    return w - s["velocity"]


RULES = {
    "sgd": (lambda groups, r: HalfSGD(groups, lr=0.0, momentum=MOMENTUM, rounding=r), sgd),
    "rmsprop_tf": (
        lambda groups, r: HalfRMSpropTF(groups, lr=0.0, alpha=0.9, eps=EPS, momentum=MOMENTUM, rounding=r),
        rmsprop_tf,
    ),
    "rmsprop": (
        lambda groups, r: HalfRMSprop(groups, lr=0.0, alpha=0.9, eps=EPS, momentum=MOMENTUM, rounding=r),
        rmsprop,
    ),
    "adamw": (lambda groups, r: HalfAdamW(groups, lr=0.0, eps=EPS, rounding=r), adamw),
    "lars": (lambda groups, r: HalfLars(groups, lr=0.0, momentum=MOMENTUM, trust=0.05, eps=EPS, rounding=r), lars),
}
NAMES = list(RULES)
HALVES = [torch.float16, torch.bfloat16]


def make(name, model, rounding=None):
    decayed, plain = decay_groups(model)
    groups = [
        {"params": decayed, "weight_decay": DECAY, "adapts": True},
        {"params": plain, "weight_decay": 0.0, "adapts": False},
    ]
    return RULES[name][0](groups, rounding)


def gradients(model, update, scale=1.0):
    noise = torch.Generator().manual_seed(update)
    return {n: torch.randn(p.shape, generator=noise) * scale for n, p in model.named_parameters()}


def give(model, grads):
    for n, p in model.named_parameters():
        p.grad = torch.empty_like(p).copy_(grads[n])


def train(model, optimizer, updates, scale=1.0):
    for update in updates:
        set_lr(optimizer, 0.01 * (1 + update % 3))
        give(model, gradients(model, update, scale))
        optimizer.at(update)
        optimizer.step()


def float64(t):
    return t.detach().double().numpy().copy()


@pytest.mark.parametrize("name", NAMES)
def test_six_fp32_updates_follow_the_formula(name, network):
    model = network()
    optimizer = make(name, model)
    expected, state = {n: float64(p) for n, p in model.named_parameters()}, {}
    for update, lr in enumerate([0.0, 0.1, 0.2, 0.2, 0.05, 0.01]):
        set_lr(optimizer, lr)
        give(model, gradients(model, update))
        optimizer.step()
        for n, g in gradients(model, update).items():
            decay = DECAY if expected[n].ndim > 1 else 0.0
            expected[n] = RULES[name][1](expected[n], float64(g), state.setdefault(n, {}), lr, decay)
    for n, p in model.named_parameters():
        np.testing.assert_allclose(float64(p), expected[n], rtol=2e-5, atol=2e-6, err_msg=n)


def check_one_update(name, model, optimizer, *, grads, lr, slack):
    """Weights and state go from their stored halves to within `slack` spacings of the formula's result."""
    before = {n: float64(p) for n, p in model.named_parameters()}
    expected = {n: {s: float64(t) for s, t in optimizer.state[p].items()} for n, p in model.named_parameters()}
    scale = 1.0 if optimizer.scale is None else optimizer.scale.item()
    set_lr(optimizer, lr)
    give(model, grads)
    optimizer.step()
    for n, p in model.named_parameters():
        decay = DECAY if p.ndim > 1 else 0.0
        expected[n]["weight"] = RULES[name][1](before[n], float64(p.grad) / scale, expected[n], lr, decay)
        for slot, found in {"weight": p, **optimizer.state[p]}.items():
            if slot == "step":
                continue
            exact, numbers = expected[n][slot], torch.finfo(p.dtype)
            if slot.startswith("root_") and p.dtype == torch.float16:
                exact = np.where(exact > 0, np.maximum(exact, 2.0**-24), exact)  # never rounded away
            assert found.dtype == p.dtype
            spacing = np.maximum(np.abs(exact), numbers.tiny) * numbers.eps
            beyond = np.abs(float64(found) - exact) - slack * spacing
            assert beyond.max() <= 1e-6 * np.abs(exact).max(), (slot, n)


ROUNDINGS = {"nearest": (None, 0.51), "stochastic": (Rounding(3), 1.01)}  # and how far from exact, in spacings


@pytest.mark.parametrize("how", ROUNDINGS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NAMES)
def test_each_update_is_exact_up_to_one_rounding(name, dtype, how, network):
    rounding, slack = ROUNDINGS[how]
    model = network().to(dtype)
    optimizer = make(name, model, rounding)
    for update in range(4):
        optimizer.at(update)
        grads = gradients(model, update)
        check_one_update(name, model, optimizer, grads=grads, lr=0.01 * (1 + update % 3), slack=slack)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_divided_by_the_scale_in_fp32(name, network):
    """Gradients of 1e-8, which fp16 does not have, come through a scale of 2^15 unharmed."""
    model = network().half()
    optimizer = make(name, model)
    optimizer.scale = torch.tensor(2.0**15)
    for update in range(2):
        grads = gradients(model, update, 1e-8 * 2.0**15)
        check_one_update(name, model, optimizer, grads=grads, lr=3.0, slack=0.51)


@pytest.mark.run
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_follows_fp32_on_average(name, dtype, network):
    """Over 20 runs of 5 updates the mean lies near the fp32 run; 7 standard errors: 1e-10 for a weight."""
    exact = network()
    train(exact, make(name, exact), range(5), scale=0.1)
    runs = []
    for seed in range(20):
        model = network().to(dtype)
        train(model, make(name, model, Rounding(seed)), range(5), scale=0.1)
        runs.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    found = torch.stack(runs)
    expected = torch.cat([p.detach().double().flatten() for p in exact.parameters()])
    start = torch.cat(
        [p.detach().double().flatten() - p.detach().to(dtype).double().flatten() for p in network().parameters()]
    )
    far = (found.mean(0) - expected + start).abs() - 7 * found.std(0) / 20**0.5
    # Gradients are rounded to the nearest, and LARS and RMSprop are not linear: those errors remain.
    assert far.max() < 40 * torch.finfo(dtype).eps * 0.05


@pytest.mark.parametrize("rounding", [None, Rounding(3)])
@pytest.mark.parametrize("name", NAMES)
def test_update_with_non_finite_gradients_is_skipped(name, rounding, network):
    model = network().half()
    optimizer = make(name, model, rounding)
    train(model, optimizer, range(2))
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    state = {n: t.clone() for n, t in state_tensors(optimizer, model).items()}
    optimizer.found = torch.tensor(True)
    give(model, {n: torch.full_like(g, torch.nan) for n, g in gradients(model, 2).items()})
    optimizer.at(2)
    optimizer.step()
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
    assert all(torch.equal(t, state[n]) for n, t in state_tensors(optimizer, model).items())
    optimizer.found.fill_(False)
    train(model, optimizer, [3])
    assert not torch.equal(model.conv.weight, weights["conv.weight"])


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_restored_optimizer_continues_bit_for_bit(name, dtype, network):
    straight = network().to(dtype)
    straight.norm.float()  # norms may stay in fp32
    optimizer = make(name, straight, Rounding(11))
    train(straight, optimizer, range(4))
    weights, state = (
        {n: t.contiguous() for n, t in ts.items()} for ts in (straight.state_dict(), state_tensors(optimizer, straight))
    )
    weights, state = load(save(weights)), load(save(state))
    assert {n.split("/")[0] for n in state} == slot_names(optimizer)
    train(straight, optimizer, range(4, 8))

    restored = network().to(dtype)
    restored.norm.float()
    restored.load_state_dict(weights)
    again = make(name, restored, Rounding(11))
    load_state_tensors(again, restored, state)
    train(restored, again, range(4, 8))
    for n, t in straight.state_dict().items():
        assert torch.equal(t, restored.state_dict()[n]), n
    for n, t in state_tensors(optimizer, straight).items():
        assert torch.equal(t, state_tensors(again, restored)[n]), n
        assert t.dtype == state_tensors(again, restored)[n].dtype, n


@pytest.mark.parametrize("name", ["sgd", "rmsprop_tf", "lars"])
def test_fp32_weights_have_the_state_of_the_fp32_rule(name, network):
    """So a 16.32 run and a 32.32 run read each other's checkpoints."""
    rule = Optimizer(optimizer=name, weight_decay=DECAY, optimizer_eps=EPS, rmsprop_decay=0.9, lars_eeta=0.05)
    ours, theirs = network(), network()
    first, second = make(name, ours), build_optimizer(theirs, rule)
    train(ours, first, range(3))
    for update in range(3):
        set_lr(second, 0.01 * (1 + update % 3))
        give(theirs, gradients(theirs, update))
        second.step()
    found, expected = state_tensors(first, ours), state_tensors(second, theirs)
    assert found.keys() == expected.keys()
    for n in found:
        torch.testing.assert_close(found[n].double(), expected[n].double(), rtol=1e-5, atol=1e-6)


def test_large_tensors_are_updated_in_pieces_with_the_same_result(monkeypatch, network):
    whole, pieces = network().half(), network().half()
    train(whole, make("adamw", whole, Rounding(1)), range(3))
    monkeypatch.setattr(half_optimizers, "PIECE", 16)
    train(pieces, make("adamw", pieces, Rounding(1)), range(3))
    for p, q in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert torch.equal(p, q)


def test_noise_depends_on_seed_and_update(network):
    def trained(seed, updates):
        model = network().half()
        train(model, make("sgd", model, Rounding(seed)), updates)
        return model.conv.weight.detach()

    assert torch.equal(trained(0, [3]), trained(0, [3]))
    assert not torch.equal(trained(0, [3]), trained(1, [3]))


@pytest.mark.parametrize("name", ["sgd", "rmsprop_tf"])
def test_no_momentum_means_no_buffer(name, network):
    model = network().half()
    optimizer = make(name, model)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    optimizer.defaults["momentum"] = 0.0
    before = float64(model.conv.weight)
    train(model, optimizer, [0])
    g = float64(model.conv.weight.grad) + DECAY * before
    step = g if name == "sgd" else g / np.sqrt(0.9 + 0.1 * g**2 + EPS)
    np.testing.assert_allclose(float64(model.conv.weight), before - 0.01 * step, rtol=1e-3, atol=1e-6)
    assert {n.split("/")[0] for n in state_tensors(optimizer, model)} <= {"step", "square_avg", "untouched"}


ROOTS = {
    "adamw": lambda params, r: HalfAdamW(params, lr=1e-3, eps=1e-8, rounding=r),
    "rmsprop": lambda params, r: HalfRMSprop(params, lr=1e-4, alpha=0.99, eps=1e-8, momentum=0.9, rounding=r),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make_one", ROOTS.values(), ids=ROOTS)
def test_stored_roots_survive_gradients_whose_squares_underflow(make_one, seed, network):
    """1e-5 squared is 1e-10; a second moment of 0 would make the step a thousand times too large."""
    model, exact = network().half(), network()
    for m in (model, exact):
        optimizer = make_one(m.parameters(), Rounding(seed))
        for update in range(20):
            give(m, gradients(m, update % 2, 1e-5 if update < 10 else 0.0))
            optimizer.at(update)
            optimizer.step()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert (p - q).abs().max() < 0.02  # the way of 20 updates; 1.0 with a second moment of 0
