"""Predictors use few shapes, and give the scores of plain PyTorch whatever the padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from falconet.infer import predictor
from falconet.infer.predictor import Predictor, buckets
from served import pixels, small_classifier


@pytest.mark.parametrize(
    ("most", "expected"),
    {1: (1,), 2: (1, 2), 8: (1, 2, 4, 8), 12: (1, 2, 4, 8, 12), 90: (1, 2, 4, 8, 16, 32, 64, 90)}.items(),
)
def test_buckets_are_powers_of_two_and_the_largest(most, expected):
    assert buckets(most) == expected


def plain(classifier, images):
    """The scores in plain PyTorch: model((pixel / 255 - mean) / std)."""
    p = classifier.preprocessing
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (p.mean, p.std))
    with torch.no_grad():
        return classifier.model((torch.from_numpy(images).float() / 255 - mean) / std).numpy()


def test_each_portion_gets_the_scores_of_its_images():
    classifier = small_classifier()
    (lane,) = Predictor(classifier, max_batch=12).lanes()
    portions = [pixels(count, seed=count) for count in (1, 3, 5)]
    for answer, portion in zip(lane(portions), portions, strict=True):
        np.testing.assert_allclose(answer, plain(classifier, portion), rtol=1e-4, atol=1e-5)


def test_photos_and_tensors_may_be_mixed():
    """Decoded photos are channels last in memory, clients' tensors are not; both have the same scores."""
    (lane,) = Predictor(small_classifier(), max_batch=8).lanes()
    images = pixels(6)
    photos = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    (expected,) = lane([images])
    for found in (lane([photos]), lane([images[:2], photos[2:3], images[3:], photos[:1]])):
        assert np.array_equal(np.concatenate(found)[:6], expected)


def test_scores_are_not_overwritten_by_the_next_batch():
    (lane,) = Predictor(small_classifier(), max_batch=4).lanes()
    (first,) = lane([pixels(3, seed=1)])
    kept = first.copy()
    lane([pixels(4, seed=2)])
    assert np.array_equal(first, kept)


def test_the_model_sees_only_bucket_sizes():
    seen = set()

    class Seeing(Predictor):
        def logits(self, images):
            seen.add(len(images))
            return super().logits(images)

    (lane,) = Seeing(small_classifier(), max_batch=6).lanes()
    for count in range(1, 7):
        lane([pixels(count)])
    assert seen == {1, 2, 4, 6}


@pytest.mark.parametrize("precision", ["16.16", "bf16.bf16"])
def test_half_precision_scores_are_close(precision):
    """On a CPU fp16 is computed in fp32, and bf16 scores are widened because numpy has no bf16."""
    half = Predictor(small_classifier(precision), max_batch=4)
    assert half.dtype == np.float32
    found = half.logits(torch.from_numpy(pixels(4))).numpy()
    expected = plain(small_classifier(), pixels(4))
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_lanes_that_cannot_be_captured_compute_without(monkeypatch):
    """The failure of a capture is simulated, as there may be no CUDA here."""

    def fail(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    notes = []
    classifier = replace(small_classifier(), note=notes.append)
    expected = np.concatenate(Predictor(classifier, max_batch=4).lanes()[0]([pixels(3)]))
    monkeypatch.setattr(predictor, "Recording", fail)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    capturing = Predictor(classifier, max_batch=4)
    capturing.captured = True
    (lane,) = capturing.lanes()
    assert np.array_equal(np.concatenate(lane([pixels(3)])), expected)
    assert notes == ["note: batches are computed without CUDA graphs: operation not permitted when stream is capturing"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16.16", "32.32"])
def test_captured_lanes_match_uncaptured_ones(precision):
    device = torch.device("cuda", 0)
    small = small_classifier(precision)
    classifier = replace(small, device=device, model=small.model.to(device))
    answers = []
    for captured in (False, True):
        for lane in Predictor(classifier, max_batch=12, captured=captured).lanes():
            answers.append(np.concatenate(lane([pixels(2, seed=1), pixels(5, seed=2)])))
            again = np.concatenate(lane([pixels(2, seed=1), pixels(5, seed=2)]))
            assert np.array_equal(again, answers[-1])
    assert len(answers) == 4
    assert answers[0].dtype == (np.float16 if precision == "16.16" else np.float32)
    for answer in answers[1:]:
        np.testing.assert_allclose(answer.astype(np.float32), answers[0].astype(np.float32), rtol=2e-3, atol=2e-3)
