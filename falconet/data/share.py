"""A share of the training images, spread evenly over all of them."""

from dataclasses import replace

import numpy as np

from falconet.data.keyed import IntArray
from falconet.data.objects import Objects
from falconet.data.source import ArraySource, FileSource, Names, Places, Source, Splits
from falconet.errors import DataError


def reduced(splits: Splits, *, percentage: float) -> Splits:
    """The same with that much of the training images; sources are sorted by class, so each keeps its share."""
    count = len(splits.train)
    steps = np.arange(count + 1) * percentage // 100
    chosen = np.flatnonzero(np.diff(steps))
    if len(chosen) == count:
        return splits
    if not len(chosen):
        raise DataError(f"--dataset-percentage: {percentage:g} % of {count:,} training images is none of them")
    return replace(splits, train=_part(splits.train, chosen))


def _part(source: Source, chosen: IntArray) -> Source:
    labels = source.labels[chosen]
    if isinstance(source, ArraySource):
        return replace(source, images=source.images[chosen], labels=labels)
    objects = None if source.objects is None else Objects.of([source.objects[index] for index in chosen.tolist()])
    names = None if source.names is None else Names.of([source.names[index] for index in chosen.tolist()])
    if isinstance(source, FileSource):
        assert names is not None
        return replace(source, names=names, labels=labels, objects=objects)
    return replace(source, places=_places(source.places, chosen), names=names, labels=labels, objects=objects)


def _places(places: Places, chosen: IntArray) -> Places:
    return Places(
        shards=places.shards[chosen],
        begins=places.begins[chosen],
        sizes=places.sizes[chosen],
        checksums=None if places.checksums is None else places.checksums[chosen],
        skips=None if places.skips is None else places.skips[chosen],
        lengths=None if places.lengths is None else places.lengths[chosen],
    )
