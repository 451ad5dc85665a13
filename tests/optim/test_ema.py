"""The moving average against its closed form in float64."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from falconet.errors import CheckpointError
from falconet.optim.ema import Ema, decay_for


def walk(model, updates, *, seed=0):
    """Random weights and statistics for each update."""
    noise = torch.Generator().manual_seed(seed)
    for update in range(updates):
        with torch.no_grad():
            for t in [*model.parameters(), *model.buffers()]:
                if t.is_floating_point():
                    t.copy_(torch.randn(t.shape, generator=noise))
                else:
                    t.fill_(update)
        yield


def closed_form(history, decay):
    """The mean of the history with weights decay^age."""
    weights = decay ** np.arange(len(history) - 1, -1, -1, dtype=np.float64)
    return np.tensordot(weights / weights.sum(), np.stack(history), axes=1)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.9999])
def test_average_is_the_mean_weighted_by_age(decay, network):
    model = network()
    ema = Ema(model, decay)
    history = []
    for _ in walk(model, 30):
        ema.update(model)
        history.append({name: t.double().numpy().copy() for name, t in model.state_dict().items()})
    for name, average in ema.model.state_dict().items():
        if average.is_floating_point():
            expected = closed_form([entry[name] for entry in history], decay)
            np.testing.assert_allclose(average.numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_average_equals_the_weights_after_the_first_update(network):
    model = network()
    ema = Ema(model, 0.999)
    for _ in walk(model, 1):
        ema.update(model)
    for name, average in ema.model.state_dict().items():
        assert torch.equal(average, model.state_dict()[name]), name


def test_integer_buffers_are_copied(network):
    model = network()
    ema = Ema(model, 0.9)
    for _ in walk(model, 12):
        ema.update(model)
    assert ema.model.norm.num_batches_tracked.item() == 11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_are_averaged_in_fp32_and_evaluated_in_half(dtype, network):
    """Steps of a thousandth of the difference vanish when the average itself is rounded to half."""
    model = network().to(dtype)
    ema = Ema(model, 0.999)
    history = []
    for _ in walk(model, 200):
        ema.update(model)
        history.append(model.conv.weight.detach().double().numpy().copy())
    expected = closed_form(history, 0.999)
    average = ema.state_tensors()["average/conv.weight"]
    assert average.dtype == torch.float32
    np.testing.assert_allclose(average.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert ema.model.conv.weight.dtype == dtype
    assert torch.equal(ema.model.conv.weight, average.to(dtype))


def test_average_is_a_separate_model_in_evaluation_mode(network):
    model = network()
    before = copy.deepcopy(model.state_dict())
    ema = Ema(model, 0.9)
    for p in ema.model.parameters():
        p.fill_(3.0)
    assert not ema.model.training
    assert model.training
    assert not any(p.requires_grad for p in ema.model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_restored_average_continues_bit_for_bit(dtype, network):
    model = network().to(dtype)
    straight = Ema(model, 0.9)
    restored = None
    for update, _ in enumerate(walk(model, 10)):
        if update == 5:
            state = load(save({name: t.contiguous() for name, t in straight.state_tensors().items()}))
            restored = Ema(network().to(dtype), 0.9)
            restored.load_state_tensors(state)
        straight.update(model)
        if restored:
            restored.update(model)
    assert restored.updates == 10
    for name, t in straight.state_tensors().items():
        assert torch.equal(t, restored.state_tensors()[name]), name
    for name, t in straight.model.state_dict().items():
        assert torch.equal(t, restored.model.state_dict()[name]), name


def test_tied_weights_and_unsaved_buffers_are_handled():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    model.register_buffer("mean", torch.tensor([0.5]), persistent=False)
    ema = Ema(model, 0.9)
    ema.update(model)
    assert set(ema.state_tensors()) == {"updates", "average/a.weight"}
    assert ema.model["b"].weight is ema.model["a"].weight
    assert ema.model.mean.item() == 0.5


def test_state_of_another_model_is_refused(network):
    ema = Ema(network(), 0.9)
    state = ema.state_tensors()
    missing = {name: t for name, t in state.items() if name != "average/norm.bias"}
    with pytest.raises(CheckpointError, match=r"moving average: 1 name is missing .* 'average/norm.bias'"):
        ema.load_state_tensors(missing)
    with pytest.raises(CheckpointError, match=r"'average/head.bias': got shape 7, expected 5"):
        ema.load_state_tensors({**state, "average/head.bias": torch.ones(7)})


def test_half_life_is_counted_in_epochs():
    decay = decay_for(2.5, 40)
    assert decay**100 == pytest.approx(0.5)
    assert decay_for(1.0, 1) == 0.5
