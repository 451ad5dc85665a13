"""The choice of trained weights: all except frozen stages, those that patterns name, or those from a layer on."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.errors import ConfigError
from falconet.models.depth import classifier, depths
from falconet.models.splits import beginnings, place_of
from falconet.numerics.segments import computed, owner, trace


def matching(names: Collection[str], patterns: Sequence[str]) -> frozenset[str]:
    """The weights among `names` that a pattern matches; each pattern must match at least one.

    A pattern matches a whole name, with slashes for dots (layer1/0/conv1/weight), or the name of a layer that contains
    the weight (layer1, layer1/0): a layer's name stands for all of its weights.
    """
    paths = {name: _paths(name) for name in names}
    found: set[str] = set()
    for pattern in patterns:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"'{pattern}' is not a regular expression: {error}") from error
        own = {name for name, each in paths.items() if any(map(compiled.fullmatch, each))}
        if not own:
            raise ConfigError(f"'{pattern}' matches no layer and no weight{_nearest(pattern, paths.values())}")
        found |= own
    return frozenset(found)


def _paths(name: str) -> list[str]:
    """The names of the layers that contain a weight, outermost first, then the weight's name."""
    parts = name.split(".")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _nearest(pattern: str, paths: Collection[list[str]]) -> str:
    known = list(dict.fromkeys(path for each in paths for path in each))
    near = difflib.get_close_matches(re.sub(r"\.\*|[\\^$()|]", "", pattern), known, n=3, cutoff=0.0)
    return f"; the nearest are {', '.join(map(repr, near))}" if near else ""


STATISTICS = ("running_mean", "running_var")  # of batch norm; patterns name, train and freeze them like weights
BACKBONE = "backbone"


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """Names of weights that are not trained; names, because a pipeline stage holds only some of the weights."""

    weights: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()  # batch norms whose statistics do not move
    layers: frozenset[str] = frozenset()  # stay in evaluation mode: batch norm uses its statistics, dropout is off

    def set(self, model: nn.Module, *, trains: bool = False) -> None:
        """Freeze the weights in the model or a stage of it; `trains`: undo that."""
        for name, weight in model.named_parameters():
            if name in self.weights:
                weight.requires_grad_(trains)
        for name, layer in model.named_modules():
            if name in self.norms:
                assert isinstance(layer, _BatchNorm)
                layer.track_running_stats = trains


