"""Recomputation of activations in the backward pass, and the memory that it saves."""

import contextlib
import copy
import difflib
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from falconet.errors import ConfigError
from falconet.numerics.segments import computed, cut, is_random, last_nodes, name_of, owner, trace

Storages = Mapping[int, int]  # bytes by storage
Change = Callable[[Sequence[fx.GraphModule]], Sequence[fx.GraphModule]]
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def recompute(model: nn.Module, patterns: Sequence[str], *, change: Change = lambda pieces: pieces) -> list[str]:
    """Make `model`, in place, store only the outputs of matching layers; return their names.

    A pattern is a regular expression for a whole name. Weights, their names and gradients do not change, and batch
    norm counts each micro-batch once. Only training with gradients is affected. Call it once the model is on its
    device. `change` makes the pieces faster; its results share their weights and norms.
    """
    matched = matching(model, patterns)
    segments = [_Segment.of(piece) for piece in change(pieces(model, matched))]
    # The backward pass starts right after the last segment, so recomputing that one would save nothing.
    _run_in(model, (*segments[:-1], segments[-1].piece))
    return matched


def recompute_stage(stage: nn.Module, stored: Sequence[str]) -> None:
    """Make a stage of a pipeline store only the outputs of the named layers.

    Its last segment is recomputed as well: other micro-batches run before the backward pass of this one.
    """
    _run_in(stage, [_Segment.of(piece) for piece in pieces(stage, stored)])


def matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The layers whose names match; each pattern must match at least one."""
    names = list(last_nodes(trace(model), model))
    for pattern in patterns:
        try:
            found = any(re.fullmatch(pattern, name) for name in names)
        except re.error as error:
            raise ConfigError(f"'{pattern}' is not a regular expression: {error}") from error
        if not found:
            nearest = difflib.get_close_matches(pattern.replace(".*", ""), names, n=3, cutoff=0.0)
            listed = ", ".join(f"'{name}'" for name in nearest)
            raise ConfigError(f"'{pattern}' matches no layer; the nearest are {listed}")
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)]


def pieces(model: nn.Module, stored: Sequence[str]) -> list[fx.GraphModule]:
    """The model cut after each of the named layers."""
    traced = trace(model)
    last = last_nodes(traced, model)
    return cut(traced, (last[name] for name in stored if name in last))


def _run_in(model: nn.Module, segments: Sequence[Any]) -> None:
    model._segments = tuple(segments)  # type: ignore[assignment]
    # Bound to the model, so that a copy of the model runs the copied layers.
    model.forward = MethodType(_forward, model)


def _forward(model: nn.Module, *values: Any) -> Any:
    """A replacement for the model's forward; without gradients it is the original."""
    if not (model.training and torch.is_grad_enabled()):
        return type(model).forward(model, *values)
    segments: Any = model._segments
    for segment in segments[:-1]:
        values = segment(*values)
    return segments[-1](*values)


