"""The layers of a model in the order in which they run: weights, output shapes and multiplications for one image."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from falconet.train.step import replaced

Row = dict[str, object]


def layer_table(model: nn.Module, *, image_size: int, on: Literal["cpu", "meta"]) -> list[Row]:
    """Every layer that has no layers inside; the model, on the host, is only looked at.

    `on`: "cpu" computes a black image; "meta" computes nothing, but imports torch's compiler, which takes 1.7 s.
    """
    leaves = {module: name for name, module in model.named_modules() if not any(module.children())}
    shapes: dict[str, tuple[int, ...]] = {}

    def noted(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, __: Any, made: Any) -> None:
            if isinstance(made, Tensor):
                shapes.setdefault(name, tuple(made.shape[1:]))

        return note

    with contextlib.ExitStack() as held:
        for module, name in leaves.items():
            held.callback(module.register_forward_hook(noted(name)).remove)
        held.enter_context(_evaluating(model))
        # A model that cannot run on such tensors has its weights listed all the same.
        held.enter_context(contextlib.suppress(RuntimeError, TypeError, NotImplementedError))
        held.enter_context(torch.no_grad())
        held.enter_context(replaced(model, lambda value: value.detach().to(on)))
        model(torch.zeros(1, 3, image_size, image_size, device=on))
    names = {name: module for module, name in leaves.items()}
    order = [*shapes, *(name for name in names if name not in shapes)]
    rows = (_row(name, names[name], shapes.get(name)) for name in order)
    return [row for row in rows if row["parameters"] or row["kind"] != "Identity"]


def _row(name: str, module: nn.Module, shape: tuple[int, ...] | None) -> Row:
    row: Row = {
        "name": name,
        "kind": type(module).__name__,
        "parameters": sum(weight.numel() for weight in module.parameters(recurse=False)),
    }
    if shape is not None:
        row["output"] = " x ".join(map(str, shape))
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim >= 2:  # every value of it is used once for each place
            places = 1
            for side in shape[1:] if weight.ndim == 4 else shape[:-1]:
                places *= side
            row["multiplications"] = places * weight.numel()
    return row


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    stored = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in stored:
            module.training = training
