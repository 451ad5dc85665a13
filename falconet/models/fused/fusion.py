"""Find the norms of a model that can run as one operation with what follows them."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx, nn
from torch.nn import functional

from falconet.models import groupnorm
from falconet.models.fused import depthwise, grouped, narrow, pointwise
from falconet.models.fused.layers import (
    FusedExcitation,
    FusedHalving,
    FusedNorm,
    FusedPool,
    can_fuse,
    can_halve,
    can_pool,
    kind_of,
    own_activation,
)
from falconet.models.fused.outer_layers import FusedStem, Means, PaddedConv, Peaks, can_be_stem, padded_stem
from falconet.models.fused.own_convolution import OwnConv
from falconet.models.groupnorm import FusedGroupNorm
from falconet.models.padding import pads_same
from falconet.numerics.segments import trace

Norm = nn.BatchNorm2d | nn.GroupNorm
Forking = FusedNorm | FusedGroupNorm | FusedPool | FusedHalving
_ADDS = (operator.add, operator.iadd, torch.add)
_PRODUCTS = (operator.mul, operator.imul, torch.mul)
_FUNCTIONS = {
    functional.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    functional.silu: nn.SiLU,
    functional.hardswish: nn.Hardswish,
    functional.relu6: nn.ReLU6,
    functional.gelu: nn.GELU,
}


@dataclass(frozen=True)
class Fusion:
    """A model with fused norms, and their number."""

    model: fx.GraphModule  # shares the modules of the model that it was made from, and their weights
    fused: int
    norms: int
    channels: int = 3  # of the input that it is fastest with; those beyond three are 0


def fuse(model: nn.Module) -> Fusion:
    """Fuse every norm that can be fused in the training pass of the model; ConfigError if it cannot be traced."""
    found = fuse_norms(model)
    traced = found.model
    for node in [*traced.graph.nodes]:
        if isinstance(layer_of(traced, node), Forking):
            _fork(traced, node)
            _replace_mean(traced, node)
    _replace_peaks(traced)
    _join_convolutions(traced)
    channels = _pad_stem(traced)
    _replace_convolutions(traced)
    traced.graph.lint()
    traced.recompile()
    return replace(found, channels=channels)


def fuse_pieces(pieces: Sequence[fx.GraphModule]) -> list[Fusion]:
    """Do the same for a model that was cut into pieces, which run one after the other.

    A value for two layers of the next piece is passed twice, so that their gradients are added in the norm's pass.
    """
    pieces = [fx.GraphModule(piece, copied(piece.graph)) for piece in pieces]
    for piece, following in pairwise(pieces):
        _pass_twice(piece, following)
    return [fuse(piece) for piece in pieces]


def fuse_norms(model: nn.Module) -> Fusion:
    """Merge every norm of the model into one layer with what follows it, and change nothing else."""
    original = trace(model)
    traced = fx.GraphModule(original, copied(original.graph))
    _drop_identities(traced)
    fused = 0
    for node in [*traced.graph.nodes]:
        norm = _norm(traced, node)
        if norm is not None and len(node.users) > 0:
            fused += _fuse_from(traced, node, norm)
    traced.recompile()
    norms = sum(isinstance(module, Norm) for module in model.modules())
    return Fusion(traced, fused, norms)


def copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, values))
    return copy


def layer_of(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else None


def _norm(traced: fx.GraphModule, node: fx.Node) -> Norm | None:
    layer = layer_of(traced, node)
    if isinstance(layer, nn.GroupNorm):
        return layer if groupnorm.can_fuse(layer) else None
    return layer if isinstance(layer, nn.BatchNorm2d) and can_fuse(layer) else None


def _drop_identities(traced: fx.GraphModule) -> None:
    for node in [*traced.graph.nodes]:
        if type(layer_of(traced, node)) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation(traced: fx.GraphModule, node: fx.Node | None) -> nn.Module | None:
    """The activation at a node, if it is one."""
    if node is None:
        return None
    layer = layer_of(traced, node)
    if layer is None and node.op == "call_function" and node.target in _FUNCTIONS:
        return _FUNCTIONS[node.target]() if node.kwargs.get("approximate", "none") == "none" else None
    return layer if layer is not None and kind_of(layer) is not None else None


@dataclass(frozen=True)
class _Pattern:
    """A norm and what follows it, as one layer."""

    layer: nn.Module
    inputs: tuple[fx.Node, ...]
    last: fx.Node  # whose value the layer computes
    norms: int = 1


def _fuse_from(traced: fx.GraphModule, node: fx.Node, norm: Norm) -> int:
    """Replace a norm and what follows it by a fused layer; return the number of norms in it."""
    has_activation = own_activation(norm) != "none"
    found = (None if has_activation else _sum(traced, node, norm)) or _activated(traced, node, norm)
    name = f"fused_{node.name}"
    traced.add_submodule(name, found.layer)
    with traced.graph.inserting_after(found.last):
        made = traced.graph.call_module(name, found.inputs)
    found.last.replace_all_uses_with(made)
    traced.graph.eliminate_dead_code(lambda each: each.op in ("placeholder", "output"))
    return found.norms


def _sum(traced: fx.GraphModule, node: fx.Node, norm: Norm) -> _Pattern | None:
    """The pattern of a norm and a value added to it, perhaps rectified; None: nothing is added."""
    addition = _only_user(node)
    if addition is None or addition.target not in _ADDS or addition.kwargs:
        return None
    shortcut = _other(addition, node)
    if shortcut is None:
        return None
    act = _activation(traced, _only_user(addition))
    act = act if type(act) is nn.ReLU else None  # others would need the sum itself
    last = addition if act is None else next(iter(addition.users))
    if isinstance(norm, nn.GroupNorm):
        return _Pattern(FusedGroupNorm(norm, act=act), (_input(node), shortcut), last)
    other = _norm(traced, shortcut)
    if not isinstance(other, nn.BatchNorm2d) or own_activation(other) != "none" or len(shortcut.users) > 1:
        return _Pattern(FusedNorm(norm, act=act), (_input(node), shortcut), last)
    return _Pattern(FusedNorm(norm, act=act, shortcut_norm=other), (_input(node), _input(shortcut)), last, norms=2)


def _activated(traced: fx.GraphModule, node: fx.Node, norm: Norm) -> _Pattern:
    """The pattern of a norm, its activation if any, and a pool or a gate per image after it."""
    act = _activation(traced, _only_user(node)) if own_activation(norm) == "none" else None
    last = node if act is None else next(iter(node.users))
    if isinstance(norm, nn.GroupNorm):
        return _Pattern(FusedGroupNorm(norm, act=act), (_input(node),), last)
    excited, pooling = _excitation(traced, last), _only_user(last)
    pool = layer_of(traced, pooling) if pooling is not None else None
    if excited is not None:
        chain, product = excited
        return _Pattern(FusedExcitation(norm, act=act, excite=nn.Sequential(*chain)), (_input(node),), product)
    if pooling is not None and isinstance(pool, nn.MaxPool2d) and can_pool(pool) and type(act) is nn.ReLU:
        return _Pattern(FusedPool(norm, act=act, pool=pool), (_input(node),), pooling)
    before = layer_of(traced, _input(node)) if len(_input(node).users) == 1 else None
    if isinstance(before, nn.MaxPool2d) and can_halve(before):
        return _Pattern(FusedHalving(norm, act=act, pool=before), (_input(_input(node)),), last)
    return _Pattern(FusedNorm(norm, act=act), (_input(node),), last)


def _input(node: fx.Node) -> fx.Node:
    given = node.args[0]
    assert isinstance(given, fx.Node)
    return given


def _other(addition: fx.Node, node: fx.Node) -> fx.Node | None:
    """The value to which a norm is added; None: it is a number, or the norm itself."""
    others = [each for each in addition.args if each is not node]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None


def _excitation(traced: fx.GraphModule, node: fx.Node) -> tuple[list[nn.Module], fx.Node] | None:
    """The layers that compute a gate from a value's means, and the product; None: the value is used otherwise."""
    users = [*node.users]
    means = [user for user in users if _is_mean(user)]
    products = [user for user in users if user.target in _PRODUCTS]
    if len(users) != 2 or len(means) != 1 or len(products) != 1:
        return None
    chain, at = [], _only_user(means[0])
    while at is not None and at is not products[0]:
        layer = layer_of(traced, at)
        if layer is None:
            return None
        chain.append(layer)
        at = _only_user(at)
    return (chain, products[0]) if chain and at is products[0] else None


