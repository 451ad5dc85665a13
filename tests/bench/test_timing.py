"""Timing predictions: how often, what is timed, and on which device."""

from types import SimpleNamespace

import pytest
import torch

from falconet.bench import timing
from falconet.bench.timing import measure_resident, measure_with_copy, try_out
from falconet.data.buffers import Batch
from falconet.parallel.world import ALONE, World


def batches(count, device="cpu"):
    pin = device == "cuda"
    images = [torch.full((4, 3, 8, 8), number, dtype=torch.uint8) for number in range(count)]
    return [Batch(image.pin_memory() if pin else image, torch.zeros(4, dtype=torch.int64), None) for image in images]


@pytest.mark.parametrize("measure", [measure_resident, measure_with_copy])
def test_every_batch_is_timed_in_turn(measure, monkeypatch):
    seen, now = [], [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def predict(images):
        seen.append(int(images[0, 0, 0, 0]))
        now[0] += 8.0 if len(seen) == 3 else 1.0
        return images.float().mean((2, 3))

    series = measure(predict, batches(2), count=5, world=ALONE)
    assert seen == [0, 1, 0, 1, 0]
    assert series.latency == series.throughput == [1, 1, 8, 1, 1]  # on a CPU batches cannot overlap


def test_predictions_record_no_gradients():
    weight = torch.ones(3, requires_grad=True)
    kept = []

    def predict(images):
        kept.append(images.float().mean((2, 3)) * weight)
        return kept[-1]

    measure_resident(predict, batches(1), count=2, world=ALONE)
    assert not any(one.requires_grad for one in kept)


def test_a_trial_times_the_second_batch_and_counts_labels_that_are_known(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    waits = iter([9.0, 2.0])

    def predict(images):
        now[0] += next(waits)
        return torch.eye(4)[: len(images)]  # classes 0 to 3

    batch = Batch(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 3, 1, -1]), None)
    found = try_out(predict, batch, world=ALONE)
    assert (found.seconds, round(found.accuracy, 3)) == (2.0, 33.333)


@pytest.mark.gpu
@pytest.mark.parametrize("measured", [measure_with_copy, measure_resident])
def test_throughput_does_not_wait_for_each_batch_but_latency_does(measured):
    images = [
        Batch(torch.zeros((8, 3, 64, 64), dtype=torch.uint8).pin_memory(), torch.zeros(8, dtype=torch.int64), None)
        for _ in range(2)
    ]
    ends: list[torch.cuda.Event] = []
    behind = []

    def predict(one):
        behind.append(not all(end.query() for end in ends))
        scores = one.float().mean((2, 3))
        torch.cuda._sleep(50_000_000)  # cycles, some 30 ms
        ends.append(torch.cuda.Event())
        ends[-1].record()
        return scores

    measured(predict, images, count=5, world=World(device=torch.device("cuda")))
    assert not any(behind[:5])
    assert any(behind[5:])
