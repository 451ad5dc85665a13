"""Batches in memory: the form of their rows, buffers that are reused, and the copy to the device."""

import gc
import weakref

import numpy as np
import pytest
import torch

from falconet.data import crops
from falconet.data.buffers import Batch, Buffers, PixelRows, StandardRows, ValueRows, on_device, one_ahead
from falconet.data.crops import Crops
from falconet.data.mixing import Mix
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Normalise, Preprocessing, normaliser
from falconet.data.readers import ArrayReader
from falconet.data.storage import ArraySource
from falconet.errors import DataError

PREPROCESSING = Preprocessing(image_size=16, resize=18, mean=IMAGENET_MEAN, std=IMAGENET_STD)
CPU = torch.device("cpu")


class Levels:
    """A reader whose image n contains every level, shifted by n; image 2 cannot be read."""

    size, rows = 16, 4

    def read(self, indices, *, epoch, out):
        out[:] = (np.arange(16 * 16 * 3).reshape(16, 16, 3) + indices[:, None, None, None] + epoch) % 256
        return indices != 2


def filled(reader, count=6):
    images = torch.empty((count, 16, 16, 3), dtype=reader.dtype)
    return images, reader.read(np.arange(count), epoch=1, out=images)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("preprocessing", [PREPROCESSING, PREPROCESSING.unnormalised], ids=["normalised", "as is"])
