"""Captured functions: which calls are captured, what a replay reads and returns, and what happens without capture."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from falconet.numerics import cuda_graphs
from falconet.numerics.cuda_graphs import Captured, captured

CPU = torch.device("cpu")


class Tape:
    """Stands in for a CUDA graph: a replay computes from the recorded input's memory into that of its output."""

    made = 0

    def __init__(self, compute, inputs):
        Tape.made += 1
        self.inputs, self._compute = inputs, compute
        self._outputs = compute(inputs)

    def replay(self):
        self._outputs.copy_(self._compute(self.inputs))
        return self._outputs


@pytest.fixture(autouse=True)
def fresh():
    Tape.made = 0


def squares(record=Tape, note=print):
    return Captured(lambda images: images.float() ** 2, CPU, note=note, record=record)


def batch(value, count=3):
    return torch.full((count, 2), value, dtype=torch.uint8)


def test_a_shape_is_captured_when_it_comes_again():
    score = squares()
    score(batch(1))
    assert Tape.made == 0
    for value in range(5):
        assert torch.equal(score(batch(value)), batch(value).float() ** 2)
    assert Tape.made == 1


def test_a_short_last_batch_is_computed_as_it_is():
    score = squares()
    for value in range(4):
        score(batch(value))
    assert torch.equal(score(batch(7, count=1)), torch.full((1, 2), 49.0))
    assert Tape.made == 1


def test_results_are_not_overwritten_by_the_next_replay():
    score = squares()
    found = [score(batch(value)) for value in range(4)]
    assert [int(each[0, 0]) for each in found] == [0, 1, 4, 9]


def test_a_batch_is_not_kept_and_may_be_overwritten():
    score, memory = squares(), batch(2)
    for _ in range(3):
        score(memory)
    memory.fill_(3)
    assert int(score(memory)[0, 0]) == 9


def test_shapes_formats_and_memory_orders_have_graphs_of_their_own():
    score = squares()
    image = torch.ones(2, 3, 4, 4)
    for each in (image, image.half(), image.contiguous(memory_format=torch.channels_last), image[:1]):
        for _ in range(3):
            assert torch.equal(score(each), each.float())
    assert Tape.made == 4


def test_prepared_shapes_are_replayed_at_once():
    score = squares()
    score.prepare(batch(0))
    assert Tape.made == 1
    assert int(score(batch(3))[0, 0]) == 9
    assert Tape.made == 1


def test_the_number_of_graphs_is_bounded():
    score = squares()
    for count in range(1, 60):
        for _ in range(3):
            score(batch(1, count=count))
    assert Tape.made == cuda_graphs.MOST


def test_a_failed_capture_is_noted_once_and_everything_is_computed_without():
    def fail(compute, inputs):
        raise RuntimeError("operation not permitted when stream is capturing\nmore about it")

    notes = []
    score = squares(record=fail, note=notes.append)
    for value in range(4):
        assert int(score(batch(value))[0, 0]) == value**2
        assert int(score(batch(value, count=5))[0, 0]) == value**2
    assert notes == ["note: batches are computed without CUDA graphs: operation not permitted when stream is capturing"]


def test_graphs_are_freed_with_their_last_user_not_at_the_next_garbage_collection():
    gc.disable()
    try:
        score = squares(record=None)
        alive = weakref.ref(score)
        del score
        assert alive() is None
    finally:
        gc.enable()


def test_threads_get_the_results_of_their_own_batches():
    class SlowTape(Tape):
        def replay(self):
            time.sleep(0.01)  # for another thread to write its batch
            return super().replay()

    score = squares(record=SlowTape)
    score.prepare(batch(0))
    with ThreadPoolExecutor(4) as threads:
        found = [int(each[0, 0]) for each in threads.map(lambda value: score(batch(value)), range(8))]
    assert found == [value**2 for value in range(8)]


def test_a_cpu_has_nothing_to_capture():
    def compute(images):
        return images

    assert captured(compute, CPU, note=print) is compute
    assert captured(compute, torch.device("cuda", 0), note=print, capture=False) is compute