class Hold:
    """Keeps frozen layers in evaluation mode, from one update on and perhaps until another."""

    def __init__(
        self,
        model: nn.Module,
        frozen: Frozen,
        *,
        since: int | None = None,
        until: int | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`since`: the first update with frozen layers; None: they were frozen before the optimizer was built.

        `until`: the first update that trains everything; None: never. `changed`: called after each change.
        """
        self._model, self._frozen, self._since, self._until, self._changed = model, frozen, since, until, changed
        held = [layer for name, layer in model.named_modules() if name in frozen.layers]
        self._evaluated = list(dict.fromkeys(inner for layer in held for inner in layer.modules()))
        self._is_set = until is None and since is None

    def at(self, update: int) -> None:
        """Prepare a model in training mode for the passes of an update."""
        holds = (self._since is None or self._since <= update) and (self._until is None or update < self._until)
        if holds != self._is_set:
            self._is_set = holds
            self._frozen.set(self._model, trains=not holds)
            self._changed()
            for layer in self._evaluated:
                layer.training = True
        if holds:
            for layer in self._evaluated:
                layer.training = False


def frozen_by(model: nn.Module, what: str, *, evaluates: bool = True) -> Frozen:
    """Freeze the first stages (a number), all except the classifier (backbone), or weights that match a pattern.

    `evaluates`: frozen layers stay in evaluation mode; otherwise batch norm normalises by its batch and keeps its
    statistics, as in the TensorFlow original.
    """
    every = _names(model)
    if what == BACKBONE:
        frozen = frozenset(every) - classifier(model)
    elif what.isdecimal():
        found = depths(model, every, by_block=False)
        last = max(found.values())
        if not 1 <= int(what) <= last:
            raise ConfigError(f"got {what}, expected 1 to {last}: the model has {last} stages before its classifier")
        frozen = frozenset(name for name in every if found[name] < int(what))
    else:
        frozen = matching(every, [what])
    if frozen.issuperset(_own(model)):
        raise ConfigError(f"'{what}' leaves no weights to train")
    return _without(model, frozenset(every) - frozen, evaluates=evaluates)


def trained_by(model: nn.Module, patterns: Sequence[str], *, evaluates: bool = True) -> Frozen:
    """Freeze everything that no pattern matches; without patterns, nothing."""
    if not patterns:
        return Frozen()
    trained = matching(_names(model), patterns)
    if trained.isdisjoint(_own(model)):
        what = "batch norm's statistics" if trained.isdisjoint(_weights(model)) else "what the model keeps fixed"
        raise ConfigError(f"'{' '.join(patterns)}' matches only {what}; expected weights to train")
    return _without(model, trained, evaluates=evaluates)


def _without(model: nn.Module, trained: frozenset[str], *, evaluates: bool) -> Frozen:
    """All weights and statistics except those named in `trained`, as frozen."""
    norms = {path for path, _ in _norms(model) if trained.isdisjoint(f"{path}.{name}" for name in STATISTICS)}
    still = {  # layers that contain no trained weight and no moving statistic
        path
        for path, layer in model.named_modules()
        if path and any(True for _ in layer.parameters()) and not any(name.startswith(f"{path}.") for name in trained)
    }
    return Frozen(
        weights=_own(model) - trained,
        norms=frozenset(norms),
        layers=frozenset(still | norms if evaluates else ()),
    )


def _weights(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _own(model: nn.Module) -> frozenset[str]:
    """The weights that a new model trains; others, such as whitening filters, are always fixed."""
    return frozenset(name for name, weight in model.named_parameters() if weight.requires_grad)


def _names(model: nn.Module) -> list[str]:
    """The names of the weights, then of batch norms' statistics."""
    return [*_weights(model), *(f"{path}.{name}" for path, _ in _norms(model) for name in STATISTICS)]


def _norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The batch norms with statistics, by name."""
    return [
        (path, layer)
        for path, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    ]


def count_trained(model: nn.Module) -> int:
    """The number of parameters that are trained."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def frozen_before(model: nn.Module, first: str | None) -> Frozen:
    """Freeze the weights of all layers that run before the named one; None: nothing.

    The name is a module's path, with slashes or dots. A layer that runs again later is trained.
    """
    if first is None:
        return Frozen()
    traced = trace(model)
    place = place_of(first, beginnings(traced))
    early, late = _Part(computed(traced)[:place]), _Part(computed(traced)[place:])
    layers = {name: layer for name, layer in model.named_modules() if early.runs(name) and not late.runs(name)}
    inside = {f"{path}.{name}" for path, layer in layers.items() for name, _ in layer.named_parameters()}
    inside |= early.attributes - late.attributes  # those of a block that is frozen in part
    frozen = Frozen(
        weights=_own(model) & inside,
        norms=frozenset(path for path, _ in _norms(model) if path in layers),
        layers=frozenset(layers),
    )
    if frozen.weights == _own(model):
        raise ConfigError(f"'{first}' leaves no weights to train; expected an earlier layer")
    return frozen


class _Part:
    """The modules that a part of a traced model runs."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        nodes = list(nodes)
        self._owners = {owner(node) for node in nodes}
        self._leaves = {owner(node) for node in nodes if node.op == "call_module"}
        self.attributes = {str(node.target) for node in nodes if node.op == "get_attr"}

    def runs(self, name: str) -> bool:
        """Whether the module, a module in it or a layer that contains it runs in this part."""
        inside = any(path == name or path.startswith(f"{name}.") for path in self._owners)
        return bool(name) and (inside or any(name.startswith(f"{leaf}.") for leaf in self._leaves))
