"""Regular expressions of weights: which ones they match, and what was probably meant where they match none."""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.errors import ConfigError
from falconet.models.splits import beginnings, place_of
from falconet.numerics.segments import computed, owner, trace


def matching(names: Collection[str], patterns: Sequence[str], *, option: str) -> frozenset[str]:
    """Those of the weights `names` that a pattern matches, each pattern at least one.

    A pattern is for a whole name, with slashes for dots (layer1/0/conv1/weight), or for that of a layer that the weight
    is in (layer1, layer1/0): a layer's name means all of its weights.
    """
    paths = {name: _paths(name) for name in names}
    found: set[str] = set()
    for pattern in patterns:
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{option}: '{pattern}' is not a regular expression: {error}") from error
        own = {name for name, each in paths.items() if any(map(wanted.fullmatch, each))}
        if not own:
            raise ConfigError(
                f"{option}: '{pattern}' matches no layer and no weight{_nearest(pattern, paths.values())}"
            )
        found |= own
    return frozenset(found)


def _paths(name: str) -> list[str]:
    """The names of the layers around a weight, the outermost first, and its own."""
    parts = name.split(".")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _nearest(pattern: str, paths: Collection[list[str]]) -> str:
    known = list(dict.fromkeys(path for each in paths for path in each))
    near = difflib.get_close_matches(re.sub(r"\.\*|[\\^$()|]", "", pattern), known, n=3, cutoff=0.0)
    return f"; the nearest are {', '.join(map(repr, near))}" if near else ""


OPTION = "--fine-tune-first-trainable-layer"
TRAINABLE = "--trainable"
STATISTICS = ("running_mean", "running_var")  # of batch norm, which are weights in this: named, trained or frozen


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every weight that no pattern matches; without patterns, none.

    Layers run as in training: a batch norm whose statistics are frozen normalises by its batch, and leaves them alone.
    """
    if not patterns:
        return
    norms = {path: layer for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    own = {path: [f"{path}.{name}" for name in STATISTICS] for path in norms}
    weights = dict(model.named_parameters())
    trained = matching([*weights, *(name for names in own.values() for name in names)], patterns, option=TRAINABLE)
    if not trained & weights.keys():
        raise ConfigError(f"{TRAINABLE}: '{' '.join(patterns)}' matches batch norm's statistics alone; wanted weights")
    for name, weight in weights.items():
        weight.requires_grad_(name in trained)
    for path, layer in norms.items():
        layer.track_running_stats = not trained.isdisjoint(own[path])


def count_trained(model: nn.Module) -> int:
    """How many numbers of the model are trained."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def freeze(model: nn.Module, *, before: str | None) -> list[nn.Module]:
    """Freeze the weights of all layers that run before the named one; returns these layers. None: freezes nothing.

    They are to be kept in evaluation mode: batch norm then uses its statistics as they are, dropout passes all on. The
    name is a module's path, with slashes or dots; a layer that runs again later is trained.
    """
    if before is None:
        return []
    traced = trace(model, wanted_by=OPTION)
    place = place_of(before, beginnings(traced), option=OPTION)
    early, late = _Part(computed(traced)[:place]), _Part(computed(traced)[place:])
    frozen = [module for name, module in model.named_modules() if early.runs(name) and not late.runs(name)]
    for module in frozen:
        module.requires_grad_(False)
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
    for name in early.attributes - late.attributes:  # weights of a block that is frozen in part
        model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{OPTION}: '{before}' leaves no weights to train; wanted an earlier layer")
    return frozen


class _Part:
    """What a part of a traced model runs."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        nodes = list(nodes)
        self._owners = {owner(node) for node in nodes}
        self._leaves = {owner(node) for node in nodes if node.op == "call_module"}
        self.attributes = {str(node.target) for node in nodes if node.op == "get_attr"}

    def runs(self, name: str) -> bool:
        """Whether the module does something here: itself, by one in it, or as a piece of a layer."""
        inside = any(path == name or path.startswith(f"{name}.") for path in self._owners)
        return bool(name) and (inside or any(name.startswith(f"{leaf}.") for leaf in self._leaves))
