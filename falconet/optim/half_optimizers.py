"""Optimizers for half precision: scaled gradients, skipped updates and stochastic rounding, fused on CUDA."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from falconet.numerics.kernels import update_rules
from falconet.numerics.kernels.tensor_table import Control, Group, Tables, is_dense, same_layout
from falconet.numerics.rounding import SMALLEST, Nearest, Part, Rounding, Stochastic, Store

SMALL = 64  # elements of a weight that no model has
PIECE = 1 << 15  # elements updated at a time on a CPU, so that the fp32 copies stay in its cache

Arithmetic = Callable[..., tuple[Tensor, ...]]


class HalfOptimizer(torch.optim.Optimizer, ABC):
    """The common base of the rules: loss scale, skipped updates, rounding, and fused or plain arithmetic.

    Gradients are divided by `scale` (0-d fp32) in fp32. If `found` (0-d bool) is true, weights and state do not
    change. Both are read on the device, never by the host; None means 1 and false.
    """

    counts_updates = False  # whether each parameter has a `step`
    uploads = True  # whether moving other weights than before begins with an upload: of their tables

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, rounding: Rounding | None) -> None:
        super().__init__(params, {**defaults, "capturable": True})
        self.rounding = rounding
        self.scale: Tensor | None = None
        self.found: Tensor | None = None
        self._params = [p for group in self.param_groups for p in group["params"]]
        # Replaced where a process has pieces of the parameters, so that their noise is that of the whole.
        self.parts = {p: Part(number) for number, p in enumerate(self._params)}
        device = self._params[0].device if self._params else torch.device("cpu")  # a stage may have nothing to train
        self.rounding_update = torch.zeros((), dtype=torch.int32, device=device)
        self._rate, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        self._tables = Tables()
        self._fuses = device.type == "cuda"

    def at(self, update: int) -> None:
        """Set the number of the next update, which rounding noise depends on; not inside a captured graph."""
        self.rounding_update.fill_(update)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "an update is zero_grad, backward passes, step"
        update = self._fused if self._fuses else partial(self._plain, store=self._store())
        self._tables.begin()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            self._fill_slots(params, self.slots(group))
            if self.counts_updates:
                taken = self._one if self.found is None else (~self.found).float()
                # A list of tensors: a single tensor would be read as a number, which the host waits for.
                torch._foreach_add_([self.state[p]["step"] for p in params], [taken] * len(params))
            update(group, params)

    @torch.no_grad()
    def rehearse(self) -> None:
        """Launch the kernels of an update on a small weight of each type, without lasting effects."""
        tables, self._tables = self._tables, Tables()
        small: list[Tensor] = []
        try:
            for group in self.param_groups:
                types = dict.fromkeys((p.dtype, p.device) for p in group["params"])
                params = [torch.zeros(SMALL, dtype=dtype, device=device) for dtype, device in types]
                small += params
                for p in params:
                    p.grad, self.parts[p] = torch.zeros_like(p), Part(0)
                self._fill_slots(params, self.slots(group))
                if self._fuses and params:
                    self._fused(group, params)
        finally:
            self._tables = tables
            for p in small:
                self.state.pop(p, None)
                self.parts.pop(p, None)

    @abstractmethod
    def slots(self, group: dict[str, Any]) -> dict[str, float]:
        """The states of a parameter and their initial values, in the rule's order."""

    @abstractmethod
    def rule(self, group: dict[str, Any]) -> tuple[str, Arithmetic, tuple[float, ...]]:
        """The rule's name in the kernel, the plain rule with its constants, and the kernel's constants."""

    def own(self, group: dict[str, Any], params: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """Two fp32 numbers per parameter that the rule needs, on the device."""
        return self._one.expand(len(params), 2)

    def fused_own(self, group: dict[str, Any], batch: Group) -> Tensor:
        """The two numbers per parameter for the fused kernel, contiguous."""
        return self.own(group, batch.weights).contiguous()

    def bind(self, arithmetic: Arithmetic, p: Tensor, *, own: Tensor, lr: Tensor) -> Arithmetic:  # noqa: ARG002
        """The plain rule for one parameter and its two numbers."""
        return partial(arithmetic, lr=lr)

    def _plain(self, group: dict[str, Any], params: Sequence[Tensor], store: Store) -> None:
        lr, own = self._lr(group), self.own(group, params)
        inverse = self._one / self.scale if self.scale is not None else self._one
        slots, (_, arithmetic, _) = self.slots(group), self.rule(group)
        for p, numbers in zip(params, own, strict=True):
            bound, part = self.bind(arithmetic, p, own=numbers, lr=lr), self.parts[p]
            assert p.grad is not None
            stored = [p, *(self.state[p][slot] for slot in slots)]
            for first, (grad, *tensors) in _pieces(p.grad, *stored):
                before = [t.float() for t in tensors]
                after = bound(before[0], grad.float() * inverse, *before[1:])
                for slot, (t, old, new) in enumerate(zip(tensors, before, after, strict=True)):
                    kept = new if self.found is None else torch.where(self.found, old, new)
                    t.copy_(store(kept, t.dtype, part=part._replace(first=part.first + first), slot=slot))

    def _fused(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        from falconet.numerics.kernels import fused_updates  # Triton comes with CUDA only

        control = Control(
            lr=self._lr(group),
            scale=self._one if self.scale is None else self.scale,
            found=self._never if self.found is None else self.found,
            update=self.rounding_update,
            rounding=self.rounding,
        )
        name, _, constants = self.rule(group)
        for same in _by_type(params):
            assert all(is_dense(p) for p in same), "a weight is neither row-major nor channels-last"
            batch = Group(
                weights=same,
                grads=[same_layout(p.grad, like=p) for p in same if p.grad is not None],
                states=[[self.state[p][slot] for slot in self.slots(group)] for p in same],
                parts=[self.parts[p] for p in same],
            )
            own = self.fused_own(group, batch)
            fused_updates.launch(name, batch, control, own=own, constants=constants, tables=self._tables)

    def _store(self) -> Store:
        if self.rounding is None:
            return Nearest()
        tensors = 1 + max((part.tensor for part in self.parts.values()), default=0)
        return Stochastic(self.rounding, update=self.rounding_update, tensors=tensors)

    def _lr(self, group: dict[str, Any]) -> Tensor:
        rate = group["lr"]
        return rate if isinstance(rate, Tensor) else self._rate.fill_(rate)

    def _fill_slots(self, params: Sequence[Tensor], slots: dict[str, float]) -> None:
        """Create the state of parameters that have their first gradient."""
        for p in params:
            state = self.state[p]
            if not state and self.counts_updates:
                state["step"] = torch.zeros((), device=p.device)
            for name, value in slots.items():
                if name not in state:
                    state[name] = torch.full_like(p, value)


class HalfSGD(HalfOptimizer):
    """v = momentum * v + g + decay * w; w -= lr * v."""

    def __init__(
        self, params: ParamsT, *, lr: float, momentum: float, rounding: Rounding | None, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, rounding=rounding)

    def slots(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] else {}

    def rule(self, group: dict[str, Any]) -> tuple[str, Arithmetic, tuple[float, ...]]:
        momentum, decay = group["momentum"], group["weight_decay"]
        if not momentum:
            return "descent", partial(update_rules.descent, decay=decay), (decay,)
        plain = partial(update_rules.momentum_descent, momentum=momentum, decay=decay)
        return "momentum_descent", plain, (decay, momentum)


class HalfLars(HalfOptimizer):
    """v = momentum * v + lr * trust * (g + decay * w); w -= v, with trust 1 in groups that do not adapt."""

    def __init__(
        self, params: ParamsT, *, lr: float, momentum: float, trust: float, eps: float, rounding: Rounding | None
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "trust": trust, "eps": eps, "weight_decay": 0.0, "adapts": True}
        super().__init__(params, defaults, rounding=rounding)
        self.norms = norms_of  # replaced where a process has pieces of the parameters

    def slots(self, group: dict[str, Any]) -> dict[str, float]:  # noqa: ARG002
        return {"velocity": 0.0}

    def rule(self, group: dict[str, Any]) -> tuple[str, Arithmetic, tuple[float, ...]]:
        momentum, decay = group["momentum"], group["weight_decay"]
        return "lars", partial(update_rules.lars, momentum=momentum, decay=decay), (decay, momentum)

    def own(self, group: dict[str, Any], params: Sequence[Tensor]) -> Tensor:
        """The trust ratios, with gradients divided by the loss scale."""
        if not group["adapts"]:
            return super().own(group, params)
        weights = self.norms(params)
        grads = self.norms([p.grad for p in params if p.grad is not None])
        grads = grads / (self._one if self.scale is None else self.scale)
        decay, eps = group["weight_decay"], group["eps"]
        trust = update_rules.trust_ratios(weights, grads, coefficient=group["trust"], decay=decay, eps=eps)
        return torch.stack((trust, trust), dim=1)

    def fused_own(self, group: dict[str, Any], batch: Group) -> Tensor:
        """The trust ratios in two launches; torch would take a dozen, longer than the update itself."""
        if not group["adapts"] or self.norms is not norms_of:  # norms of pieces are summed over the processes
            return super().fused_own(group, batch)
        from falconet.numerics.kernels import fused_updates

        trust = fused_updates.Trust(coefficient=group["trust"], decay=group["weight_decay"], eps=group["eps"])
        scale = self._one if self.scale is None else self.scale
        return fused_updates.trust_ratios(batch, trust, scale=scale, tables=self._tables)

    def bind(self, arithmetic: Arithmetic, p: Tensor, *, own: Tensor, lr: Tensor) -> Arithmetic:  # noqa: ARG002
        return partial(arithmetic, rate=own[0] * lr)


class _RMSprop(HalfOptimizer):
    """RMSprop's constants, for both forms."""

    def __init__(
        self, params: ParamsT, *, lr: float, alpha: float, eps: float, momentum: float, rounding: Rounding | None
    ) -> None:
        defaults = {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum, "weight_decay": 0.0}
        super().__init__(params, defaults, rounding=rounding)


class HalfRMSpropTF(_RMSprop):
    """TensorFlow's RMSprop: averages start at 1, eps is inside the root, the rate inside the momentum."""

    counts_updates = True

    def slots(self, group: dict[str, Any]) -> dict[str, float]:
        return {"square_avg": 1.0} | ({"momentum_buffer": 0.0} if group["momentum"] else {})

    def rule(self, group: dict[str, Any]) -> tuple[str, Arithmetic, tuple[float, ...]]:
        alpha, eps, decay, momentum = (group[name] for name in ("alpha", "eps", "weight_decay", "momentum"))
        constants = (decay, 1.0 - alpha, eps)
        if not momentum:
            return "rmsprop", partial(update_rules.rmsprop, alpha=alpha, decay=decay, eps=eps), constants
        plain = partial(update_rules.momentum_rmsprop, alpha=alpha, momentum=momentum, decay=decay, eps=eps)
        return "momentum_rmsprop", plain, (*constants, momentum)


class HalfRMSprop(_RMSprop):
    """Torch's RMSprop: averages start at 0, eps is outside the root, the rate outside the momentum.

    The root of the average is stored, because squares of gradients underflow in fp16.
    """

    def slots(self, group: dict[str, Any]) -> dict[str, float]:
        return {"root_square_avg": 0.0} | ({"momentum_buffer": 0.0} if group["momentum"] else {})

    def rule(self, group: dict[str, Any]) -> tuple[str, Arithmetic, tuple[float, ...]]:
        alpha, eps, decay, momentum = (group[name] for name in ("alpha", "eps", "weight_decay", "momentum"))
        constants = (decay, alpha, 1.0 - alpha, eps)
        plain = partial(_rmsprop, alpha=alpha, eps=eps, decay=decay)
        if not momentum:
            return "root_rmsprop", partial(plain, rule=update_rules.root_rmsprop), constants
        form = partial(update_rules.momentum_root_rmsprop, momentum=momentum)
        return "momentum_root_rmsprop", partial(plain, rule=form), (*constants, momentum)

    def bind(self, arithmetic: Arithmetic, p: Tensor, *, own: Tensor, lr: Tensor) -> Arithmetic:  # noqa: ARG002
        return partial(arithmetic, lr=lr, smallest=_smallest(p))


class HalfAdamW(HalfOptimizer):
    """AdamW; the second moment is stored as its root, because squares of gradients underflow in fp16."""

    counts_updates = True

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        eps: float,
        rounding: Rounding | None,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, rounding=rounding)
        self._pairs: dict[tuple[float, float], Tensor] = {}

    def slots(self, group: dict[str, Any]) -> dict[str, float]:  # noqa: ARG002
        return {"exp_avg": 0.0, "root_exp_avg_sq": 0.0}

    def rule(self, group: dict[str, Any]) -> tuple[str, Arithmetic, tuple[float, ...]]:
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        plain = partial(_adamw, beta1=beta1, beta2=beta2, eps=eps, decay=decay)
        return "adamw", plain, (decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps)

    def own(self, group: dict[str, Any], params: Sequence[Tensor]) -> Tensor:
        """The bias corrections, 1 / (1 - beta1^updates) and 1 / sqrt(1 - beta2^updates)."""
        steps = torch.stack([self.state[p]["step"] for p in params])
        betas, powers = self._numbers_of(group["betas"]), self._numbers_of((-1.0, -0.5))
        return (1.0 - betas ** steps[:, None]) ** powers  # few launches: each takes a tenth of the update's time

    def _numbers_of(self, values: tuple[float, float]) -> Tensor:
        """A tensor of these numbers, made on the device because the host would wait for a copy."""
        if values not in self._pairs:
            self._pairs[values] = torch.stack([torch.full_like(self._one, value) for value in values])
        return self._pairs[values]

    def bind(self, arithmetic: Arithmetic, p: Tensor, *, own: Tensor, lr: Tensor) -> Arithmetic:
        return partial(arithmetic, lr=lr, correction1=own[0], correction2=own[1], smallest=_smallest(p))


def _adamw(*tensors: Tensor, lr: Tensor, decay: float, **constants: Any) -> tuple[Tensor, ...]:
    return update_rules.adamw(*tensors, lr=lr, decay=decay, adam=update_rules.Adam(**constants))


def _rmsprop(*tensors: Tensor, rule: Arithmetic, lr: Tensor, decay: float, **constants: Any) -> tuple[Tensor, ...]:
    return rule(*tensors, lr=lr, decay=decay, mean=update_rules.MeanSquare(**constants))


def _smallest(p: Tensor) -> float:
    """The lower bound of a root that is not 0, so that it is not rounded to 0."""
    return SMALLEST if p.dtype == torch.float16 else 0.0


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """One Euclidean norm per tensor, in fp32: in fp16 it would overflow at 65504."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))


def _by_type(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    def types(p: Tensor) -> str:
        assert p.grad is not None
        return f"{p.dtype} {p.grad.dtype}"

    for _, same in groupby(sorted(params, key=types), key=types):  # a stable sort
        yield list(same)


def _pieces(*tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Matching slices along the first dimension, with the index of their first element."""
    whole = tensors[0]
    if whole.numel() <= PIECE or whole.ndim == 0:
        yield 0, list(tensors)
        return
    row = whole.numel() // whole.shape[0]
    rows = max(1, PIECE // row)
    for start in range(0, whole.shape[0], rows):
        yield start * row, [t[start : start + rows] for t in tensors]
