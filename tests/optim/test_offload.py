"""Optimizer state on the host: another place, the same bits. Here both are the same memory; see the GPU's tests."""

import copy

import pytest
import torch
from torch import nn

from falconet.config.options import Optimizer
from falconet.numerics.rounding import Rounding
from falconet.optim.offload import PLACES, HostedState
from falconet.optim.optimizer_state import load_state_tensors, state_tensors
from falconet.optim.optimizers import build_optimizer, build_scaled_optimizer, set_lr

RULES = ("sgd", "adamw", "rmsprop", "rmsprop_tf", "lars")
SMALL = 0.002  # megabytes: a dozen buckets
CPU = torch.device("cpu")


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv2d(16, 24, 3), nn.Conv2d(24, 8, 1), nn.Linear(50, 20)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last).to(dtype)
    model[1].float()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, 3)))  # not in the loss until update 2
    return model


def gradients(model, update, late):
    noise = torch.Generator().manual_seed(update)
    for name, p in model.named_parameters():
        values = torch.randn(p.shape, generator=noise)
        p.grad = None if name == "unused" and update < late else torch.empty_like(p).copy_(values)


def train(model, optimizer, step, updates):
    late = 99 if isinstance(optimizer, torch.optim.SGD) else 2  # torch's fused SGD fails if one comes late
    for update in updates:
        set_lr(optimizer, 0.01 * (1 + update))
        gradients(model, update, late)
        if hasattr(optimizer, "at"):
            optimizer.at(update)
            optimizer.found = torch.tensor(update == 3)
        step()


def make(rule, dtype, model):
    rule = Optimizer(optimizer=rule, weight_decay=0.01, optimizer_eps=1e-3)
    return (
        build_optimizer(model, rule)
        if dtype == torch.float32
        else build_scaled_optimizer(model, rule, rounding=Rounding(3))
    )


CASES = [(rule, torch.float32) for rule in RULES] + [(rule, torch.float16) for rule in RULES]


@pytest.mark.parametrize("bucket", [SMALL, 100.0])
@pytest.mark.parametrize(("rule", "dtype"), CASES)
def test_offloading_changes_no_bit_of_weights_or_state(rule, dtype, bucket):
    here, there = network(dtype), network(dtype)
    plain, hosted = make(rule, dtype, here), make(rule, dtype, there)
    host = HostedState(hosted, bucket_megabytes=bucket, device=CPU)
    train(here, plain, plain.step, range(5))
    train(there, hosted, host.step, range(5))
    host.settle()
    assert all(torch.equal(p, q) for p, q in zip(here.parameters(), there.parameters(), strict=True))
    one, other = state_tensors(plain, here), state_tensors(hosted, there)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
        assert tensor.stride() == other[name].stride(), name


def test_state_is_on_the_host_between_updates_and_at_most_three_buckets_on_the_device():
    model = network()
    optimizer = make("adamw", torch.float32, model)
    host = HostedState(optimizer, bucket_megabytes=SMALL, device=CPU)
    train(model, optimizer, host.step, range(3))
    homes = [t for t in host.tensors() if t.dtype == torch.float32]
    places = [t for t in host.tensors() if t.dtype == torch.uint8]
    assert len(homes) > PLACES
    assert len(places) == PLACES
    assert max(t.numel() for t in places) <= 4 * max(t.numel() for t in homes)
    memory = {t.untyped_storage().data_ptr() for t in homes}
    for slots in optimizer.state.values():
        for name, state in slots.items():
            assert name == "step" or state.untyped_storage().data_ptr() in memory


def test_update_uses_the_state_of_its_bucket_on_the_device():
    """Otherwise the copies would be for nothing: the update would work on the host's tensors."""
    model = network()
    optimizer = make("adamw", torch.float32, model)
    host = HostedState(optimizer, bucket_megabytes=SMALL, device=CPU)
    train(model, optimizer, host.step, range(3))
    away = {t.untyped_storage().data_ptr() for t in host.tensors() if t.dtype == torch.uint8}
    seen = []
    real = optimizer.step

    def step():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        seen.extend(optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() in away for p in params)
        real()

    optimizer.step = step
    train(model, optimizer, host.step, [3])
    assert len(seen) == len(list(model.parameters()))
    assert all(seen)


def test_restored_state_continues_bit_for_bit():
    models, optimizers, hosts = [], [], []
    for _ in range(2):
        models.append(network(torch.float16))
        optimizers.append(make("adamw", torch.float16, models[-1]))
        hosts.append(HostedState(optimizers[-1], bucket_megabytes=SMALL, device=CPU))
    train(models[0], optimizers[0], hosts[0].step, range(3))
    hosts[0].settle()
    saved = copy.deepcopy(state_tensors(optimizers[0], models[0]))
    train(models[1], optimizers[1], hosts[1].step, range(1, 2))  # something else before
    models[1].load_state_dict(models[0].state_dict())
    load_state_tensors(optimizers[1], models[1], saved, home=CPU)
    hosts[1].adopt()
    for model, optimizer, host in zip(models, optimizers, hosts, strict=True):
        train(model, optimizer, host.step, range(4, 6))
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


def test_optimizer_without_state_takes_no_host_memory():
    model = network()
    optimizer = build_optimizer(model, Optimizer(optimizer="sgd", momentum=0.0))
    host = HostedState(optimizer, bucket_megabytes=SMALL, device=CPU)
    train(model, optimizer, host.step, range(3))
    assert sum(t.numel() for t in host.tensors()) == 0
