"""Which weights are trained: regular expressions of weights, and layers frozen up to a named one."""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.errors import ConfigError
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


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every weight that no pattern matches; without patterns, freeze nothing.

    Layers run as in training: a batch norm with frozen statistics normalises by its batch and does not update them.
    """
    if not patterns:
        return
    norms = {path: layer for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    own = {path: [f"{path}.{name}" for name in STATISTICS] for path in norms}
    weights = dict(model.named_parameters())
    trained = matching([*weights, *(name for names in own.values() for name in names)], patterns)
    if not trained & weights.keys():
        raise ConfigError(f"'{' '.join(patterns)}' matches only batch norm's statistics; expected weights")
    for name, weight in weights.items():
        weight.requires_grad_(name in trained)
    for path, layer in norms.items():
        layer.track_running_stats = not trained.isdisjoint(own[path])


def count_trained(model: nn.Module) -> int:
    """The number of parameters that are trained."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def freeze(model: nn.Module, *, before: str | None) -> list[nn.Module]:
    """Freeze the weights of all layers that run before the named one, and return these layers; None: freeze nothing.

    Keep them in evaluation mode: batch norm then uses its statistics, and dropout passes everything. The name is a
    module's path, with slashes or dots. A layer that runs again later is trained.
    """
    if before is None:
        return []
    traced = trace(model)
    place = place_of(before, beginnings(traced))
    early, late = _Part(computed(traced)[:place]), _Part(computed(traced)[place:])
    frozen = [module for name, module in model.named_modules() if early.runs(name) and not late.runs(name)]
    for module in frozen:
        module.requires_grad_(False)
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
    for name in early.attributes - late.attributes:  # weights of a block that is frozen in part
        model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"'{before}' leaves no weights to train; expected an earlier layer")
    return frozen


class _Part:
    """The modules that a part of a traced model runs."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        nodes = list(nodes)
        self._owners = {owner(node) for node in nodes}
        self._leaves = {owner(node) for node in nodes if node.op == "call_module"}
        self.attributes = {str(node.target) for node in nodes if node.op == "get_attr"}

    def runs(self, name: str) -> bool:
        """Whether the module runs here: itself, a module in it, or a layer that it is part of."""
        inside = any(path == name or path.startswith(f"{name}.") for path in self._owners)
        return bool(name) and (inside or any(name.startswith(f"{leaf}.") for leaf in self._leaves))
