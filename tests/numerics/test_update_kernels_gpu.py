"""The compiled kernels on the GPU against the plain torch rules on the CPU, without waiting for the device."""

import copy

import pytest
import torch
from torch import nn

from falconet.numerics.rounding import Rounding
from half_rules import MAKERS, optimizer_of

pytestmark = pytest.mark.gpu

TYPES = [torch.float16, torch.bfloat16, torch.float32]


def network(dtype):
    torch.manual_seed(0)
    model = nn.ParameterList(
        [
            torch.randn(64, 32, 3, 3).contiguous(memory_format=torch.channels_last),
            torch.randn(256, 64, 1, 1).contiguous(memory_format=torch.channels_last),
            torch.randn(3, 7, 5, 1).contiguous(memory_format=torch.channels_last),
            torch.randn(10_000),
            torch.randn(5, 9) * 1e-6,
            torch.randn(()),
        ]
    ).to(dtype)
    model.append(nn.Parameter(torch.randn(20)))
    return model


def make(name, model, rounding):
    optimizer = optimizer_of(name, model, rounding)
    device = model[0].device
    optimizer.scale, optimizer.found = torch.tensor(3.0, device=device), torch.tensor(False, device=device)
    return optimizer


def gradients(model, update):
    noise = torch.Generator().manual_seed(update)
    return [torch.empty_like(p).copy_(torch.randn(p.shape, generator=noise)) for p in model]


def train(model, optimizer, updates):
    for update in updates:
        for p, grad in zip(model, gradients(model, update), strict=True):
            p.grad = grad
        optimizer.at(update)
        optimizer.step()


@pytest.mark.parametrize("rounding", [None, Rounding(5)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("lars", "adamw")])
def test_gpu_equals_the_cpu_bit_for_bit(name, dtype, rounding):
    here, there = network(dtype), network(dtype).cuda()
    first, second = make(name, here, rounding), make(name, there, rounding)
    train(here, first, range(3))
    train(there, second, range(3))
    for p, q in zip(here, there, strict=True):
        assert torch.equal(p, q.cpu()), p.shape
        for slot, value in first.state[p].items():
            assert torch.equal(value, second.state[q][slot].cpu()), (slot, p.shape)


@pytest.mark.parametrize("rounding", [None, Rounding(5)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["lars", "adamw"])
def test_norms_and_powers_differ_only_in_the_last_bit(name, dtype, rounding):
    """Torch sums a norm in another order on the GPU, and takes powers by another formula."""
    here, there = network(dtype), network(dtype).cuda()
    train(here, make(name, here, rounding), range(3))
    train(there, make(name, there, rounding), range(3))
    spacing = torch.finfo(dtype).eps
    for p, q in zip(here, there, strict=True):
        p, q = p.detach().float(), q.detach().cpu().float()
        torch.testing.assert_close(p, q, rtol=4 * spacing, atol=4 * spacing * p.abs().max().item())
        if rounding is not None and dtype != torch.float32 and p.numel() > 100:
            assert (p == q).float().mean() > 0.99  # the same noise, so nearly always the same side


@pytest.mark.parametrize("name", MAKERS)
def test_updates_and_skipped_updates_never_wait_for_the_device(name):
    model = network(torch.float16).cuda()
    optimizer = make(name, model, Rounding(1))
    train(model, optimizer, range(2))  # compiles
    grads = gradients(model, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for update in range(3):
            for p, grad in zip(model, grads, strict=True):
                p.grad = grad.clone()
            optimizer.at(update)
            optimizer.step()
        before = [p.detach().clone() for p in model]
        optimizer.found.fill_(True)
        optimizer.at(9)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(p, old) for p, old in zip(model, before, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_captured_update_follows_rate_scale_and_noise(name):
    model = network(torch.float16).cuda()
    eager = copy.deepcopy(model)
    optimizers = [make(name, m, Rounding(1)) for m in (model, eager)]
    rate = torch.tensor(0.1, device="cuda")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    for m, optimizer in zip((model, eager), optimizers, strict=True):
        train(m, optimizer, [0])
    graph, grads = torch.cuda.CUDAGraph(), gradients(model, 1)
    for p, grad in zip(model, grads, strict=True):
        p.grad = grad
    optimizers[0].step()  # the addresses of the captured gradients
    for p, q in zip(model, eager, strict=True):
        p.data.copy_(q.data)
        for slot, value in optimizers[0].state[p].items():
            value.copy_(optimizers[1].state[q][slot])
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for update in (1, 2, 3):
        rate.fill_(0.01 * update)
        for optimizer in optimizers:
            optimizer.at(update)
            optimizer.scale.fill_(2.0**update)
        for p, q, grad in zip(model, eager, gradients(model, update), strict=True):
            p.grad.copy_(grad)
            q.grad = grad.clone()
        graph.replay()
        optimizers[1].step()
    for p, q in zip(model, eager, strict=True):
        assert torch.equal(p, q), p.shape
