"""Training images that grow: --resolution-schedule."""

import json
from pathlib import Path

import pytest

from falconet.config.values import resolutions
from falconet.train.step import LocalStep
from runs import assert_bitwise, stop_at
from tiny import TINY

GROWING = f"{TINY} --image-size 16 --epoch 3 --resolution-schedule 8:1 12:2 16:3"


@pytest.fixture
def sides(monkeypatch):
    """The sides of the images of each update."""
    seen, plain = [], LocalStep.__call__

    def noted(self, batches, *, update, lr):
        seen.append(tuple(batches[0].images.shape[2:]))
        return plain(self, batches, update=update, lr=lr)

    monkeypatch.setattr(LocalStep, "__call__", noted)
    return seen


def test_each_epoch_has_its_size_and_validation_the_full_one(falconet, sides):
    answer = falconet(f"train {GROWING} --run-dir r")
    assert answer.code == 0, answer.err
    each = len(sides) // 3
    assert sides == [(8, 8)] * each + [(12, 12)] * each + [(16, 16)] * each
    assert "training images: 8 x 8 from epoch 1, 12 x 12 from epoch 2, 16 x 16 from epoch 3\n" in answer.out
    lines = map(json.loads, Path("r/metrics.jsonl").read_text().splitlines())
    validated = [line for line in lines if "validation/accuracy" in line]
    assert len(validated) == 3
    assert falconet("validate r --checkpoint last").code == 0
    row = Path("r/validation.csv").read_text().splitlines()[-1]
    assert f"{validated[-1]['validation/accuracy']:.2f}" in row


def test_the_last_size_stays(falconet, sides):
    assert falconet(f"train {TINY} --image-size 16 --epoch 3 --resolution-schedule 8:1 12:2").code == 0
    assert sides[-1] == sides[len(sides) // 2] == (12, 12)


def test_a_run_that_continues_has_the_sizes_of_an_uninterrupted_one(falconet, monkeypatch, tmp_path):
    assert falconet(f"train {GROWING} --run-dir straight").code == 0
    with monkeypatch.context() as stopping:
        stop_at(stopping, 5)
        assert falconet(f"train {GROWING} --run-dir r").code == 130
    assert falconet("restore r").code == 0
    assert_bitwise(tmp_path / "r", tmp_path / "straight")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--resolution-schedule 8", "got '8', expected sides in pixels and the epochs they start with, in order"),
        ("--resolution-schedule 8:2", "in order and from epoch 1, such as 128:1 176:13"),
        ("--resolution-schedule 8:1 12:1", "in order and from epoch 1"),
        ("--resolution-schedule 8:1 20:2", "--resolution-schedule: got a side of 20, expected at most --image-size"),
        ("--resolution-schedule 8:1 --pipeline-splits layer2/0", "does not work with --pipeline-splits"),
        (
            "--resolution-schedule 8:1 --half-res-training --fine-tune-epoch 1 --weight-avg-strategy mean",
            "contradicts --half-res-training",
        ),
    ],
)
def test_a_mistake_is_one_line(falconet, extra, message):
    answer = falconet(f"train {TINY} --image-size 16 {extra} --plan")
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1


def test_texts_are_read():
    assert resolutions([]) == {}
    assert resolutions(["128:1", "176:13"]) == {1: 128, 13: 176}
    assert resolutions(["128:13", "176:1"]) is None
    assert resolutions(["128:0"]) is None
