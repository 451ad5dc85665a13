"""Activations kept at chosen layers and computed again in between, for less memory at the price of a second forward.

The originals' meaning: the outputs of the layers whose names match are stored, what lies between them is recomputed
during the backward pass. `.*conv.*` stores what convolutions give and recomputes norms and activations; listing every
layer of a part (`layer4/.*`) keeps that part whole. Behind the last stored output nothing is recomputed: the backward
pass begins there, so it would save nothing.
"""

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from falconet.errors import ConfigError
from falconet.numerics.footprint import measure
from falconet.numerics.segments import computed, cut, is_random, last_nodes, trace

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def recompute(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Change `model`, in place, to store the outputs of matching layers alone; their names.

    A pattern is a regular expression for a whole name. Weights, their names and gradients stay as they are, and batch
    norm counts each micro-batch once. Only training with gradients is different. To be called when the model lies on
    its device.
    """
    matched = matching(model, patterns)
    segments = _segments(model, matched)
    # Behind the last stored output the backward pass begins at once.
    _run_in(model, (*segments[:-1], segments[-1].piece))
    return matched


def matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The layers whose names match, each pattern at least one."""
    names = list(last_nodes(trace(model), model))
    for pattern in patterns:
        _check_pattern(pattern, names)
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)]


def recompute_stage(stage: nn.Module, stored: Sequence[str]) -> None:
    """The same for a stage of a pipeline, with the names of the stored layers.

    Its last segment is recomputed as well: other micro-batches run before the backward pass of this one.
    """
    _run_in(stage, _segments(stage, stored))


def _segments(model: nn.Module, stored: Sequence[str]) -> list["_Segment"]:
    traced = trace(model)
    last = last_nodes(traced, model)
    return [_Segment.of(piece) for piece in cut(traced, (last[name] for name in stored if name in last))]


def _run_in(model: nn.Module, segments: Sequence[Any]) -> None:
    model._segments = tuple(segments)  # type: ignore[assignment]
    # Bound to the model, so that a copy of the model runs its own layers.
    model.forward = MethodType(_forward, model)


@dataclass(frozen=True)
class Choice:
    """Which blocks to recompute, and the memory that is expected of it."""

    patterns: tuple[str, ...]  # for `recompute`; empty: nothing is to be recomputed
    blocks: tuple[str, ...]  # the recomputed ones, each by the layer that ends it
    predicted_bytes: int  # of activations, at the most
    without_bytes: int  # the same if nothing is recomputed


def automatic(model: nn.Module, *, example: Tensor, budget_bytes: int | None) -> Choice:
    """The fewest recomputed bytes whose activations fit the budget; no budget: every block.

    `example`: a micro-batch of the shape and type that the model computes in; only its shape and type are used. What
    counts is what the backward pass needs of the forward pass; gradients and work space come on top.
    """
    footprint = measure(model, example)
    without = footprint.peak(frozenset())
    blocks: frozenset[int] = frozenset()
    candidates = sorted(footprint.candidates, key=footprint.saving, reverse=True)
    for block in candidates:
        if budget_bytes is not None and footprint.peak(blocks) <= budget_bytes:
            break
        blocks |= {block}
    predicted = footprint.peak(blocks)
    if budget_bytes is not None and predicted > budget_bytes:
        raise ConfigError(
            f"--memory-budget: got {budget_bytes / 2**30:.3g} GiB, wanted at least {predicted / 2**30:.3g} GiB for the "
            f"activations of a batch of {len(example)} with every block recomputed; a smaller --micro-batch-size needs"
            " less"
        )
    patterns = tuple(re.escape(name) for name in footprint.stored_layers(blocks)) if blocks else ()
    return Choice(patterns, tuple(footprint.name(block) for block in sorted(blocks)), predicted, without)


@dataclass(frozen=True)
class _Segment:
    piece: fx.GraphModule
    norms: tuple[_BatchNorm, ...]
    random: bool
    single: bool  # one layer: what its backward pass needs is stored at both ends

    @classmethod
    def of(cls, piece: fx.GraphModule) -> "_Segment":
        norms = tuple(module for module in piece.modules() if isinstance(module, _BatchNorm))
        return cls(piece, norms, is_random(piece), sum(node.op != "get_attr" for node in computed(piece)) == 1)

    def __call__(self, *values: Any) -> Any:
        if self.single:
            return self.piece(*values)
        # The compiler updates statistics once by itself, and refuses contexts.
        compiling = torch.compiler.is_compiling()
        context: dict[str, Any] = (
            {} if compiling else {"context_fn": lambda: (contextlib.nullcontext(), _statistics_aside(self.norms))}
        )
        # Saving the random state reads it from the device's generator, which no captured graph allows.
        return checkpoint(self.piece, *values, use_reentrant=False, preserve_rng_state=self.random, **context)


def _forward(model: nn.Module, *values: Any) -> Any:
    """In the place of the model's own forward."""
    if not (model.training and torch.is_grad_enabled()):
        return type(model).forward(model, *values)
    segments: Any = model._segments
    for segment in segments[:-1]:
        values = segment(*values)
    return segments[-1](*values)


@contextlib.contextmanager
def _statistics_aside(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Let batch norm update throw-away buffers.

    Without buffers it would save other tensors than the first time, which checkpointing refuses.
    """
    training = [norm for norm in norms if norm.training and norm.track_running_stats]
    kept = [{name: norm._buffers[name] for name in _STATISTICS} for norm in training]
    for norm, buffers in zip(training, kept, strict=True):
        norm._buffers.update({name: None if t is None else t.clone() for name, t in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(training, kept, strict=True):
            norm._buffers.update(buffers)


def _check_pattern(pattern: str, names: Sequence[str]) -> None:
    try:
        if any(re.fullmatch(pattern, name) for name in names):
            return
    except re.error as error:
        raise ConfigError(f"--recompute-checkpoints: '{pattern}' is not a regular expression: {error}") from error
    nearest = difflib.get_close_matches(pattern.replace(".*", ""), names, n=3, cutoff=0.0)
    listed = ", ".join(f"'{name}'" for name in nearest)
    raise ConfigError(f"--recompute-checkpoints: '{pattern}' matches no layer; the nearest are {listed}")
