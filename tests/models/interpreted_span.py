"""Run by test_fused_span in a process of its own: Triton must be imported with its interpreter from the start.

Replicas are threads that take turns, because the interpreter runs one kernel at a time.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from falconet.models.fused import layers, pointwise, pointwise_kernels
from falconet.models.fused.layers import FusedExcitation, FusedNorm, FusedPool
from falconet.models.fused.pointwise_kernels import Tiling
from falconet.parallel.batchnorm import SpanBatchNorm2d


class Meeting:
    """Where replicas exchange values."""

    def __init__(self, replicas):
        self.turn, self.barrier, self.values = threading.Lock(), threading.Barrier(replicas, timeout=60), {}

    def wait(self):
        self.turn.release()
        self.barrier.wait()
        self.turn.acquire()


class Span:
    """What a norm knows of the other replicas."""

    def __init__(self, meeting, rank):
        self.meeting, self.rank = meeting, rank

    def gathered(self, values):
        meeting = self.meeting
        meeting.values[self.rank] = values.clone()
        meeting.wait()
        everyone = torch.stack([meeting.values[rank] for rank in sorted(meeting.values)])
        meeting.wait()  # all have read
        return everyone

    def summed(self, values):
        return self.gathered(values.flatten()).sum(0).view_as(values)


def norm_over(span, channels, seed):
    noise = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm2d(channels)
    for parameter in norm.parameters():
        parameter.data.copy_(torch.randn(channels, generator=noise))
    if span is not None:
        norm.__class__ = SpanBatchNorm2d
        norm.span = span
    return norm


def layer_of(kind, span, channels):
    """A fused layer, and all of its norms."""
    norm, other = norm_over(span, channels, 1), norm_over(span, channels, 2)
    if kind == "pooled":
        return FusedPool(norm, act=nn.ReLU(), pool=nn.MaxPool2d(3, 2, 1)), [norm]
    if kind == "gated":
        return FusedExcitation(norm, act=nn.SiLU(), excite=nn.Sigmoid()), [norm]
    if kind == "convolved":
        layer = FusedNorm(norm, act=nn.ReLU())
        layer.conv = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.eye_(layer.conv.weight.data[:, :, 0, 0]).add_(0.1)
        return layer, [norm]
    if kind == "two norms":
        return FusedNorm(norm, act=nn.ReLU(), shortcut_norm=other), [norm, other]
    return FusedNorm(norm, act=nn.ReLU() if kind == "added" else nn.SiLU()), [norm]


def passed(kind, span, y, shortcut, *, first=0):
    """Outputs and gradients of the layer, and the norms' statistics; in double precision without a span.

    `first`: the number of the first image.
    """
    layer, norms = layer_of(kind, span, y.shape[1])
    if span is None:
        layer.double()
    y, shortcut = y.clone().requires_grad_(), shortcut.clone().requires_grad_()
    z = layer(y, shortcut) if kind in ("two norms", "added") else layer(y)
    noises = [torch.Generator().manual_seed(number) for number in range(first, first + len(z))]
    z.backward(torch.stack([torch.randn(z.shape[1:], generator=noise) for noise in noises]).to(z.dtype))
    images = {"output": z.detach(), "input": y.grad}
    if kind in ("two norms", "added"):
        images["shortcut"] = shortcut.grad
    own = {name: p.grad for name, p in layer.named_parameters()}
    kept = {f"{name} {number}": b for number, norm in enumerate(norms) for name, b in norm.named_buffers()}
    return images, own, kept


def errors(kind="added", counts=(2, 2), means=(0.0, 0.0), deviation=1.0, shape=(6, 9, 9)):
    """Relative errors against float64 on the whole batch, by what was computed, for fused layers and plain ones."""
    noise = torch.Generator().manual_seed(0)
    whole = [torch.randn(sum(counts), *shape, generator=noise) * deviation for _ in range(2)]
    for begin, count, mean in zip((0, counts[0]), counts, means, strict=True):
        whole[0][begin : begin + count] += mean
    y, shortcut = (each.contiguous(memory_format=torch.channels_last) for each in whole)
    layers.fits = pointwise.fits = nothing_fits
    exact = passed(kind, None, y.double(), shortcut.double())
    return {
        name: differences(exact, over_replicas(kind, y, shortcut, counts, fits=fits))
        for name, fits in (("fused", everything_fits), ("plain", nothing_fits))
    }


def over_replicas(kind, y, shortcut, counts, *, fits):
    layers.fits, pointwise.fits = fits, lambda conv, x: fits(x)
    meeting, parts = Meeting(len(counts)), [*zip(y.split(counts), shortcut.split(counts), strict=True)]

    def replica(rank):
        with meeting.turn:
            return passed(kind, Span(meeting, rank), *parts[rank], first=sum(counts[:rank]))

    with ThreadPoolExecutor(len(counts)) as pool:
        found = list(pool.map(replica, range(len(counts))))
    images, own, kept = zip(*found, strict=True)
    assert all(torch.equal(kept[0][name], other[name]) for other in kept for name in kept[0]), "statistics differ"
    joined = {name: torch.cat([each[name] for each in images]) for name in images[0]}
    return joined, {name: sum(each[name] for each in own) for name in own[0]}, kept[0]


def differences(exact, found):
    return {
        name: ((found_part[name].double() - value).abs().max() / value.abs().max().clamp_min(1e-3)).item()
        for exact_part, found_part in zip(exact, found, strict=True)
        for name, value in exact_part.items()
    }


def everything_fits(y, *norms):
    return all(layers.can_fuse(norm) and norm.training for norm in norms)


def nothing_fits(*_):
    return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    pointwise.NOISE, pointwise.SIDE = 1 << 10, 5  # fewer programs, which take turns here
    pointwise_kernels._forward_tiling = lambda inputs, outputs: (64, Tiling(16, 2, 4, 3))
    pointwise_kernels._backward_tiling = lambda widths, reads: Tiling(16, 2, 4, 3)
    found = {kind: errors(kind) for kind in ("one norm", "added", "two norms", "gated", "pooled")}
    found["convolved"] = errors("convolved", shape=(24, 7, 7))
    found["means far apart"] = errors("one norm", means=(-50.0, 50.0))
    found["huge mean"] = errors("one norm", means=(1e3, 1e3))
    found["tiny variance"] = errors("one norm", means=(1.0, 1.0), deviation=1e-3)
    found["constant"] = errors("one norm", means=(2.0, 2.0), deviation=0.0)
    found["uneven batches"] = errors("added", counts=(3, 1))
    found["several programs"] = errors("added", counts=(2, 1), shape=(24, 40, 40))
    print(json.dumps(found))
