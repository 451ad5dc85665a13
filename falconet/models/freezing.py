"""Weights that stay as they are while others are trained: by name, or those of all layers before one."""

from collections.abc import Iterable, Sequence

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.errors import ConfigError
from falconet.models.patterns import matching
from falconet.models.splits import beginnings, place_of
from falconet.numerics.segments import computed, owner, trace

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
