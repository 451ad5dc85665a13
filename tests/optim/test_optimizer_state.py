"""Optimizer state by name: through a safetensors file and back, bit for bit; wrong names and shapes refused."""

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from falconet.config.options import Optimizer
from falconet.errors import CheckpointError
from falconet.optim.optimizer_state import load_state_tensors, state_tensors
from falconet.optim.optimizers import build_optimizer, set_lr

NAMES = ["sgd", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars"]


def train(model, optimizer, accumulate, updates):
    for update in updates:
        set_lr(optimizer, 0.01 * (1 + update % 3))
        optimizer.zero_grad(set_to_none=True)
        accumulate(model, 2 * update)
        accumulate(model, 2 * update + 1)
        optimizer.step()


def through_a_file(tensors):
    return load(save({name: t.contiguous() for name, t in tensors.items()}))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("done", [0, 5])
def test_restored_optimizer_continues_bit_for_bit(done, name, momentum, network, accumulate):
    rule = Optimizer(optimizer=name, momentum=momentum, weight_decay=0.01, lars_eeta=0.1)
    straight = network()
    optimizer = build_optimizer(straight, rule)
    train(straight, optimizer, accumulate, range(done))
    weights, state = through_a_file(straight.state_dict()), through_a_file(state_tensors(optimizer, straight))
    train(straight, optimizer, accumulate, range(done, 10))

    restored = network()
    restored.load_state_dict(weights)
    again = build_optimizer(restored, rule)
    load_state_tensors(again, restored, state)
    train(restored, again, accumulate, range(done, 10))

    for key, value in straight.state_dict().items():
        assert torch.equal(value, restored.state_dict()[key]), key
    first, second = state_tensors(optimizer, straight), state_tensors(again, restored)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
        assert value.dtype == second[key].dtype, key


@pytest.mark.parametrize("name", NAMES)
def test_loaded_state_has_the_types_and_strides_of_the_saved_one(name, network, accumulate):
    model = network()
    optimizer = build_optimizer(model, Optimizer(optimizer=name))
    train(model, optimizer, accumulate, range(2))
    other = network()
    again = build_optimizer(other, Optimizer(optimizer=name))
    load_state_tensors(again, other, through_a_file(state_tensors(optimizer, model)))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[p].keys() == again.state[q].keys()
        for slot, value in optimizer.state[p].items():
            loaded = again.state[q][slot]
            assert type(loaded) is type(value)
            assert loaded.dtype == value.dtype
            assert loaded.stride() == value.stride()
            assert not loaded.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_state_restored_to_the_gpu_has_the_same_devices(name, network):
    images = torch.randn(4, 3, 6, 6, device="cuda")
    model, other = network().cuda(), network().cuda()
    optimizer, again = (build_optimizer(m, Optimizer(optimizer=name)) for m in (model, other))
    for update in range(4):
        if update == 2:
            other.load_state_dict(through_a_file({k: v.cpu() for k, v in model.state_dict().items()}))
            stored = {k: v.cpu() for k, v in state_tensors(optimizer, model).items()}
            load_state_tensors(again, other, through_a_file(stored))
        for m, o in ((model, optimizer), (other, again))[: 1 if update < 2 else 2]:
            set_lr(o, 0.01)
            o.zero_grad()
            m(images).square().mean().backward()
            o.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for slot, value in optimizer.state[p].items():
            assert again.state[q][slot].device == value.device, slot
            assert torch.equal(again.state[q][slot], value), slot


def test_python_count_is_restored_as_one(network, accumulate):
    model = network()
    optimizer = build_optimizer(model, Optimizer(optimizer="rmsprop_tf"))
    train(model, optimizer, accumulate, range(1))
    for p in model.parameters():
        optimizer.state[p]["step"] = 7  # as in older versions of timm
    state = through_a_file(state_tensors(optimizer, model))
    assert state["step/conv.weight"].dtype == torch.int64
    load_state_tensors(optimizer, model, state)
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [7] * 5
    assert type(optimizer.state[model.conv.weight]["step"]) is int


def test_state_is_named_by_slot_and_parameter(network, accumulate):
    model = network()
    optimizer = build_optimizer(model, Optimizer(optimizer="sgd"))
    train(model, optimizer, accumulate, range(1))
    assert set(state_tensors(optimizer, model)) == {
        f"momentum_buffer/{name}" for name in ("conv.weight", "norm.weight", "norm.bias", "head.weight", "head.bias")
    }


def test_tied_parameter_has_one_state_and_frozen_parameter_none(accumulate):
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    model["c"].requires_grad_(False)
    optimizer = build_optimizer(model, Optimizer(optimizer="lars"))
    model["b"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert set(state_tensors(optimizer, model)) == {"velocity/a.weight", "velocity/b.bias"}


def test_parameter_without_a_gradient_is_restored_without_state():
    model = nn.ModuleDict({"used": nn.Linear(3, 3, bias=False), "unused": nn.Linear(3, 3, bias=False)})
    optimizer = build_optimizer(model, Optimizer(optimizer="adamw"))
    model["used"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = through_a_file(state_tensors(optimizer, model))
    again = build_optimizer(model, Optimizer(optimizer="adamw"))
    load_state_tensors(again, model, state)
    assert set(again.state) == {model["used"].weight}


def without(tensors, *names):
    return {name: t for name, t in tensors.items() if name not in names}


MISTAKES = {
    "one name gone": (
        lambda s: without(s, "velocity/norm.bias"),
        "optimizer state: 1 name is missing (of 5 expected), such as 'velocity/norm.bias'; "
        "is the checkpoint of another model or optimizer?",
    ),
    "everything gone": (lambda s: {}, "5 names are missing (of 5 expected), such as 'velocity/conv.weight'"),
    "a name too many": (
        lambda s: {**s, "velocity/tail.bias": torch.ones(1)},
        "1 name is unexpected (of 5 expected), such as 'velocity/tail.bias'",
    ),
    "another optimizer": (
        lambda s: {name.replace("velocity", "momentum_buffer"): t for name, t in s.items()},
        "5 names are missing (of 5 expected), such as 'velocity/conv.weight'",
    ),
    "another shape": (
        lambda s: {**s, "velocity/head.weight": torch.ones(10, 8)},
        "optimizer state 'velocity/head.weight': got shape 10 x 8, expected 5 x 8; is the checkpoint of another model?",
    ),
    "whole numbers": (
        lambda s: {**s, "velocity/head.weight": torch.ones(5, 8, dtype=torch.int32)},
        "optimizer state 'velocity/head.weight': got int32, expected floating-point numbers",
    ),
    "a number": (
        lambda s: {**s, "velocity/head.weight": torch.ones(())},
        "got shape a single number, expected 5 x 8",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_state_is_refused_in_one_line_and_changes_nothing(mistake, network, accumulate):
    spoil, message = MISTAKES[mistake]
    model = network()
    optimizer = build_optimizer(model, Optimizer(optimizer="lars"))
    train(model, optimizer, accumulate, range(2))
    before = {name: t.clone() for name, t in state_tensors(optimizer, model).items()}
    with pytest.raises(CheckpointError) as caught:
        load_state_tensors(optimizer, model, spoil(before))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    after = state_tensors(optimizer, model)
    assert all(torch.equal(after[name], t) for name, t in before.items())
