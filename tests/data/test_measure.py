"""Rates of the input pipeline: of the same loader as a run's."""

import threading
from itertools import islice

import numpy as np
import torch

import runs
from falconet.data.loader import Resources
from falconet.data.measure import Pipeline
from falconet.data.storage import ArraySource

IMAGES, BATCH = 12, 4


class Numbering:
    """Writes the number of each image into its pixels, and notes which epochs were begun."""

    size, rows, dtype = 2, BATCH, torch.uint8

    def __init__(self):
        self.epochs = set()

    def read(self, indices, *, epoch, out):
        self.epochs.add(epoch)
        out[:] = torch.from_numpy(indices.astype(np.uint8))[:, None, None, None]
        return np.ones(len(indices), np.bool_)


def pipeline(reader):
    source = ArraySource(np.zeros((IMAGES, 2, 2, 3), np.uint8), np.zeros(IMAGES, np.int64), ("a",))
    return Pipeline(source=source, reader=reader, resources=Resources(workers=1), micro_batch=BATCH, training=True)


def test_the_next_pass_of_a_training_is_read_ahead_and_has_every_image_once():
    reader = Numbering()
    batches = pipeline(reader).endless(reader)
    first = [*islice(batches, IMAGES // BATCH)]
    runs.wait_for(lambda: 1 in reader.epochs, "nothing of the next pass was read")
    second = [*islice(batches, IMAGES // BATCH)]
    batches.close()
    for found in (first, second):
        assert sorted(int(number) for batch in found for number in batch.images[:, 0, 0, 0]) == [*range(IMAGES)]
    assert not [each for each in threading.enumerate() if each.name.startswith("falconet-")]
