"""The feed: the same batches, on the device."""

import pytest
import torch

from falconet.data.buffers import Ring, Shape
from falconet.data.loader import Batch, Feed, singly
from falconet.data.mixing import Mix


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


def test_on_the_cpu_the_tensors_pass_through_as_they_are():
    given = list(updates(3))
    for update, fed in zip(given, Feed(given, device=torch.device("cpu")), strict=True):
        for batch, moved in zip(update, fed, strict=True):
            assert moved.images is batch.images
            assert moved.labels is batch.labels
            assert (moved.mix is None) == (batch.mix is None)
            assert batch.mix is None or moved.mix.box is batch.mix.box


def test_single_batches_pass_through_too():
    given = [batch for update in updates(3) for batch in update]
    passed = list(singly(given, device=torch.device("cpu")))
    assert len(passed) == 6
    assert all(batch.images is other.images for batch, other in zip(given, passed, strict=True))


def test_on_the_cpu_nothing_is_taken_before_it_is_asked_for():
    taken = []
    source = (taken.append(number) or update for number, update in enumerate(updates(5)))
    feed = iter(Feed(source, device=torch.device("cpu")))
    next(feed)
    assert taken == [0]


@pytest.mark.gpu
def test_on_cuda_pinned_memory_goes_round_and_every_batch_arrives_whole():
    device, ring, wanted, sums = torch.device("cuda"), Ring(pin=True), [], []

    def batches():
        for number in range(200):
            room = ring(Shape(4, 128))
            assert room.images.is_pinned()
            room.images.fill_(number)
            room.labels.fill_(number)
            wanted.append(number * 4 * 128 * 128 * 3)
            yield Batch(room.images.permute(0, 3, 1, 2), room.labels, None)

    for batch in singly(batches(), device=device, ring=ring):
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        sums.append(batch.images.long().sum())
    assert torch.stack(sums).tolist() == wanted
    assert ring.allocated <= 4


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 40])
def test_on_cuda_every_update_arrives_whole_while_others_compute(count):
    device = torch.device("cuda")
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for update in Feed(updates(count, pin=True), device=device):
            for _ in range(10):
                busy = busy @ busy * 1e-3  # keeps the consumer's stream behind the copies
            sums += [torch.stack((batch.images.sum(), batch.labels.sum())) for batch in update]
            sums.append(torch.stack((update[0].mix.box.sum(), update[0].mix.mixup.sum().long())))
            del update
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pixels = 2 * 3 * 256 * 256
    wanted = [pair for n in range(count) for pair in ([pixels * n, n - 1], [pixels * n, n - 1], [n + 2, 1])]
    assert [pair.tolist() for pair in sums] == wanted
