"""The order of an epoch's images: each once, or every class equally often."""

import threading
from collections.abc import Callable

import numpy as np

from falconet.data import keyed
from falconet.data.keyed import IntArray, Purpose

COPY_BITS = 32  # for an image's number in an order; the bits above say how often it came earlier in the epoch
Order = Callable[[int], IntArray]  # epoch -> as many numbers as there are images


def shuffled(images: int, *, seed: int) -> Order:
    """Every image once per epoch."""
    return lambda epoch: keyed.permutation(images, seed=seed, epoch=epoch)


class OrderAhead:
    """Draws the next epoch's order in a thread while this one is used: 0.1 s for a million images."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._drawing: threading.Thread | None = None
        self._drawn: dict[int, IntArray] = {}

    def __call__(self, epoch: int) -> IntArray:
        self.close()
        drawn = self._drawn.pop(epoch) if epoch in self._drawn else self._order(epoch)
        self._drawn.clear()
        self._drawing = threading.Thread(target=self._draw, args=(epoch + 1,), name="falconet-order")
        self._drawing.start()
        return drawn

    def close(self) -> None:
        """Wait for the thread."""
        if self._drawing is not None:
            self._drawing.join()
            self._drawing = None

    def _draw(self, epoch: int) -> None:
        self._drawn[epoch] = self._order(epoch)


def balanced(labels: IntArray, *, seed: int) -> Order:
    """An order with an equal share of every class in each epoch; images of small classes are repeated.

    A class shows all of its images before it repeats one, and continues in the next epoch where it stopped in this one.
    The remainder after equal shares goes to different classes in every epoch.
    """
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    images, count = len(labels), len(classes)

    def epoch_order(epoch: int) -> IntArray:
        ends = [[_share(total * images, count, number) for total in (epoch, epoch + 1)] for number in range(count)]
        drawn = [
            _drawn(members, first=first, end=end, seed=seed)
            for members, (first, end) in zip(classes, ends, strict=True)
        ]
        return np.concatenate(drawn)[keyed.permutation(images, seed=seed, epoch=epoch)]

    return epoch_order


def _drawn(members: IntArray, *, first: int, end: int, seed: int) -> IntArray:
    """The images of a class at draws `first` to `end`, counted over the whole run."""
    rounds, places = np.divmod(np.arange(first, end, dtype=np.int64), len(members))
    picked = np.empty(end - first, dtype=np.int64)
    for turn in np.unique(rounds).tolist():  # each shows every image of the class once
        words = keyed.words(seed=seed, epoch=turn, indices=members, purpose=Purpose.BALANCE, draws=1)
        order, now = np.argsort(words[:, 0], kind="stable"), rounds == turn
        picked[now] = members[order[places[now]]]
    return picked + (_occurrences(picked) << COPY_BITS)


def _share(total: int, classes: int, number: int) -> int:
    """How many of the first `total` draws belong to class `number`, if classes take turns."""
    return total // classes + (number < total % classes)


def _occurrences(values: IntArray) -> IntArray:
    """How often each value came earlier."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.searchsorted(ordered, ordered)
    counts = np.empty_like(values)
    counts[order] = np.arange(len(values)) - first
    return counts


def class_weights(labels: IntArray, classes: int) -> tuple[float, ...]:
    """Loss weights, inverse to the images of each class, with a mean of 1 over all images; 0 for an empty class."""
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    present = np.count_nonzero(counts)
    return tuple(float(counts.sum() / (present * n)) if n else 0.0 for n in counts.tolist())
