"""Batch norm's running statistics moved once an update, by the mean over its micro-batches."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def move_once(model: nn.Module, *, micro_batches: int) -> None:
    """Let the momentum m of each batch norm count once for all the micro-batches of an update, not for each of them.

    Torch moves statistics r to (1 - m) r + m s with every micro-batch, so that after many of them only the last are
    left. Here r becomes (1 - m) r + m mean(s): with the weight m / (K - (K - k) m) for the k-th of K micro-batches the
    steps in between multiply out to that, and nothing else has to be kept.
    """
    layers = [(layer, layer.momentum) for layer in model.modules() if isinstance(layer, _BatchNorm)]
    if micro_batches == 1 or not layers:
        return
    done = 0  # micro-batches of this update

    def begin(module: nn.Module, _: Any) -> None:
        nonlocal done
        if not module.training:
            return
        done = done % micro_batches + 1
        for layer, momentum in layers:
            if momentum is not None:  # else it is a plain mean over all batches
                layer.momentum = momentum / (micro_batches - (micro_batches - done) * momentum)

    model.register_forward_pre_hook(begin)
