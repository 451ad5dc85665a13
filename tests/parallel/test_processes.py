"""Processes reduce, compare, vote and report errors together."""

import os

import pytest

import gloo
import replica_scenarios

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_give_every_process_the_same_answer(size):
    for found in gloo.in_world(size, replica_scenarios.reductions):
        assert found["sum"] == [size, sum(range(size))]
        assert found["max"] == [1, size - 1]
        assert found["broadcast"] == [1, 0]
        assert found["once"] == "made by 0"
        assert found["empty"] == ""
        assert os.fsencode(found["no UTF-8"]) == b"caf\xe9"
        assert found["votes"] == [False, False, False, True, False]  # one call late


def test_a_difference_between_processes_is_reported_with_its_process():
    with pytest.raises(AssertionError, match="the colour: is 'blue' in process 1 and 'red' in process 0"):
        gloo.in_world(2, replica_scenarios.disagree)


def test_a_missing_process_is_named_with_where_it_was_last_seen():
    with pytest.raises(AssertionError) as failed:
        gloo.in_world(2, replica_scenarios.late, 3)
    assert "rank 0: timed out after 3 s in update 7, waiting for everybody: rank 1 did not arrive" in str(failed.value)
    assert "ago in update 6, reading images" in str(failed.value)


def test_an_error_of_one_process_is_reported_with_its_rank():
    errors = gloo.errors_in_world(2, replica_scenarios.mistaken, [1], expected=1)
    assert errors == {1: "falconet.errors.DataError: rank 1: the photo is torn"}


def test_an_error_of_all_processes_is_reported_by_the_first():
    errors = gloo.errors_in_world(2, replica_scenarios.mistaken, [0, 1], expected=2)
    assert errors[0] == "falconet.errors.DataError: the photo is torn"
    assert errors[1].startswith("falconet.errors.SaidElsewhereError")


def test_the_doctor_passes_with_two_processes(tmp_path):
    for found in gloo.in_world(2, replica_scenarios.doctor, str(tmp_path)):
        assert len(found) == 11
        assert [finding for finding in found if not finding.held] == []
    assert list(tmp_path.iterdir()) == []


def test_bad_images_are_counted_once_over_all_processes():
    found = gloo.in_world(2, replica_scenarios.bad_images, 3)
    said = {note.rpartition("; skipped, ")[2] for notes in found for note in notes}
    assert said == {"bad image 1 of 3 allowed", "bad image 2 of 3 allowed", "bad image 3 of 3 allowed"}
    with pytest.raises(AssertionError, match=r"shared.png: cannot be .*; 3 bad images, at most 2 allowed"):
        gloo.in_world(2, replica_scenarios.bad_images, 2)
