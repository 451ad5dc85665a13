"""Tracing a model leaves the others of the process alone."""

import concurrent.futures

import torch
from torch import nn

from falconet.numerics import segments


def test_models_of_other_threads_compute_while_one_is_traced():
    """fx replaces how all modules of the process are called; a server loads one model while others compute."""
    other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    images = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    expected = other(images)
    found = []

    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            with concurrent.futures.ThreadPoolExecutor(1) as threads:
                found.append(threads.submit(other, images).result())
            return self.layer(x)

    traced = segments.trace(Traced())
    assert torch.equal(found[0], expected)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
