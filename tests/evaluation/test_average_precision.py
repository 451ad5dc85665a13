"""Average precision against its definition, with ties; the scores of several processes."""

import numpy as np
import pytest
import torch

from falconet.evaluation import average_precision as precision
from falconet.evaluation.average_precision import ClassPrecision, Scores, average_precision
from falconet.parallel.world import ALONE, World


def defined(scores, present):
    """The sum over thresholds of the recall gained times the precision, threshold by threshold."""
    total, before = 0.0, 0.0
    for threshold in sorted({*scores.tolist()}, reverse=True):
        chosen = scores >= threshold
        recall = present[chosen].sum() / present.sum()
        total += (recall - before) * present[chosen].mean()
        before = recall
    return total


@pytest.mark.parametrize("levels", [2, 5, 10_000], ids=["two scores", "many ties", "few ties"])
@pytest.mark.parametrize("seed", range(5))
def test_average_precision_follows_its_definition(levels, seed):
    drawn = np.random.default_rng(seed)
    scores = (drawn.integers(0, levels, 200) / 7 - 3).astype(np.float32)
    present = drawn.random(200) < 0.2
    assert average_precision(scores, present) == pytest.approx(defined(scores, present), abs=1e-12)


def test_known_value():
    """The example of scikit-learn's documentation."""
    scores, present = np.array([0.1, 0.4, 0.35, 0.8], np.float32), np.array([False, False, True, True])
    assert average_precision(scores, present) == pytest.approx(0.8333333333)


def test_the_order_of_images_does_not_matter():
    drawn = np.random.default_rng(0)
    scores = drawn.integers(0, 4, 60).astype(np.float32)
    scores[:7] = np.nan
    present = drawn.random(60) < 0.5
    order = drawn.permutation(60)
    assert average_precision(scores, present) == average_precision(scores[order], present[order])


def test_class_without_an_image_is_left_out_of_the_mean():
    assert average_precision(np.zeros(3, np.float32), np.zeros(3, bool)) is None
    assert precision.mean([ClassPrecision(2, 50.0), ClassPrecision(0, None), ClassPrecision(1, 100.0)]) == 75.0
    assert precision.mean([ClassPrecision(0, None)]) is None


class Second(World):
    """The second of two processes, the first of which has sent `others`."""

    def sum(self, values):
        return values + self.others.pop(0)


@pytest.mark.parametrize("most", [1, 1 << 20], ids=["a class at a time", "all at once"])
def test_scores_of_two_processes_are_ranked_together(monkeypatch, most):
    monkeypatch.setattr(precision, "MOST_BYTES", most)
    torch.manual_seed(0)
    sets = np.array([[False, False, True], [True, True, False], [False, True, False]])
    logits, labels = torch.randn(9, 3), torch.tensor([0, 1, 2, -1, 1, 0, 2, 0, 1])
    alone = Scores()
    alone.add(logits, labels)
    mine, world = Scores(), Second(device=torch.device("cpu"), rank=1, size=2)
    mine.add(logits[4:], labels[4:])
    rows, blank = torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)
    rows[:3], blank[:3] = logits[:3], labels[:3]
    messages = rows.split(1, dim=1) if most == 1 else [rows]
    object.__setattr__(world, "others", [torch.tensor([3, 0]), blank, *messages])
    assert mine.by_class(sets, world) == alone.by_class(sets, ALONE)
