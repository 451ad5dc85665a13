"""Learning-rate schedules as closed forms of the update."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate that depends on the update alone, so that a restored run needs no scheduler state."""

    kind: Literal["step", "cosine", "exponential", "polynomial"]
    peak: float  # the highest learning rate
    epochs: float
    updates_per_epoch: int
    warmup_epochs: float = 0.0
    changes_per_epoch: float | Fraction = 0.0  # how often the rate changes after warm-up; 0: at every update
    decay: float = 0.5  # factor of each drop (step) or change (exponential)
    drops: tuple[float, ...] = ()  # step: the epochs of the drops
    factors: tuple[float, ...] = ()  # step: one for each drop, where they are not all `decay`
    power: float = 2.0  # polynomial
    end_ratio: float = 1e-5  # polynomial: last rate / peak

    def __post_init__(self) -> None:
        assert self.updates_per_epoch > 0
        assert self.changes_per_epoch >= 0
        assert len(self.factors) in (0, len(self.drops))

    def lr(self, update: int) -> float:
        """The learning rate of update `update`, counted from 0."""
        progress = Fraction(update, self.updates_per_epoch)  # epochs
        # Warm-up is continuous whatever the frequency of changes, so the very first update has rate 0.
        ramp = float(progress / _exact(self.warmup_epochs)) if self.warms_up(update) else 1.0
        return self.peak * ramp * self._factor(math.floor(progress * self._frequency))

    def warms_up(self, update: int) -> bool:
        """Whether update `update`, counted from 0, belongs to the warm-up."""
        return Fraction(update, self.updates_per_epoch) < _exact(self.warmup_epochs)

    def describe(self) -> str:
        """One line for the plan."""
        over = f"over {_epochs(self.epochs)}"
        match self.kind:
            case "step":
                line = f"step from {self.peak:g}"
                for factor, drops in self._alike():
                    line += f", times {factor:g} at epoch {', '.join(f'{drop:g}' for drop in drops)}"
            case "cosine":
                line = f"cosine from {self.peak:g} to 0 {over}"
            case "exponential":
                line = f"exponential from {self.peak:g}, times {self.decay:g} {self._every()}"
            case "polynomial":
                line = f"polynomial of power {self.power:g} from {self.peak:g} to {self.peak * self.end_ratio:g} {over}"
        if self.changes_per_epoch and self.kind != "exponential":
            line += f", changing {self._every()}"
        if self.warmup_epochs:
            line += f", warm-up {_epochs(self.warmup_epochs)}"
        return line

    @property
    def _frequency(self) -> Fraction:
        """Changes per epoch; exact, because a floor of rounded products would move changes by one update."""
        return _exact(self.changes_per_epoch) or Fraction(self.updates_per_epoch)

    def _factor(self, changes: int) -> float:
        """The fraction of the peak after this many changes."""
        match self.kind:
            case "step":
                passed = [changes >= _exact(drop) * self._frequency for drop in self.drops]
                if self.factors:
                    return math.prod(
                        factor for factor, is_passed in zip(self.factors, passed, strict=True) if is_passed
                    )
                return math.pow(self.decay, sum(passed))
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * self._share(changes, after=0.0)))
            case "exponential":
                return math.pow(self.decay, changes)
            case "polynomial":  # decays only after the warm-up, which therefore ends at the peak
                left = math.pow(1.0 - self._share(changes, after=self.warmup_epochs), self.power)
                return (1.0 - self.end_ratio) * left + self.end_ratio

    def _alike(self) -> list[tuple[float, list[float]]]:
        """The step schedule's factors with the epochs of their drops, in runs of equal factors."""
        factors = self.factors or (self.decay,) * len(self.drops)
        pairs = groupby(zip(factors, self.drops, strict=True), key=lambda pair: pair[0])
        return [(factor, [drop for _, drop in group]) for factor, group in pairs]

    def _share(self, changes: int, *, after: float) -> float:
        """The fraction of the epochs after `after` that had passed at the last change, 0 to 1."""
        passed = changes / self._frequency - _exact(after)
        whole = _exact(self.epochs) - _exact(after)
        if passed <= 0:
            return 0.0
        return float(passed / whole) if passed < whole else 1.0

    def _every(self) -> str:
        if not self.changes_per_epoch:
            return "every update"
        if self.changes_per_epoch > 1:
            return f"{float(self.changes_per_epoch):g} times per epoch"
        return "every epoch" if self.changes_per_epoch == 1 else f"every {1 / float(self.changes_per_epoch):.3g} epochs"


def drops_at(shares: Iterable[float], updates: int, updates_per_epoch: int) -> list[float]:
    """Fractions of the training as epochs, each half an update before the first update with the lower rate."""
    return [(math.ceil(_exact(share) * updates) - 0.5) / updates_per_epoch for share in shares]


def _exact(number: float | Fraction) -> Fraction:
    """The decimal as written: 0.424 is 53/125, not the nearest double. A fraction is returned unchanged."""
    return Fraction(str(number))


def _epochs(number: float) -> str:
    return f"{number:g} epoch" if number == 1 else f"{number:g} epochs"
