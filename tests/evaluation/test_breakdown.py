"""Where a model is wrong: by class, by pairs, by confidence; compared with counting by hand."""

import io
import math

import numpy as np
import pytest
import torch

from falconet.data.storage import ArraySource
from falconet.evaluation.breakdown import BINS, Answers, Breakdown, Collected, Predictions
from falconet.evaluation.evaluate import count

NAMES = ("cat", "dog", "owl", "a class with a name that is far too long for a table")


def answers(labels, predicted, confidence=None):
    sure = np.full(len(labels), 0.9) if confidence is None else np.array(confidence)
    return Answers(
        np.array(labels, np.int32), np.array(predicted, np.int32), sure.astype(np.float32), np.arange(len(labels))
    )


def test_classes_and_confused_pairs_are_counted():
    found = Breakdown.of(answers([0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 0, 2]), NAMES)
    assert [found.accuracy(label) for label in range(4)] == [pytest.approx(100 / 3), 50.0, 100.0, None]
    assert [NAMES[label] for label in found.worst()] == ["cat", "dog", "owl"]  # the fourth has no images
    assert [vars(each) for each in found.confusions()] == [
        {"label": "cat", "predicted": "dog", "count": 2, "of": 3},
        {"label": "dog", "predicted": "cat", "count": 1, "of": 2},
    ]
    assert sorted(found.cells) == [(0, 0, 1), (0, 1, 2), (1, 0, 1), (1, 1, 1), (2, 2, 1)]


def test_a_random_confusion_matrix_equals_the_one_counted_by_hand():
    drawn = np.random.default_rng(0)
    labels, predicted = drawn.integers(0, 50, 2000), drawn.integers(0, 50, 2000)
    matrix = np.zeros((50, 50), int)
    for label, other in zip(labels, predicted, strict=True):
        matrix[label, other] += 1
    found = Breakdown.of(answers(labels, predicted), tuple(map(str, range(50))))
    dense = np.zeros_like(matrix)
    for label, other, images in found.cells:
        dense[label, other] = images
    np.testing.assert_array_equal(dense, matrix)
    np.testing.assert_array_equal(found.correct, matrix.diagonal())
    np.testing.assert_array_equal(found.images, matrix.sum(1))


def test_the_calibration_error_is_the_mean_gap_between_confidence_and_accuracy():
    # 4 images at 0.95, 2 of them right; 6 at 0.35, all wrong: 0.4 x 0.45 + 0.6 x 0.35
    found = Breakdown.of(answers([0] * 10, [0, 0, 1, 1] + [1] * 6, [0.95] * 4 + [0.35] * 6), NAMES)
    assert found.calibration_error == pytest.approx(100 * (0.4 * 0.45 + 0.6 * 0.35), abs=1e-4)
    perfect = Breakdown.of(answers([0] * 10, [0] * 10, [1.0] * 10), NAMES)
    assert perfect.calibration_error == 0.0


def test_bins_include_their_upper_end_and_what_is_not_a_number_is_in_none():
    edges = [number / BINS for number in range(1, BINS + 1)]
    found = Breakdown.of(answers([0] * BINS, [0] * BINS, [edge - 1e-6 for edge in edges]), NAMES)
    assert [each.images for each in found.bins] == [1] * BINS
    without = Breakdown.of(answers([0, 0], [0, 0], [math.nan, 0.5]), NAMES)
    assert sum(each.images for each in without.bins) == 1


def test_at_most_ten_classes_and_pairs_are_shown_the_worst_first():
    names = tuple(f"c{number}" for number in range(30))
    labels = [label for label in range(30) for _ in range(40)]
    predicted = [label if image < label else (label + 1) % 30 for label in range(30) for image in range(40)]
    lines = list(Breakdown.of(answers(labels, predicted), names).lines())
    assert lines[1] == "accuracy by class, the worst 10 of 30:"
    assert lines[2:4] == ["  c0    0.00%  0 of 40", "  c1    2.50%  1 of 40"]
    assert lines[13:15] == ["most confused:", "  c0 taken for c1: 40 of 40"]
    assert len(lines) == 26


def test_long_names_are_cut_in_tables():
    text = "\n".join(Breakdown.of(answers([3, 3], [3, 0]), NAMES).lines())
    assert "a class with a name that is .. taken for cat: 1 of 2" in text


def test_columns_hold_where_characters_are_wide_or_take_no_room():
    """Two columns each for 橙 and 子, none for the accent that macOS writes as a character of its own."""
    lines = list(Breakdown.of(answers([0, 1, 2], [0, 1, 2]), ("cat", "橙子", "a\u0308ffle", "yak")).lines())
    assert lines[2:5] == [
        "  cat    100.00%  1 of 1",
        "  橙子   100.00%  1 of 1",
        "  a\u0308ffle  100.00%  1 of 1",
    ]


def test_a_perfect_model_confuses_nothing():
    assert "confused" not in "\n".join(Breakdown.of(answers([0, 1], [0, 1]), NAMES).lines())


def test_answers_are_those_that_the_accuracy_counts_also_where_scores_are_equal():
    torch.manual_seed(0)
    collected, right = Collected(), 0
    for _ in range(20):
        logits = torch.randint(0, 3, (64, 10)).float()  # full of ties
        labels = torch.randint(-1, 10, (64,))
        collected.add(logits, labels)
        right += int(count(logits, labels)[1])
    found = collected.read()
    assert int((found.labels == found.predicted).sum()) == right
    assert (found.labels >= 0).all()


def test_predictions_are_rows_with_the_five_best_classes():
    images = np.zeros((3, 8, 8, 3), np.uint8)
    names, file = tuple("abcdefg"), io.StringIO()
    written = Predictions(file, ArraySource(images, np.array([2, 0, 1]), names), names)
    logits = torch.log(torch.tensor([[0.01, 0.02, 0.9, 0.03, 0.02, 0.01, 0.01]]))
    written.add(logits, torch.tensor([2]))
    written.add(logits.repeat(2, 1), torch.tensor([-1, 1]))
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("path,label,predicted,probability,predicted_2,probability_2,")
    assert [line.split(",")[:6] for line in lines[1:]] == [
        ["0", "c", "c", "0.900000", "d", "0.030000"],
        ["2", "b", "c", "0.900000", "d", "0.030000"],
    ]
    assert all(len(line.split(",")) == 12 for line in lines)
