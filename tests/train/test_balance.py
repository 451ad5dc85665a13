"""Classes of unequal sizes: balanced runs, restored and planned."""

from pathlib import Path

import pytest

from layouts import class_folders
from runs import assert_bitwise, stop_at

LINE = (
    "train photos --model resnet8-cifar --image-size 16 --micro-batch-size 4 --epoch 3 --threads 1 --device cpu"
    " --dataloader-workers 1"
)


@pytest.fixture
def photos(tmp_path):
    folder = class_folders(tmp_path / "photos")
    for number, path in enumerate(sorted(folder.glob("train/*/*"))):
        if path.parent == sorted((folder / "train").iterdir())[0] and number % 3:
            path.unlink()
    return folder


@pytest.mark.usefixtures("photos")
def test_a_balanced_run_restored_within_an_epoch_equals_the_straight_one(falconet, monkeypatch):
    line = f"{LINE} --sampler balanced --class-weights balanced"
    answer = falconet(f"{line} --run-dir straight")
    assert answer.code == 0, answer.err
    assert "sampler balanced: every class equally often per epoch\nclass weights balanced: " in answer.out
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert falconet(f"{line} --run-dir r").code == 130
    assert falconet("restore r").code == 0
    assert_bitwise(Path("straight"), Path("r"))
