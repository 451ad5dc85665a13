"""The depth of each weight in a model: stem, stages or blocks, classifier, as timm groups them."""

from collections.abc import Iterable
from typing import Any

from torch import nn

# For the CIFAR networks and torchvision's SqueezeNet, which are not timm's. Names that match neither: the classifier.
_STAGES = {"stem": r"^(?:conv1|bn1)\.", "blocks": r"^(?:layer|features\.)(\d+)"}
_BLOCKS = _STAGES | {"blocks": [(r"^layer(\d+)\.(\d+)", None), (r"^features\.(\d+)", None)]}


def depths(model: nn.Module, names: Iterable[str], *, by_block: bool) -> dict[str, int]:
    """The depth of each weight or statistic, by stage or by block: 0 for the stem, largest for the classifier."""
    from timm.models._manipulate import group_with_matcher  # timm takes two seconds to import

    own: Any = getattr(model, "group_matcher", None)
    matcher = own(coarse=not by_block) if own else _BLOCKS if by_block else _STAGES
    found: dict[str, int] = group_with_matcher(((name, name) for name in names), matcher, reverse=True)
    return found


def classifier(model: nn.Module) -> frozenset[str]:
    """The names of the weights of the layer that gives the logits."""
    names = [name for name, _ in model.named_parameters()]
    own: Any = getattr(model, "get_classifier", None)
    if own:
        heads = own() if isinstance(own(), tuple) else (own(),)
        weights = {weight for head in heads for weight in head.parameters()}
        return frozenset(name for name, weight in model.named_parameters() if weight in weights)
    found = depths(model, names, by_block=False)
    return frozenset(name for name in names if found[name] == max(found.values()))


def orthogonal_names(model: nn.Module) -> frozenset[str]:
    """The names of the filters and matrices whose updates may be orthogonal: all except the classifier's."""
    last = classifier(model)
    return frozenset(name for name, weight in model.named_parameters() if weight.ndim > 1 and name not in last)


def rate_shares(model: nn.Module, decay: float) -> dict[str, float]:
    """The share of the learning rate that each weight gets: 1 in the classifier, times `decay` per block before it."""
    found = depths(model, [name for name, _ in model.named_parameters()], by_block=True)
    deepest = max(found.values())
    return {name: decay ** (deepest - depth) for name, depth in found.items()}