def test_values_made_on_the_host_equal_the_devices_bit_for_bit(preprocessing, dtype):
    normalise = Normalise(preprocessing, dtype=dtype)
    pixels, read = filled(PixelRows(Levels()))
    values, also_read = filled(ValueRows(Levels(), normalise))
    expected = normalise(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    assert values.dtype == dtype
    assert torch.equal(values, expected)
    assert read.tolist() == also_read.tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unnormalised_values_are_the_pixels_in_every_format(dtype):
    values, _ = filled(ValueRows(Levels(), Normalise(PREPROCESSING.unnormalised, dtype=dtype)))
    pixels, _ = filled(PixelRows(Levels()))
    assert torch.equal(values.double(), pixels.double())


def test_a_part_may_be_smaller_than_the_previous_one():
    reader = ValueRows(Levels(), Normalise(PREPROCESSING))
    many, _ = filled(reader, 5)
    few, _ = filled(reader, 2)
    assert torch.equal(few, many[:2])


def test_the_rows_of_a_part_are_the_readers_unless_given():
    assert PixelRows(Levels()).rows == 4
    assert PixelRows(Levels(), rows=7).rows == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_images_in_memory_are_standardised_before_they_are_shifted(dtype):
    images = np.random.default_rng(2).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    source = ArraySource(images, np.arange(12) % 3, ("a", "b", "c"))
    whole = Preprocessing(image_size=16, resize=16, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    reader = ArrayReader(source, crops=Crops(preprocessing=whole, augment="shift-flip", seed=3))
    indices, read = np.array([4, 0, 11, 7, 2]), torch.empty((5, 16, 16, 3), dtype=dtype)
    assert StandardRows(reader, dtype).read(indices, epoch=2, out=read).all()

    double = images.astype(np.float64)
    standard = (double - double.mean((1, 2, 3), keepdims=True)) / double.std((1, 2, 3), keepdims=True)
    moves = crops.shifts(indices, side=16, seed=3, epoch=2).tolist()
    mirrored = crops.flips("shift-flip", indices, seed=3, epoch=2).tolist()
    assert True in mirrored
    for found, index, (down, right), flip in zip(read, indices, moves, mirrored, strict=True):
        padded = np.pad(standard[index], ((2, 2), (2, 2), (0, 0)))[2 - down : 18 - down, 2 - right : 18 - right]
        expected = torch.from_numpy(np.ascontiguousarray(padded[:, ::-1] if flip else padded))
        accuracy = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=accuracy, atol=2e-6)
        assert found.count_nonzero() < found.numel() or (down, right) == (0, 0)


def test_photos_are_standardised_after_they_are_read():
    pixels, read = filled(PixelRows(Levels()))
    values, also_read = filled(StandardRows(Levels(), torch.float32))
    expected = normaliser(PREPROCESSING.by_image)(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    assert read.tolist() == also_read.tolist()


class Copy:
    """An event that notes whether it has been waited for."""

    def __init__(self):
        self.waited = False

    def synchronize(self):
        self.waited = True


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("images", [1, 3, 8])
def test_the_tensors_of_a_batch_do_not_overlap(images, dtype):
    batch = Buffers().batch(images, size=5, dtype=dtype)
    tensors = [batch.images, batch.labels, batch.mix.mixup, batch.mix.box]
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert [tuple(tensor.shape) for tensor in tensors] == [(images, 3, 5, 5), (images,), (images,), (4,)]
    assert [tensor.dtype for tensor in tensors] == [dtype, torch.int64, torch.float32, torch.int64]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [2], [3], [4]]


def test_a_buffer_is_used_again_only_after_its_copy():
    buffers = Buffers()
    first, second = buffers.batch(2, size=4), buffers.batch(2, size=4)
    assert first.images.data_ptr() != second.images.data_ptr()
    copied = Copy()
    buffers.give_back(first, copied=copied)
    assert not copied.waited
    again = buffers.batch(2, size=4)
    assert copied.waited
    assert again.images.data_ptr() == first.images.data_ptr()
    assert buffers.allocated == 2


def test_a_thousand_batches_take_as_many_buffers_as_are_in_use_at_once():
    buffers, out = Buffers(), []
    for _ in range(1000):
        out.append(buffers.batch(2, size=4))
        if len(out) == 5:
            buffers.give_back(out.pop(0), copied=Copy())
    assert buffers.allocated == 5


def test_buffers_of_another_size_are_not_used_again():
    buffers = Buffers()
    buffers.give_back(buffers.batch(2, size=4), copied=Copy())
    assert buffers.batch(3, size=4).images.shape == (3, 3, 4, 4)
    assert buffers.allocated == 2


def test_a_buffer_that_is_not_given_back_is_freed():
    batch = Buffers().batch(2, size=4)
    alive = weakref.ref(batch.images)
    del batch
    gc.collect()
    assert alive() is None


def updates(count, *, pin=False):
    for number in range(count):
        images = torch.full((2, 3, 256, 256), number % 256, dtype=torch.uint8)
        labels = torch.tensor([number, -1])
        mix = Mix(torch.tensor([0.5, 1.0]), torch.tensor([0, number, 0, 2]))
        batches = [Batch(images, labels, mix), Batch(images, labels, None)]
        if pin:
            batches[0] = Batch(images.pin_memory(), labels.pin_memory(), Mix(*(part.pin_memory() for part in mix)))
            batches[1] = Batch(images.pin_memory(), labels.pin_memory(), None)
        yield batches


def test_on_the_cpu_tensors_pass_through_unchanged():
    given = list(updates(3))
    for update, fed in zip(given, on_device(given, device=CPU), strict=True):
        for batch, moved in zip(update, fed, strict=True):
            assert moved.images is batch.images
            assert moved.labels is batch.labels
            assert (moved.mix is None) == (batch.mix is None)
            assert batch.mix is None or moved.mix.box is batch.mix.box


def test_on_the_cpu_nothing_is_read_ahead():
    taken = []
    source = (taken.append(number) or update for number, update in enumerate(updates(5)))
    next(on_device(source, device=CPU))
    assert taken == [0]


@pytest.mark.gpu
def test_on_cuda_pinned_buffers_are_used_again_and_batches_arrive_whole():
    buffers, expected, sums = Buffers(pin=True), [], []

    def batches():
        for number in range(200):
            batch = buffers.batch(4, size=128)
            assert batch.images.is_pinned()
            batch.images.fill_(number)
            batch.labels.fill_(number)
            expected.append(number * 4 * 128 * 128 * 3)
            yield (batch._replace(mix=None),)

    for (batch,) in on_device(batches(), device=torch.device("cuda"), buffers=buffers):
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        sums.append(batch.images.long().sum())
    assert torch.stack(sums).tolist() == expected
    assert buffers.allocated <= 4


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 40])
def test_on_cuda_every_update_arrives_whole_while_others_compute(count):
    device = torch.device("cuda")
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for update in on_device(updates(count, pin=True), device=device):
            for _ in range(10):
                busy = busy @ busy * 1e-3  # keeps the consumer's stream behind the copies
            sums += [torch.stack((batch.images.sum(), batch.labels.sum())) for batch in update]
            sums.append(torch.stack((update[0].mix.box.sum(), update[0].mix.mixup.sum().long())))
            del update
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pixels = 2 * 3 * 256 * 256
    expected = [pair for n in range(count) for pair in ([pixels * n, n - 1], [pixels * n, n - 1], [n + 2, 1])]
    assert [pair.tolist() for pair in sums] == expected


def test_an_update_that_cannot_be_read_costs_none_before_it():
    def read():
        yield from (1, 2, 3)
        raise DataError("cannot be decoded")

    ahead = one_ahead(read())
    assert [next(ahead) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(DataError, match="cannot be decoded"):
        next(ahead)
    assert list(one_ahead([])) == []
    assert list(one_ahead("ab")) == ["a", "b"]
