"""Optimizer state on the host, on CUDA: the same bits, less device memory, and no waiting."""

import pytest
import torch
from torch import nn

from falconet.config.options import Optimizer
from falconet.numerics.rounding import Rounding
from falconet.optim.offload import PLACES, HostedState
from falconet.optim.optimizer_state import load_state_tensors, state_tensors
from falconet.optim.optimizers import build_optimizer, build_scaled_optimizer, set_lr

pytestmark = pytest.mark.gpu

RULES = ("sgd", "adamw", "rmsprop", "rmsprop_tf", "lars")
CASES = [(rule, torch.float32) for rule in RULES] + [(rule, torch.float16) for rule in RULES]
SMALL = 1.0  # megabytes


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(64, 256, 3),
        nn.GroupNorm(4, 256),
        nn.Conv2d(256, 256, 3),
        nn.Linear(1000, 1000),
        nn.Linear(9, 7),
    ]
    model = nn.Sequential(*layers).to("cuda", memory_format=torch.channels_last).to(dtype)
    model[1].float()
    return model


def make(rule, dtype, model):
    rule = Optimizer(optimizer=rule, weight_decay=0.01, optimizer_eps=1e-3)
    if dtype == torch.float32:
        return build_optimizer(model, rule)
    optimizer = build_scaled_optimizer(model, rule, rounding=Rounding(3))
    optimizer.found = torch.tensor(False, device="cuda")
    return optimizer


def give(model, update):
    noise = torch.Generator("cuda").manual_seed(update)
    for p in model.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=noise, device="cuda"))


def train(model, optimizer, step, updates):
    for update in updates:
        set_lr(optimizer, 0.01 * (1 + update))
        give(model, update)
        if hasattr(optimizer, "at"):
            optimizer.at(update)
        step()


def hosted(optimizer, bucket=SMALL):
    return HostedState(optimizer, bucket_megabytes=bucket, device=torch.device("cuda"))


@pytest.mark.parametrize(("rule", "dtype"), CASES)
def test_offloading_changes_no_bit_of_weights_or_state(rule, dtype):
    here, there = network(dtype), network(dtype)
    plain, other = make(rule, dtype, here), make(rule, dtype, there)
    host = hosted(other)
    train(here, plain, plain.step, range(20))
    train(there, other, host.step, range(20))
    host.settle()
    assert all(torch.equal(p, q) for p, q in zip(here.parameters(), there.parameters(), strict=True))
    for name, tensor in state_tensors(plain, here).items():
        found = state_tensors(other, there)[name]
        assert torch.equal(tensor.cpu(), found.cpu()), name
        assert name.startswith("step") or (found.device.type == "cpu" and found.is_pinned()), name


def test_restored_state_is_never_on_the_device_as_a_whole():
    models = [network(), network()]
    optimizers = [make("adamw", torch.float32, model) for model in models]
    hosts = [hosted(optimizer) for optimizer in optimizers]
    train(models[0], optimizers[0], hosts[0].step, range(3))
    hosts[0].settle()
    models[1].load_state_dict(models[0].state_dict())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stored = {name: tensor.cpu() for name, tensor in state_tensors(optimizers[0], models[0]).items()}
    load_state_tensors(optimizers[1], models[1], stored, home=torch.device("cpu"))
    hosts[1].adopt()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    for model, optimizer, host in zip(models, optimizers, hosts, strict=True):
        train(model, optimizer, host.step, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize(("rule", "dtype"), CASES)
def test_updates_never_wait_for_the_device(rule, dtype):
    model = network(dtype)
    optimizer = make(rule, dtype, model)
    host = hosted(optimizer)
    train(model, optimizer, host.step, range(3))  # makes memory, compiles
    grads = [p.grad.clone() for p in model.parameters()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad.clone()
            host.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_device_holds_three_buckets_instead_of_the_state():
    values, bucket = 64 << 20, 4.0  # 64 M weights in 64 layers of 4 MB each
    held = {}
    for offloads in (False, True):
        model = nn.ModuleList(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(values >> 20))
        optimizer = build_optimizer(model, Optimizer(optimizer="adamw"))
        host = hosted(optimizer, bucket) if offloads else None
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            (host or optimizer).step()
        torch.cuda.synchronize()
        for p in model.parameters():
            p.grad = None
        held[offloads] = torch.cuda.memory_allocated() - before
        del model, optimizer, host
    assert held[False] >= 8 * values
    assert held[True] <= PLACES * 8 * (1 << 20) * 1.1 + (1 << 20)