def _is_mean(node: fx.Node) -> bool:
    """Whether a node is the mean over each image's pixels, kept as dimensions of size one."""
    return _is_mean_of_pixels(node) and bool(node.kwargs.get("keepdim"))


def _is_mean_of_pixels(node: fx.Node) -> bool:
    over = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return node.target in ("mean", torch.mean) and over in ((2, 3), [2, 3]) and set(node.kwargs) <= {"dim", "keepdim"}


def _replace_mean(traced: fx.GraphModule, node: fx.Node) -> None:
    """Replace the mean of a fused norm by a layer with a cheaper gradient."""
    mean = _only_user(node)
    if mean is None:
        return
    pool = layer_of(traced, mean)
    is_pool = isinstance(pool, nn.AdaptiveAvgPool2d) and pool.output_size in (1, (1, 1))
    if not is_pool and not _is_mean_of_pixels(mean):
        return
    name = f"means_{mean.name}"
    traced.add_submodule(name, Means(keeps=is_pool or bool(mean.kwargs.get("keepdim"))))
    with traced.graph.inserting_after(mean):
        made = traced.graph.call_module(name, (node,))
    mean.replace_all_uses_with(made)
    traced.graph.erase_node(mean)


def _replace_peaks(traced: fx.GraphModule) -> None:
    for node in [*traced.graph.nodes]:
        over = node.args[1:] or (node.kwargs.get("dim"),)
        if node.target in ("amax", torch.amax) and over in (((2, 3),), ([2, 3],)) and set(node.kwargs) <= {"dim"}:
            traced.add_submodule(f"peaks_{node.name}", Peaks())
            with traced.graph.inserting_after(node):
                made = traced.graph.call_module(f"peaks_{node.name}", (node.args[0],))
            node.replace_all_uses_with(made)
            traced.graph.erase_node(node)


