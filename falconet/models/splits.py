"""The stages of a pipeline: a traced model cut at named layers, or into pieces that take equal time."""

import difflib
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from falconet.errors import ConfigError
from falconet.numerics.segments import computed, cut, name_of, owner, trace

NUMBER = re.compile(r"\d+")
RUNS = 3  # of every layer when its cost is measured; the fastest one counts


@dataclass(frozen=True)
class Stage:
    """One piece of a pipelined model: a module, and the names of its first and last layers."""

    module: fx.GraphModule
    first: str
    last: str


def split(model: nn.Module, names: Sequence[str]) -> list[Stage]:
    """Cut the model into stages; each but the first starts with a named layer. They share the model's modules.

    A name is a module's path, with slashes or dots. A stage takes and returns as many values as cross the cut, so a
    split may be inside a residual block. Together, the stages' state has the same keys as the model's.
    """
    traced = _traced(model)
    nodes = computed(traced)
    begins = [0, *_places(traced, names)]
    pieces = cut(traced, [nodes[begin - 1] for begin in begins[1:]])
    stages = []
    for piece, begin, end in zip(pieces, begins, [*begins[1:], len(nodes)], strict=True):
        layers = [name_of(node) for node in nodes[begin:end] if node.op != "get_attr"]
        stages.append(Stage(piece.train(model.training), layers[0], layers[-1]))
    _check_weights(model, stages)
    return stages


class OverDevices(nn.Module):
    """Stages of a model for prediction, each on its own device of this process; batches pass from one to the next.

    The host starts the stages of a batch without waiting for them, so that the devices work on batches in turn. The
    result is on the first device.
    """

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        """`stages`: already on their devices."""
        super().__init__()
        self._stages, self._devices = nn.ModuleList(stages), list(devices)

    def forward(self, images: Tensor) -> Tensor:
        values: tuple[Tensor, ...] = (images,)
        for stage, device in zip(self._stages, self._devices, strict=True):
            found = stage(*(value.to(device, non_blocking=True) for value in values))
            values = found if isinstance(found, tuple) else (found,)
        return values[0].to(images.device, non_blocking=True)


def balance(model: nn.Module, count: int, *, example: Tensor) -> list[str]:
    """The splits that divide the model into `count` stages with about equal times on the example's device.

    Only places where a single value passes are considered, each named after the largest layer that starts there. Only
    the forward pass is timed: the backward pass takes about twice as long for every layer.
    """
    traced = _traced(model)
    names = _candidates(traced)
    _check_count(count, names)
    costs = _costs(traced, example)
    nodes = computed(traced)
    sums = [0.0, *itertools.accumulate(costs[node] for node in nodes)]
    weighty = [0, *itertools.accumulate(_has_weights(traced, node) for node in nodes)]
    ends = [*sorted(names), len(nodes)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (sums[end], ()) for end in ends if weighty[end]
    }  # the slowest stage, and the places of the splits
    for _ in range(count - 1):
        best = {
            end: min(
                (max(slowest, sums[end] - sums[begin]), (*places, begin))
                for begin, (slowest, places) in best.items()
                if begin < end and weighty[end] > weighty[begin]
            )
            for end in ends
            if any(begin < end and weighty[end] > weighty[begin] for begin in best)
        }
    if len(nodes) not in best:
        raise ConfigError(f"got auto:{count}, expected fewer stages: some would have no weights")
    return [names[place] for place in best[len(nodes)][1]]


def require(model: nn.Module, asked: Sequence[str]) -> None:
    """Refuse splits that the model cannot have; for stages that share a process and are never made."""
    if asked[0].startswith("auto:"):
        _check_count(int(asked[0].removeprefix("auto:")), _candidates(_traced(model)))
    else:
        split(model, asked)


def _check_count(stages: int, places: Mapping[int, str]) -> None:
    if stages > len(places) + 1:
        raise ConfigError(f"got auto:{stages}, expected at most auto:{len(places) + 1} for this model")


def _traced(model: nn.Module) -> fx.GraphModule:
    training = trace(model)
    if sum(node.op == "placeholder" for node in training.graph.nodes) > 1:
        raise ConfigError(f"{type(model).__name__} takes more than images; expected another model")
    # A layer may differ between training and evaluation; what differs outside of layers is lost in the trace.
    if training.code != trace(model, training=False).code:
        raise ConfigError(f"{type(model).__name__} behaves differently in training outside of its layers")
    return training


def beginnings(traced: fx.GraphModule) -> dict[str, int]:
    """The position of every layer's first node; a block comes before the layers in it."""
    found: dict[str, int] = {}
    for place, node in enumerate(computed(traced)):
        parts = owner(node).split(".") if owner(node) else []
        for depth in range(1, len(parts) + 1):
            found.setdefault("/".join(parts[:depth]), place)
        if node.op != "get_attr":
            found.setdefault(name_of(node), place)
    return found


