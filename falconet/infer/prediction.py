"""Predictions: the classes of an image with their probabilities, the most probable first."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Activation = Literal["softmax", "sigmoid"]  # turns scores into probabilities


class Guess(NamedTuple):
    """A class and its probability."""

    label: str
    probability: float  # 0 to 1

    def __str__(self) -> str:
        return f"{self.label} {100 * self.probability:.1f} %"


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """What a model makes of one image."""

    top: tuple[Guess, ...]  # the most probable first
    name: str = ""  # the file's name, if it was a file
    probabilities: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # of every class, in order
    labels: tuple[str, ...] = ()  # the most probable class; with several labels per photo, those of 0.5 or more

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.top[0].label

    @property
    def probability(self) -> float:
        """The probability of the most probable class, 0 to 1."""
        return self.top[0].probability

    def to_json(self, *, several: bool) -> dict[str, object]:
        """The prediction as JSON, without its name; `several`: photos have any number of labels, which are listed."""
        return {
            **({"labels": list(self.labels)} if several else {}),
            "label": self.label,
            "probability": self.probability,
            "top": [guess._asdict() for guess in self.top],
        }

    def __repr__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        return f"<{name}{', '.join(map(str, self.top))}>"


def predicted(
    logits: Tensor, class_names: tuple[str, ...], *, top: int, several: bool = False, name: str = ""
) -> Prediction:
    """The prediction of one row of scores; equal probabilities keep the order of the classes.

    `several`: an image has any number of the classes. Each class then has a probability of its own, and all those of
    0.5 or more are among the `top`, however many there are.
    """
    scores = logits.double()
    probabilities = (scores.sigmoid() if several else scores.softmax(dim=0)).numpy()
    present = int((scores >= 0).sum()) if several else 1
    order = np.argsort(-probabilities, kind="stable")[: max(top, present)].tolist()
    guesses = tuple(Guess(class_names[number], float(probabilities[number])) for number in order)
    return Prediction(guesses, name, probabilities, tuple(guess.label for guess in guesses[:present]))