def _join_convolutions(traced: fx.GraphModule) -> None:
    """Join 1 x 1 convolutions to the norms that are the only readers of their results."""
    for node in [*traced.graph.nodes]:
        layer = layer_of(traced, node)
        if not isinstance(layer, FusedNorm):
            continue
        normed = {"conv": 0} if layer.shortcut_norm is None else {"conv": 0, "shortcut_conv": 1}
        for name, place in normed.items():
            source = node.args[place]
            conv = layer_of(traced, source) if isinstance(source, fx.Node) and _only_user(source) is node else None
            if isinstance(conv, nn.Conv2d) and pointwise.can_compute(conv):
                setattr(layer, name, conv)
                node.update_arg(place, _input(source))
                traced.graph.erase_node(source)


def _replace_convolutions(traced: fx.GraphModule) -> None:
    """Replace convolutions that our own kernels compute faster."""
    for node in traced.graph.nodes:
        own = _own_convolution(layer_of(traced, node))
        if own is not None:
            kind, layer = own
            traced.add_submodule(f"{kind}_{node.name}", layer)
            node.target = f"{kind}_{node.name}"


def _own_convolution(layer: nn.Module | None) -> tuple[str, OwnConv] | None:
    """The replacement for a convolution, and its kind; None: it is no convolution, or stays as it is."""
    if isinstance(layer, PaddedConv):
        return ("narrow", narrow.NarrowConv(layer.conv)) if narrow.can_compute(layer.conv) else None
    if not isinstance(layer, nn.Conv2d):
        return None
    if depthwise.can_compute(layer):
        return "depthwise", depthwise.DepthwiseConv(layer)
    if grouped.can_compute(layer):
        return "grouped", grouped.GroupedConv(layer)
    return ("narrow", narrow.NarrowConv(layer)) if narrow.can_compute(layer) else None


def _pad_stem(traced: fx.GraphModule) -> int:
    """Give the first convolution more input channels if it alone reads the images; return their number."""
    fused = fuse_stem(traced)
    if fused is not None:
        return fused.channels
    stem = stem_of(traced)
    if stem is None:
        return 3
    conv = layer_of(traced, stem)
    assert isinstance(conv, nn.Conv2d)
    padded = padded_stem(conv)
    traced.add_submodule(f"padded_{stem.name}", padded)
    stem.target = f"padded_{stem.name}"
    return padded.channels


