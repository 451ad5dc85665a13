"""Captured predictions on a GPU have the bits of uncaptured ones, in every batch size, thread and validation."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from falconet.data.buffers import Batch
from falconet.data.preprocessing import normaliser
from falconet.evaluation.evaluate import evaluate
from falconet.infer.predictor import Predictor
from falconet.numerics.cuda_graphs import Captured
from falconet.numerics.precision import REGIMES
from falconet.parallel.world import World
from served import CLASSES, pixels, small_classifier

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
PRECISIONS = ["16.16", "16.32", "bf16.32", "32.32"]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Use deterministic kernels: those chosen by timing may differ from call to call."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def classifier_on_gpu(precision):
    small = small_classifier()
    return replace(small, device=GPU, regime=REGIMES[precision], model=REGIMES[precision].prepare(small.model, GPU))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_scores_equal_uncaptured_ones_bit_for_bit_for_each_batch_size(precision):
    classifier = classifier_on_gpu(precision)
    lanes = [Predictor(classifier, max_batch=16, captured=captured).lanes()[0] for captured in (False, True)]
    for size in range(1, 17):
        plain, captured = (np.concatenate(lane([pixels(size, seed=size)])) for lane in lanes)
        assert np.array_equal(plain, captured), size


@pytest.mark.parametrize("precision", PRECISIONS)
def test_photos_have_the_same_scores_with_and_without_capture(precision):
    score = classifier_on_gpu(precision).by_pixels
    for size in (8, 8, 8, 5, 8, 5, 5):
        images = torch.from_numpy(pixels(size, seed=size)).contiguous(memory_format=torch.channels_last)
        assert torch.equal(score(images), score.uncaptured(images))


def batches(count, last):
    for number in range(count):
        size = last if number == count - 1 else 8
        images = torch.from_numpy(pixels(size, seed=number)).contiguous(memory_format=torch.channels_last)
        labels = torch.arange(size) % CLASSES
        yield Batch(images.pin_memory(), labels.pin_memory(), None)


def test_a_captured_validation_counts_what_an_uncaptured_one_does():
    about = classifier_on_gpu("16.16")
    how = {
        "normalise": normaliser(about.preprocessing).to(GPU),
        "regime": about.regime,
        "world": World(device=GPU),
    }
    seen = [[], []]
    short = [
        evaluate(about.folding().model, [one], **how, observe=lambda y, _: seen[0].append(y))
        for one in batches(6, last=3)
    ]
    whole = evaluate(about.folding().model, batches(6, last=3), **how, observe=lambda y, _: seen[1].append(y))
    assert torch.equal(torch.cat(seen[0]), torch.cat(seen[1]))
    assert (whole.images, whole.top1) == (43, sum(each.top1 for each in short))


def test_lanes_in_several_threads_do_not_disturb_each_other():
    predictor = Predictor(classifier_on_gpu("16.16"), max_batch=8)
    lanes = predictor.lanes()
    expected = [np.concatenate(lanes[0]([pixels(5, seed=seed)])) for seed in range(4)]
    wrong = []

    def work(lane):
        for turn in range(100):
            if not np.array_equal(np.concatenate(lane([pixels(5, seed=turn % 4)])), expected[turn % 4]):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(lanes) > 1
    assert not wrong


def test_memory_does_not_grow_over_batches_and_validations():
    about = classifier_on_gpu("16.16")
    how = {"normalise": normaliser(about.preprocessing).to(GPU), "regime": about.regime, "world": World(device=GPU)}

    def used():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    for _ in range(3):
        evaluate(about.folding().model, batches(5, last=3), **how)
    before = used()
    for _ in range(10):
        evaluate(about.folding().model, batches(5, last=3), **how)
    assert used() <= before


def test_a_function_that_waits_for_the_device_goes_on_without_capture():
    notes = []
    score = Captured(lambda images: images.float() * float(images.sum()), GPU, note=notes.append)
    for value in range(1, 5):
        images = torch.full((2,), value, dtype=torch.uint8)
        assert torch.equal(score(images).cpu(), torch.full((2,), 2.0 * value * value))
    assert len(notes) == 1
    assert torch.ones(3, device=GPU).sum().item() == 3  # the device still works
