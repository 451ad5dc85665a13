"""Optimizer state as tensors by parameter name, for checkpoints."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from falconet.errors import CheckpointError
from falconet.optim.half_optimizers import HalfAdamW, HalfLars, HalfRMSprop, HalfRMSpropTF, HalfSGD
from falconet.optim.muon import Muon
from falconet.optim.optimizers import CombinedSGD, Lars

# An empty tensor for a parameter that has had no gradient yet, so that a missing name is always a mistake.
UNTOUCHED = "untouched"


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """`slot/parameter name` -> tensor: the optimizer's tensors themselves, not copies."""
    slots = slot_names(optimizer)
    tensors = {}
    for name, p in _trained(optimizer, model).items():
        state = optimizer.state.get(p, {})
        if slots and not state:
            tensors[f"{UNTOUCHED}/{name}"] = torch.empty(0)
        for slot, value in state.items():
            tensors[f"{slot}/{name}"] = value.detach() if isinstance(value, Tensor) else _tensor_of(value)
    return tensors


def load_state_tensors(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    home: torch.device | None = None,
) -> None:
    """Load what `state_tensors` returned; change nothing if a name or a shape is wrong.

    `home`: the device for the state, if not that of its parameters.
    """
    trained = _trained(optimizer, model)
    slots = {name: () if f"{UNTOUCHED}/{name}" in tensors else tuple(sorted(slot_names(optimizer))) for name in trained}
    untouched = [f"{UNTOUCHED}/{name}" for name in trained if f"{UNTOUCHED}/{name}" in tensors]
    full = [f"{slot}/{name}" for name in trained for slot in slots[name]]
    check_names(tensors, expected=[*untouched, *full], what="optimizer state")
    for name, p in trained.items():
        for slot in slots[name]:
            stored = tensors[f"{slot}/{name}"]
            check_shape(stored, like=_like(p, slot), name=f"optimizer state '{slot}/{name}'")
            if slot != "step" and not stored.is_floating_point():
                kind = str(stored.dtype).removeprefix("torch.")
                raise CheckpointError(f"optimizer state '{slot}/{name}': got {kind}, expected floating-point numbers")
    optimizer.state.clear()
    counted_on_device = _counted_on_device(optimizer)
    for name, p in trained.items():
        for slot in slots[name]:
            stored = tensors[f"{slot}/{name}"]
            if slot == "step":
                optimizer.state[p][slot] = (
                    stored.to(p.device, torch.float32, copy=True) if p in counted_on_device else _count(stored)
                )
            else:
                optimizer.state[p][slot] = _laid_out_like(p, stored, home or p.device)


def slot_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """The states that the optimizer has for a parameter after its first update."""
    momentum = {"momentum_buffer"} if optimizer.defaults.get("momentum") else set()
    match optimizer:
        case torch.optim.AdamW():
            return {"step", "exp_avg", "exp_avg_sq"}
        case HalfAdamW():
            return {"step", "exp_avg", "root_exp_avg_sq"}
        case torch.optim.RMSprop() | HalfRMSpropTF():
            return {"step", "square_avg"} | momentum
        case HalfRMSprop():
            return {"root_square_avg"} | momentum
        case _ if type(optimizer).__name__ == "RMSpropTF":  # by its name: importing timm takes two seconds
            return {"step", "square_avg"} | momentum
        case Muon():
            return {"momentum_buffer"}
        case Lars() | HalfLars():
            return {"velocity"}
        case CombinedSGD():
            return {"velocity"} if momentum else set()
        case torch.optim.SGD() | HalfSGD():
            return momentum
        case _:
            raise AssertionError(f"{type(optimizer).__name__} is not an optimizer of ours")


def coming_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of state that the first update will create for parameters without any."""
    slots = len(slot_names(optimizer) - {"step"})
    every = (p for group in optimizer.param_groups for p in group["params"])
    return sum(slots * p.numel() * p.element_size() for p in every if not optimizer.state.get(p))


def check_names(found: Iterable[str], *, expected: Iterable[str], what: str) -> None:
    """Refuse any other set of names than the expected one; the message has one wrong name and the number of them."""
    found, expected = set(found), set(expected)
    origin = "is the checkpoint of another model or optimizer?"
    for names, verdict in ((expected - found, "missing"), (found - expected, "unexpected")):
        if names:
            count = f"1 name is {verdict}" if len(names) == 1 else f"{len(names)} names are {verdict}"
            raise CheckpointError(f"{what}: {count} (of {len(expected)} expected), such as '{min(names)}'; {origin}")


def check_shape(tensor: Tensor, *, like: Tensor, name: str) -> None:
    if tensor.shape != like.shape:
        got, expected = (" x ".join(map(str, t.shape)) or "a single number" for t in (tensor, like))
        raise CheckpointError(f"{name}: got shape {got}, expected {expected}; is the checkpoint of another model?")


def _trained(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by their names in the model; a tied one by its first name."""
    ours = {p for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p in ours}
    assert len(trained) == len(ours), "the optimizer belongs to another model"
    return trained


def _counted_on_device(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """The parameters whose count of updates is on their device, where a kernel reads it; others count on the host."""
    groups = (group for group in optimizer.param_groups if group.get("fused") or group.get("capturable"))
    return {p for group in groups for p in group["params"]}


def _like(p: Tensor, slot: str) -> Tensor:
    return torch.empty(()) if slot == "step" else p


def _laid_out_like(p: Tensor, stored: Tensor, device: torch.device) -> Tensor:
    """A copy in the stored type with `p`'s strides, which fused kernels rely on."""
    return torch.empty_like(p, dtype=stored.dtype, device=device).copy_(stored).detach()


def _tensor_of(number: Any) -> Tensor:
    assert isinstance(number, int | float)
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float64)


def _count(stored: Tensor) -> Tensor | int | float:
    """The count in its original type, on the host: torch's are float32 tensors, Python's are 64-bit."""
    return stored.item() if stored.dtype in (torch.int64, torch.float64) else stored.cpu().clone()