def place_of(given: str, known: Mapping[str, int]) -> int:
    """The position at which a layer starts, by its name."""
    name = given.replace(".", "/")
    if name not in known:
        raise ConfigError(f"'{given}' is not a layer; the nearest are {_listed(_nearest(name, known))}")
    return known[name]


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    """Three similar names, first those with the same numbers: the originals' b2/0/relu is in our layer2/0."""
    numbers = NUMBER.findall(name)
    same = [each for each in known if NUMBER.findall(each)[: len(numbers)] == numbers] if numbers else []
    near = [*difflib.get_close_matches(name, same, cutoff=0.0), *difflib.get_close_matches(name, known, cutoff=0.0)]
    return list(dict.fromkeys(near))[:3]


def _places(traced: fx.GraphModule, names: Sequence[str]) -> list[int]:
    known = beginnings(traced)
    layers = [name for name in known if any(owner(n).replace(".", "/") == name for n in computed(traced))]
    places: list[int] = []
    for number, given in enumerate(names):
        place = place_of(given, known)
        if place == 0:
            later = [each for each in layers if known[each] > 0]
            raise ConfigError(
                f"'{given}' is the model's first layer, and a split names the first layer of a later stage; expected "
                f"one of {_some(later)}"
            )
        if places and place <= places[-1]:
            later = [each for each in layers if known[each] > places[-1]]
            verdict = "starts where" if place == places[-1] else "runs before"
            raise ConfigError(
                f"'{given}' {verdict} '{names[number - 1]}' does, which is given before it; expected one of "
                f"{_some(later)}"
            )
        places.append(place)
    return places


def _candidates(traced: fx.GraphModule) -> dict[int, str]:
    """Positions where one value passes and a layer starts, with the name of the largest such layer."""
    names: dict[int, str] = {}
    for name, place in beginnings(traced).items():
        names.setdefault(place, name)
    nodes = computed(traced)
    order = {node: place for place, node in enumerate(nodes)}
    until = {node: max((order.get(user, len(nodes)) for user in node.users), default=-1) for node in traced.graph.nodes}
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    found = {}
    for place, name in sorted(names.items()):
        passing = [node for node in (*inputs, *nodes[:place]) if until[node] >= place]
        if place > 0 and len(passing) == 1 and nodes[place].op == "call_module":
            found[place] = name
    return found


class _Clock(fx.Interpreter):
    """Runs a graph node by node and records the shortest time of each, in seconds."""

    def __init__(self, traced: fx.GraphModule, device: torch.device) -> None:
        super().__init__(traced)
        self.seconds: dict[fx.Node, float] = {}
        self._device = device

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def run_node(self, n: fx.Node) -> Any:
        self._wait()
        begun = time.perf_counter()
        result = super().run_node(n)
        self._wait()
        self.seconds[n] = min(self.seconds.get(n, float("inf")), time.perf_counter() - begun)
        return result


@torch.no_grad()
def _costs(traced: fx.GraphModule, example: Tensor) -> Mapping[fx.Node, float]:
    """The seconds of each node's forward pass, in evaluation mode so that statistics and generators do not change."""
    modes = {module: module.training for module in traced.modules()}
    traced.eval()
    clock = _Clock(traced, example.device)
    for _ in range(RUNS):
        clock.run(example)
    for module, mode in modes.items():
        module.training = mode
    return clock.seconds


def _has_weights(traced: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(True for _ in traced.get_submodule(str(node.target)).parameters())
    return node.op == "get_attr"


def _check_weights(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Require that every weight belongs to one stage, and that every stage has weights, trained or frozen."""
    owners: dict[str, int] = {}
    for number, stage in enumerate(stages):
        if not any(True for _ in stage.module.parameters()):
            raise ConfigError(f"the stage from '{stage.first}' to '{stage.last}' would have no weights to train")
        for key in stage.module.state_dict():
            if owners.setdefault(key, number) != number:
                raise ConfigError(
                    f"'{key}' is used by stage {owners[key]} and by stage {number}; expected a split elsewhere"
                )
    unused = [key for key in model.state_dict() if key not in owners]
    if unused:
        raise ConfigError(f"'{unused[0]}' is not used in the forward pass, so no stage has it")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _some(names: Sequence[str], most: int = 8) -> str:
    """At most `most` names, spread evenly."""
    chosen = list(_spread(names, most))
    return _listed(chosen) + (f" ({len(names)} in all)" if len(names) > len(chosen) else "")


def _spread(names: Sequence[str], most: int) -> Iterator[str]:
    if len(names) <= most:
        yield from names
    else:
        yield from (names[round(i * (len(names) - 1) / (most - 1))] for i in range(most))
