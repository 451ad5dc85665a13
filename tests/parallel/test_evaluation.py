"""Exact evaluation counts every image once, whatever the number of processes."""

import pytest

import gloo
from replica_scenarios import alone, measure, read

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("size", [2, 3, 4])
def test_accuracy_over_processes_matches_one_process_exactly(size):
    for count, batch in ((37, 4), (3, 4)):  # a set that does not divide, and one with fewer images than processes
        expected, labels = alone(measure, count, batch)
        results = gloo.in_world(size, measure, count, batch)
        assert sorted(label for _, seen in results for label in seen) == sorted(labels)
        for found, _ in results:
            assert (found.images, found.top1, found.top5) == (count, expected.top1, expected.top5)
            assert found.loss == pytest.approx(expected.loss, rel=1e-12)


def test_a_pass_over_the_data_counts_the_images_of_all_processes_in_the_time_of_the_slowest():
    (first, rate), (second, other) = gloo.in_world(2, read, 37)
    assert first + second == list(range(37))
    assert rate == other
    assert 128 / 0.8 < rate <= 128 / 0.4  # each reads one padded batch of 64, the slower one in 0.4 s