@dataclass(frozen=True)
class _Segment:
    piece: fx.GraphModule
    norms: tuple[_BatchNorm, ...]
    random: bool
    single: bool  # one layer that keeps nothing but its inputs and outputs: there is nothing to recompute

    @classmethod
    def of(cls, piece: fx.GraphModule) -> "_Segment":
        norms = tuple(module for module in piece.modules() if isinstance(module, _BatchNorm))
        # A norm whose value passes twice returns a pair, from which getitem takes each without keeping anything.
        layers = [node for node in computed(piece) if node.op != "get_attr" and node.target is not operator.getitem]
        single = len(layers) <= 1 and not any(map(_is_two, piece.modules()))
        return cls(piece, norms, is_random(piece), single)

    def __call__(self, *values: Any) -> Any:
        if self.single:
            return self.piece(*values)
        if torch.compiler.is_compiling():  # it updates statistics once anyway, and does not allow contexts
            return checkpoint(self.piece, *values, use_reentrant=False, preserve_rng_state=self.random)
        # A captured graph cannot set the generator back, so it keeps what was drawn, as few as one number per image.
        keeps = self.random and _is_capturing(values)
        return checkpoint(
            self.piece,
            *values,
            use_reentrant=False,
            preserve_rng_state=self.random and not keeps,
            context_fn=lambda: self._contexts(keeps),
        )

    def _contexts(self, keeps: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the first run and of the second."""
        drawn: list[Any] = []
        again = _DrawnBefore(drawn) if keeps else contextlib.nullcontext()
        return _Drawn(drawn) if keeps else contextlib.nullcontext(), _both(_statistics_aside(self.norms), again)


def _is_two(layer: nn.Module) -> bool:
    """Whether a layer is a norm together with the preceding convolution, whose result it keeps."""
    return isinstance(getattr(layer, "norm", None), _BatchNorm) and isinstance(getattr(layer, "conv", None), nn.Conv2d)


@contextlib.contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _is_capturing(values: Iterable[Any]) -> bool:
    """Whether a CUDA graph is being captured; without a driver, there is no stream to ask."""
    on_device = any(isinstance(value, Tensor) and value.is_cuda for value in values)
    return on_device and torch.cuda.is_current_stream_capturing()


class _Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of random operations."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._kept.append(_pytree.tree_map(torch.clone, result))  # the layer may change it
        return result


class _DrawnBefore(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives random operations the results that were kept, in the same order."""

    def __init__(self, kept: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._used = kept, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        kept = self._kept[self._used]
        self._used += 1
        return args[0].copy_(kept) if func._schema.is_mutable else kept


@contextlib.contextmanager
def _statistics_aside(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Let batch norm update throw-away buffers.

    Without any buffers it would save different tensors than the first time, which checkpointing refuses.
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


@dataclass(frozen=True)
class Choice:
    """The blocks to recompute, and the expected memory of activations."""

    patterns: tuple[str, ...]  # for `recompute`; empty: recompute nothing
    blocks: tuple[str, ...]  # the recomputed ones, each named by its last layer
    predicted_bytes: int  # of activations, at most
    without_bytes: int  # the same without recomputation


def automatic(model: nn.Module, *, example: Tensor, budget_bytes: int | None) -> Choice:
    """Choose as few bytes to recompute as the budget for activations allows; without a budget, every block.

    Only the shape and type of `example`, a micro-batch, are used. Memory is what the backward pass needs of the
    forward pass; gradients and workspace come on top.
    """
    footprint = measure_footprint(model, example)
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
            f"got {budget_bytes / 2**30:.3g} GiB, expected at least {predicted / 2**30:.3g} GiB for the activations of "
            f"a micro-batch of {len(example)} with every block recomputed; a smaller micro-batch needs less"
        )
    patterns = tuple(re.escape(name) for name in footprint.stored_layers(blocks)) if blocks else ()
    return Choice(patterns, tuple(footprint.name(block) for block in sorted(blocks)), predicted, without)


@dataclass(frozen=True)
class Block:
    """Consecutive layers between two places where a single value passes."""

    layers: tuple[str, ...]
    needed: Storages  # by the block's backward pass
    entering: Storages  # the block's input


@dataclass(frozen=True)
class Footprint:
    """The memory of a model's activations, block by block, in order."""

    blocks: tuple[Block, ...]

    @property
    def candidates(self) -> range:
        """The blocks that may be recomputed: all but the last, whose backward pass follows at once."""
        return range(len(self.blocks) - 1)

    @property
    def every(self) -> frozenset[int]:
        """All blocks, for a stage of a pipeline, where other micro-batches run before the backward pass."""
        return frozenset(range(len(self.blocks)))

    def stored(self, recomputed: frozenset[int]) -> int:
        """The bytes of a micro-batch between its forward and its backward pass."""
        kept: dict[int, int] = {}
        for number, block in enumerate(self.blocks):
            kept.update(block.entering if number in recomputed else block.needed)
        return _bytes(kept)

    def name(self, block: int) -> str:
        return self.blocks[block].layers[-1]

    def saving(self, block: int) -> int:
        """The bytes that recomputing the block frees while other blocks run."""
        return _bytes(self.blocks[block].needed) - _bytes(self.blocks[block].entering)

    def peak(self, recomputed: frozenset[int]) -> int:
        """The most bytes at once: a block's backward pass needs its activations and those stored by earlier blocks."""
        stored: dict[int, int] = {}
        peak = 0
        for number, block in enumerate(self.blocks):
            stored.update(block.entering)
            if number not in recomputed:
                stored.update(block.needed)
            peak = max(peak, _bytes({**stored, **block.needed}))
        return peak

    def stored_layers(self, recomputed: frozenset[int]) -> list[str]:
        """The layers to store: the last one of each recomputed block, and all layers of the other blocks."""
        names: list[str] = []
        for number in self.candidates:
            layers = self.blocks[number].layers
            names.extend(layers[-1:] if number in recomputed else layers)
        return names


def measure_footprint(model: nn.Module, *examples: Tensor, stored: Sequence[str] | None = None) -> Footprint:
    """The footprint of a training forward pass, found on the meta device from the examples' shapes and types.

    `stored`: names of layers that end a block, those missing from the model ignored; None: where one value passes.
    """
    copied = copy.deepcopy(model).to("meta", examples[0].dtype).train()
    traced = trace(copied)
    meter = _Meter(traced)
    given = [torch.empty_like(example, device="meta") for example in examples]
    with torch.autograd.graph.saved_tensors_hooks(meter.save, lambda packed: packed):
        meter.run(*given)
    blocks: list[Block] = []
    entering = _storages(given)
    last = last_nodes(traced, copied)
    ends = None if stored is None else {last[name] for name in stored if name in last}
    done: list[fx.Node] = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for nodes in _blocks(traced) if ends is None else _between(traced, ends):
        needed: dict[int, int] = {}
        for node in nodes:
            needed.update(meter.saved[node])
        layers = tuple(name_of(node) for node in nodes if node.op != "get_attr")
        blocks.append(Block(layers, needed, entering))
        done += nodes
        entering = {}
        for node in done:
            if not set(done).issuperset(node.users):
                entering.update(meter.given[node])
    return Footprint(tuple(blocks))


class _Meter(fx.Interpreter):
    """Runs a graph node by node and records the storages that each node makes and saves."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced, garbage_collect_values=False)  # a freed storage's number would be used again
        self.saved: dict[fx.Node, dict[int, int]] = {}
        self.given: dict[fx.Node, dict[int, int]] = {}
        self._alive: list[Tensor] = []
        self._weights = {_number(p) for p in traced.parameters()} | {_number(b) for b in traced.buffers()}

    def run_node(self, n: fx.Node) -> Any:
        self._now = self.saved.setdefault(n, {})
        result = super().run_node(n)
        self.given[n] = _storages(t for t in _pytree.tree_leaves(result) if isinstance(t, Tensor))
        return result

    def save(self, tensor: Tensor) -> Tensor:
        if _number(tensor) not in self._weights:
            self._alive.append(tensor)
            self._now.update(_storages([tensor]))
        return tensor


def _blocks(traced: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes of each block; a block ends where a module with sublayers is done and one value passes."""
    nodes = computed(traced)
    place = {node: number for number, node in enumerate(nodes)}
    blocks: list[list[fx.Node]] = [[]]
    until: dict[fx.Node, int] = {
        node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in traced.graph.nodes
    }
    for number, node in enumerate(nodes):
        blocks[-1].append(node)
        passing = [other for other in nodes[: number + 1] if until[other] > number]
        following = nodes[number + 1] if number + 1 < len(nodes) else None
        if following is not None and passing == [node] and _ends_block(node, following):
            blocks.append([])
    return blocks


def _between(traced: fx.GraphModule, ends: Collection[fx.Node]) -> list[list[fx.Node]]:
    """The nodes up to and including each of the ends."""
    blocks: list[list[fx.Node]] = [[]]
    for node in computed(traced):
        blocks[-1].append(node)
        if node in ends:
            blocks.append([])
    return [block for block in blocks if block]


def _ends_block(node: fx.Node, following: fx.Node) -> bool:
    parent = owner(node).rpartition(".")[0] if node.op == "call_module" else owner(node)
    if not parent:  # a layer of the model itself, as in a stem: ends where a block starts
        return "." in owner(following)
    return not owner(following).startswith(f"{parent}.")


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {_number(t): t.untyped_storage().nbytes() for t in tensors}


def _number(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _bytes(storages: Storages) -> int:
    return sum(storages.values())
