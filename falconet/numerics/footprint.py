"""How much memory a model's activations take, block by block, found without computing anything."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from falconet.numerics.segments import computed, last_nodes, name_of, owner, trace

Storages = Mapping[int, int]  # bytes by storage


@dataclass(frozen=True)
class Block:
    """A stretch of layers between two places where only one value passes."""

    layers: tuple[str, ...]
    needed: Storages  # by its own backward pass
    entering: Storages  # the value it starts from


@dataclass(frozen=True)
class Footprint:
    """The blocks of a model, in order."""

    blocks: tuple[Block, ...]

    @property
    def candidates(self) -> range:
        """Blocks that may be recomputed: not the last, whose backward pass comes at once."""
        return range(len(self.blocks) - 1)

    @property
    def every(self) -> frozenset[int]:
        """All blocks, for a stage of a pipeline: other micro-batches run before its backward pass."""
        return frozenset(range(len(self.blocks)))

    def stored(self, recomputed: frozenset[int]) -> int:
        """Bytes of a micro-batch between its forward and its backward pass."""
        kept: dict[int, int] = {}
        for number, block in enumerate(self.blocks):
            kept.update(block.entering if number in recomputed else block.needed)
        return _bytes(kept)

    def name(self, block: int) -> str:
        return self.blocks[block].layers[-1]

    def saving(self, block: int) -> int:
        """Bytes that recomputing it frees while other blocks run."""
        return _bytes(self.blocks[block].needed) - _bytes(self.blocks[block].entering)

    def peak(self, recomputed: frozenset[int]) -> int:
        """The most bytes at once: a block's backward pass needs its own, and what earlier blocks have stored."""
        stored: dict[int, int] = {}
        peak = 0
        for number, block in enumerate(self.blocks):
            stored.update(block.entering)
            if number not in recomputed:
                stored.update(block.needed)
            peak = max(peak, _bytes({**stored, **block.needed}))
        return peak

    def stored_layers(self, recomputed: frozenset[int]) -> list[str]:
        """Layers to store: the ends of recomputed blocks and of those before them, and all of the other blocks."""
        names: list[str] = []
        for number in self.candidates:
            layers = self.blocks[number].layers
            names.extend(layers[-1:] if number in recomputed else layers)
        return names


def measure(model: nn.Module, *examples: Tensor, stored: Sequence[str] | None = None) -> Footprint:
    """The footprint of a training forward pass on a micro-batch of the examples' shape and type.

    `stored`: names of the layers that blocks end with, as far as the model has them; None: where one value passes.
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
    """Runs node by node and notes which storages each one makes and saves."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced, garbage_collect_values=False)  # a dead storage's number would be used again
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
    """Nodes between the ends of blocks: where a module with layers in it is done and one value goes on."""
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
    """Nodes up to each of the ends."""
    blocks: list[list[fx.Node]] = [[]]
    for node in computed(traced):
        blocks[-1].append(node)
        if node in ends:
            blocks.append([])
    return [block for block in blocks if block]


def _ends_block(node: fx.Node, following: fx.Node) -> bool:
    parent = owner(node).rpartition(".")[0] if node.op == "call_module" else owner(node)
    if not parent:  # a layer of the model itself, as in a stem: where a block begins
        return "." in owner(following)
    return not owner(following).startswith(f"{parent}.")


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {_number(t): t.untyped_storage().nbytes() for t in tensors}


def _number(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _bytes(storages: Storages) -> int:
    return sum(storages.values())
