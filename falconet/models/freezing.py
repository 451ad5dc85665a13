"""Layers that stay as they are while those after them are trained."""

from collections.abc import Iterable

from torch import fx, nn

from falconet.errors import ConfigError
from falconet.models.splits import beginnings, place_of
from falconet.numerics.segments import computed, owner, trace

OPTION = "--fine-tune-first-trainable-layer"


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
