"""A traced model cut into pieces: segments to recompute, or the stages of a pipeline."""

import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.errors import ConfigError

# These return their argument or a view of it, so that a change in place reaches the argument.
_VIEWS = {"view", "reshape", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "chunk", "split"}
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


class _Tracer(fx.Tracer):
    """Keeps norms, and layers without sublayers, whole.

    fx would trace into everything outside torch.nn: it would run the norms' counters and fix whether a layer trains.
    Meanwhile it replaces the call of every module in the process; models that compute in other threads, as a server
    does while it loads another model, are left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = isinstance(m, _BatchNorm | nn.GroupNorm) or next(m.children(), None) is None
        return whole or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module, *, training: bool = True) -> fx.GraphModule:
    """The graph of the model in training (or evaluation), which shares the model's modules."""
    if isinstance(model, fx.GraphModule):
        return model
    modes = {module: module.training for module in model.modules()}
    model.train(training)  # functions such as dropout are traced in the current mode
    try:
        return fx.GraphModule(model, _Tracer().trace(model))
    except (fx.proxy.TraceError, TypeError) as error:  # TypeError: a traced value was used as a number
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{type(model).__name__} cannot be traced: {reason}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode


def name_of(node: fx.Node) -> str:
    """The name of a layer: its path with slashes, or a function's name in the trace, such as `add_13`."""
    return str(node.target).replace(".", "/") if node.op == "call_module" else node.name


def owner(node: fx.Node) -> str:
    """The path of the module that a node is or belongs to."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack)[-1].split("@")[0] if stack else ""  # fx marks a second call with @


def cut(traced: fx.GraphModule, after: Iterable[fx.Node]) -> list[fx.GraphModule]:
    """Cut a graph after each of the nodes; a piece takes and returns every value that it and later pieces need.

    Parameters keep their names, modules are shared, and no piece changes its inputs.
    """
    ends = set(after)
    pieces: list[list[fx.Node]] = [[]]
    for node in computed(traced):
        pieces[-1].append(node)
        if node in ends:
            pieces.append([])
    pieces = [piece for piece in pieces if piece]
    number = {node: place for place, piece in enumerate(pieces) for node in piece}
    outputs = next(node for node in traced.graph.nodes if node.op == "output")
    number[outputs] = len(pieces)
    given = [node for node in traced.graph.nodes if node.op == "placeholder"]
    modules = []
    for place, piece in enumerate(pieces):
        known = [*given, *piece]
        passed = [node for node in known if any(number[user] > place for user in node.users)]
        modules.append(_piece(traced, piece, given=given, results=passed if place < len(pieces) - 1 else None))
        given = passed
    return modules


def computed(traced: fx.GraphModule) -> list[fx.Node]:
    """The nodes that are neither inputs nor the output."""
    return [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]


def last_nodes(traced: fx.GraphModule, model: nn.Module) -> dict[str, fx.Node]:
    """The output node of every layer that runs, by the layer's name."""
    last: dict[str, fx.Node] = {}
    for node in computed(traced):
        if node.op == "get_attr":
            continue
        last[name_of(node)] = node
        parts = owner(node).split(".") if owner(node) else []
        for depth in range(1, len(parts) + 1):
            last["/".join(parts[:depth])] = node
    order = {name.replace(".", "/"): place for place, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(last.items(), key=lambda item: order.get(item[0], len(order))))


def is_random(piece: fx.GraphModule) -> bool:
    """Whether a piece draws random numbers, which a second run must repeat."""
    return any(
        (node.op == "call_module" and _draws(piece.get_submodule(str(node.target))))
        or (node.op in ("call_function", "call_method") and any(word in node.name for word in ("drop", "rand", "bern")))
        for node in piece.graph.nodes
    )


def _draws(layer: nn.Module) -> bool:
    """Whether a layer draws random numbers; timm's DropPath is known by name, as importing timm takes two seconds."""
    return isinstance(layer, _RANDOM) or type(layer).__name__ == "DropPath"


def _piece(
    traced: fx.GraphModule, nodes: Sequence[fx.Node], *, given: Sequence[fx.Node], results: Sequence[fx.Node] | None
) -> fx.GraphModule:
    """A module of these nodes; `results` None: the last piece, which returns what the model returns."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in given}
    for node in _changed_in_place(traced, nodes, given):
        copies[node] = graph.call_method("clone", (copies[node],))
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    if results is None:
        outputs = next(node for node in traced.graph.nodes if node.op == "output")
        graph.output(fx.map_arg(outputs.args[0], lambda argument: copies[argument]))
    else:
        graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(traced, graph)


def _changed_in_place(traced: fx.GraphModule, nodes: Sequence[fx.Node], given: Sequence[fx.Node]) -> list[fx.Node]:
    """The inputs that a node overwrites, directly or through a view."""
    source = {node: node for node in given}
    changed = []
    for node in nodes:
        first = node.args[0] if node.args else None
        origin = source.get(first) if isinstance(first, fx.Node) else None
        if origin is None:
            continue
        if _works_in_place(traced, node):
            changed.append(origin)
        if _works_in_place(traced, node) or _is_view(traced, node):
            source[node] = origin
    return [node for node in given if node in changed]


def _works_in_place(traced: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_")
    return (
        node.target in _IN_PLACE
        or bool(node.kwargs.get("inplace"))
        or getattr(node.target, "__name__", "").endswith("_")
    )


def _is_view(traced: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        layer = traced.get_submodule(str(node.target))
        # A layer from outside torch.nn may return its input.
        foreign = not type(layer).__module__.startswith("torch.nn")
        return foreign or isinstance(layer, nn.Identity | nn.Flatten | nn.modules.dropout._DropoutNd)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _VIEWS or node.target is operator.getitem