def fuse_stem(traced: fx.GraphModule) -> FusedStem | None:
    """Merge a first convolution with fixed filters and its activation into one layer; None: there is none."""
    stem = stem_of(traced)
    conv = layer_of(traced, stem) if stem is not None else None
    active = _only_user(stem) if stem is not None else None
    act = _activation(traced, active)
    if stem is None or active is None or act is None or not isinstance(conv, nn.Conv2d) or not can_be_stem(conv):
        return None
    fused = FusedStem(conv, act, outputs=_widened(traced, _only_user(active), conv.out_channels))
    traced.add_submodule(f"fused_{stem.name}", fused)
    stem.target = f"fused_{stem.name}"
    active.replace_all_uses_with(stem)
    traced.graph.erase_node(active)
    return fused


def _widened(traced: fx.GraphModule, node: fx.Node | None, channels: int) -> int | None:
    """Pad a convolution to whole blocks of 32 channels, for which cuDNN has Hopper kernels; return their number."""
    conv = layer_of(traced, node) if node is not None else None
    if node is None or type(conv) is not nn.Conv2d or conv.groups > 1 or conv._forward_hooks or conv._forward_pre_hooks:
        return None
    outputs = -(-channels // 32) * 32
    traced.add_submodule(f"padded_{node.name}", PaddedConv(conv, channels=outputs))
    node.target = f"padded_{node.name}"
    return outputs


def stem_of(traced: fx.GraphModule) -> fx.Node | None:
    """The first convolution, if it alone reads the images and could take more channels."""
    images = next(node for node in traced.graph.nodes if node.op == "placeholder")
    stem = _only_user(images)
    conv = layer_of(traced, stem) if stem is not None else None
    if not isinstance(conv, nn.Conv2d) or conv.in_channels != 3 or conv.groups != 1:
        return None
    return stem if type(conv) is nn.Conv2d or (pads_same(conv) and conv.dilation == (1, 1)) else None


def _fork(traced: fx.GraphModule, node: fx.Node) -> None:
    """Give each of two layers that take a fused value its own copy of the result."""
    users = [*node.users]
    is_passed_twice = len(users) == 1 and _results(users[0]).count(node) == 2
    if not is_passed_twice and (len(users) != 2 or not all(_takes_whole(traced, user) for user in users)):
        return
    layer = traced.get_submodule(str(node.target))
    assert isinstance(layer, Forking)
    layer.forks = True
    with traced.graph.inserting_after(node):
        halves = [traced.graph.call_function(operator.getitem, (node, number)) for number in (1, 0)]
    if is_passed_twice:
        left = iter(halves)
        users[0].args = (tuple(next(left) if each is node else each for each in _results(users[0])),)
        return
    for user, half in zip(users, halves, strict=True):
        user.replace_input_with(node, half)


def _results(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values that a piece returns, if the node is its output."""
    given = node.args[0] if node.op == "output" else ()
    return given if isinstance(given, tuple) else ()


def _pass_twice(piece: fx.GraphModule, following: fx.GraphModule) -> None:
    """Let a piece return a value twice if two layers of the next piece take it, one for each."""
    results = next(node for node in piece.graph.nodes if node.op == "output")
    passed: list[fx.Node] = []
    taken = [node for node in following.graph.nodes if node.op == "placeholder"]
    for value, given in zip(_results(results), taken, strict=True):
        passed.append(value)
        users = [*given.users]
        if len(users) == 2 and all(_takes_whole(following, user) or _is_added(given, user) for user in users):
            passed.append(value)
            with following.graph.inserting_after(given):
                again = following.graph.placeholder(f"{given.name}_again")
            users[1].replace_input_with(given, again)
    results.args = (tuple(passed),)
    piece.recompile()
    following.recompile()


def _is_added(value: fx.Node, user: fx.Node) -> bool:
    """Whether a value is added to another one, perhaps in place."""
    return user.target is operator.iadd and user.args[0] is not value


def _takes_whole(traced: fx.GraphModule, user: fx.Node) -> bool:
    """Whether a layer returns its gradient as a new tensor, and changes nothing in place."""
    whole = isinstance(layer_of(traced, user), nn.Conv2d | FusedNorm | FusedGroupNorm | FusedHalving)
    return whole or user.target in (operator.add, torch.add)
