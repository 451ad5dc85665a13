"""Averages are checked against float64 arithmetic by hand, and count each state once."""

import os
import shutil

import numpy as np
import pytest
import torch

from falconet.checkpoint import format
from falconet.checkpoint.weight_average import Averaging, average, select
from falconet.errors import CheckpointError

MEAN = Averaging(strategy="mean")


def saved(folder, epoch, tensors, **extra):
    progress = {"epoch": epoch, "images": 100 * epoch, "update": epoch}
    format.write(folder, {"model": tensors}, {"model": "m", "classes": 2, "progress": progress, **extra})
    return folder


def series(home, count, dtype=torch.float32):
    """Checkpoints of random weights, and the weights: count x 4 x 3, float64."""
    noise = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 3, generator=noise).to(dtype) for _ in range(count)]
    folders = [saved(home / f"epoch_{i}", i, {"w": w, "seen": torch.tensor(10 * i)}) for i, w in enumerate(weights)]
    return folders, np.stack([w.double().numpy() for w in weights])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mean_is_computed_in_float64_and_returned_in_the_original_dtype(tmp_path, dtype):
    folders, weights = series(tmp_path, 5, dtype)
    result = average(folders, MEAN)
    assert result["w"].dtype == dtype
    assert torch.equal(result["w"], torch.from_numpy(weights.sum(axis=0) / 5).to(dtype))


def test_exponential_average_starts_with_the_oldest_and_follows_training(tmp_path):
    folders, weights = series(tmp_path, 4)
    expected = weights[0]
    for new in weights[1:]:
        expected = 0.7 * expected + (1 - 0.7) * new
    shuffled = [folders[i] for i in (2, 0, 3, 1)]
    result = average(shuffled, Averaging(strategy="exponential", decay=0.7))
    np.testing.assert_allclose(result["w"].numpy(), expected, rtol=1e-7)


def test_small_differences_between_large_weights_survive(tmp_path):
    # In float16 arithmetic 2048 + 1 is 2048; the mean of these is 2049 all the same.
    values = [2048.0, 2048.0, 2050.0, 2050.0]
    folders = [saved(tmp_path / str(i), i, {"w": torch.tensor([v]).half()}) for i, v in enumerate(values)]
    assert average(folders, MEAN)["w"].double().item() == torch.tensor(2049.0).half().double().item()
    assert average(folders, MEAN)["w"].dtype == torch.float16


def test_counters_come_from_the_newest_checkpoint(tmp_path):
    folders, _ = series(tmp_path, 3)
    seen = average(folders[::-1], MEAN)["seen"]
    assert (seen.item(), seen.dtype) == (20, torch.int64)


def test_last_selects_the_newest_checkpoints_not_the_last_names(tmp_path):
    folders, weights = series(tmp_path, 12)  # by name, epoch_10 comes before epoch_2
    result = average(format.checkpoints_in(tmp_path), Averaging(strategy="mean", last=2))
    np.testing.assert_allclose(result["w"].numpy(), weights[10:].mean(axis=0), rtol=1e-6)
    assert select(folders, 2) == folders[10:]
    assert select(folders, 99) == select(folders, None) == folders


def test_links_and_copies_count_once(tmp_path, monkeypatch):
    folders, weights = series(tmp_path, 3)
    shutil.copytree(folders[0], tmp_path / "best")
    shutil.copytree(folders[1], tmp_path / "hard", copy_function=os.link)
    (tmp_path / "newest").symlink_to("epoch_2")
    monkeypatch.chdir(tmp_path)
    many = [*format.checkpoints_in(tmp_path), *folders, folders[0].relative_to(tmp_path)]
    assert len(many) == 10
    assert len(select(many, None)) == 3
    np.testing.assert_allclose(average(many, MEAN)["w"].numpy(), weights.mean(axis=0), rtol=1e-6)


def test_equal_weights_at_different_times_count_separately(tmp_path):
    values = [1.0, 1.0, 4.0]
    folders = [saved(tmp_path / str(i), i, {"w": torch.tensor([v])}) for i, v in enumerate(values)]
    assert average(folders, MEAN)["w"].item() == 2.0


def test_an_average_is_not_averaged_again(tmp_path):
    folders, _ = series(tmp_path, 2)
    averaged = saved(tmp_path / "averaged", 2, average(folders, MEAN), averaged=["epoch_0", "epoch_1"])
    assert select([*folders, averaged], None) == folders
    with pytest.raises(CheckpointError, match="nothing to average: 1 given"):
        average([averaged], MEAN)


def test_averaging_no_checkpoints_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nothing to average: none given"):
        average([], MEAN)


W = {"w": torch.ones(2)}
MISFITS = {
    "another model": (W, {"model": "n"}, r"a \(m, 2 classes\) with .*b \(n, 2 classes\)"),
    "other classes": (W, {"classes": 3}, r"a \(m, 2 classes\) with .*b \(m, 3 classes\)"),
    "another shape": ({"w": torch.ones(3, 1)}, {}, r"w is 2 \(float\) in the first, 3x1 \(float\) in the second"),
    "a tensor more": (W | {"v": torch.ones(1)}, {}, r"v is missing in the first, 1 \(float\) in the second"),
    "another kind": ({"w": torch.ones(2).long()}, {}, r"w is 2 \(float\) in the first, 2 \(int64\) in the second"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_checkpoints_of_different_models_are_refused_by_name(tmp_path, case):
    tensors, extra, message = MISFITS[case]
    a, b = saved(tmp_path / "a", 0, W), saved(tmp_path / "b", 1, tensors, **extra)
    with pytest.raises(CheckpointError, match=message) as caught:
        average([a, b], MEAN)
    assert str(a) in str(caught.value)
    assert str(b) in str(caught.value)


def test_a_damaged_checkpoint_is_not_averaged(tmp_path):
    folders, _ = series(tmp_path, 3)
    path = folders[1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=r"epoch_1/model\.safetensors: contents changed"):
        average(folders, MEAN)


def test_discarded_checkpoints_are_left_out_before_the_last_are_counted(tmp_path):
    folders, weights = series(tmp_path, 6)
    result = average(folders, Averaging(strategy="mean", last=2, discarded=1))
    np.testing.assert_allclose(result["w"].numpy(), weights[3:5].mean(axis=0), rtol=1e-6)
    assert select(folders, None, discarded=6) == select(folders, None, discarded=9) == []
