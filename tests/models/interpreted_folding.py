"""Run by test_folding in a separate process, because Triton must be imported with its interpreter from the start."""

import json

import torch
from torch import nn

from falconet.models.folding import FoldedConv2d

ACTS = {"none": None, "relu": nn.ReLU(), "silu": nn.SiLU(), "hard_swish": nn.Hardswish(), "relu6": nn.ReLU6()}


@torch.no_grad()
def difference(act, *, added=None, excites=False):
    """Of the CUDA path and the layers, of which the first finds no cuDNN here."""
    torch.manual_seed(0)
    excite = nn.Sequential(nn.Conv2d(24, 6, 1), nn.SiLU(), nn.Conv2d(6, 24, 1), nn.Sigmoid()) if excites else None
    layer = FoldedConv2d(nn.Conv2d(8, 24, 3, stride=2, padding=1), act=ACTS[act], excite=excite)
    x = torch.randn(3, 8, 11, 11).contiguous(memory_format=torch.channels_last)
    shortcut = torch.randn(added).contiguous(memory_format=torch.channels_last) if added else None
    expected = layer(x, shortcut)
    found = layer._on_cuda(x, shortcut, act=act)
    return float((found - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    cases = {act: difference(act) for act in ACTS}
    cases |= {f"{act}, added": difference(act, added=(3, 24, 6, 6)) for act in ("none", "relu")}
    cases |= {f"{act}, one for all added": difference(act, added=(1, 24, 6, 6)) for act in ("none", "relu")}
    print(json.dumps(cases | {"silu, excited": difference("silu", excites=True)}))
