"""Rates of the input pipeline, measured with a run's own loader."""

import threading
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

import runs
from falconet.data import measure, native
from falconet.data.loader import Resources
from falconet.data.measure import Pipeline
from falconet.data.storage import ArraySource, FileSource

IMAGES, BATCH = 12, 4


class Numbering:
    """A reader that writes each image's number into its pixels, and notes which epochs began."""

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


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a").mkdir()
    names = [f"{number}.jpg" for number in range(IMAGES)]
    for name in names:
        Image.new("RGB", (16, 16)).save(tmp_path / "a" / name)
    return FileSource.of(tmp_path, class_names=("a",), names=names, labels=np.zeros(IMAGES, np.int64))


@pytest.mark.parametrize("library", ["native", "none"])
def test_files_are_read_from_the_disk_each_once(files, monkeypatch, library):
    if library == "none":
        monkeypatch.setattr(native, "library", lambda: None)
    files.path(3).unlink()  # a link that leads nowhere is passed over in the same way
    cold = measure.cold_reads(files, threads=2, seconds=60.0)
    assert sorted(cold.read.tolist()) == [*range(IMAGES)]
    assert cold.images_per_second > 0


def test_files_that_were_not_read_in_time_do_not_count_as_in_memory(files, monkeypatch):
    read = []
    monkeypatch.setattr(measure, "_only_read", lambda source: read.append)
    cold = measure.cold_reads(files, threads=2, seconds=0.0)
    assert 1 <= len(cold.read) <= 2  # a file is dropped in any case, and each thread ends after its first
    assert sorted(cold.read.tolist()) == sorted(int(index) for (index,) in read)
