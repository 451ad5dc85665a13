"""Scripts train, restore, validate and average: what is learned, and what agrees with what."""

import csv
import math
from pathlib import Path

import pytest
import torch

from falconet.evaluation.loss import Loss

LEARNS = 15.0  # percent: a guess is right in 10
SMALL = "--data cifar10 --micro-batch-size 5 --lr 0.001 --momentum 0.9 --seed 0"
QUICK = "-- --threads 1 --image-size 32"  # the original enlarged CIFAR to 224 pixels
GENERATED = (
    "--data generated --model resnet18 --iterations 3 --epoch 1 --logs-per-epoch 3 --micro-batch-size 2"
    " --validation-mode none --precision 32.32"
)


def losses(folder: str) -> list[float]:
    with Path(folder, "training.csv").open(newline="") as file:
        return [float(row["loss_batch"]) for row in csv.DictReader(file)]


TRAINED = {
    "group norm, half precision": "--norm-type group --norm-num-groups 32 --precision 16.16 --loss-scaling 128",
    "batch norm, full precision": "--precision 32.32",
}


@pytest.mark.parametrize("line", TRAINED.values(), ids=TRAINED)
def test_a_resnet_learns_in_two_epochs(run, line):
    answer = run("train/train.py", f"--model resnet18 {SMALL} --epoch 2 --validation-mode during {line} {QUICK}")
    assert answer.train_accuracy > LEARNS
    assert answer.test_accuracies[-1] > LEARNS


@pytest.mark.parametrize("precision", ["16.16", "32.32"])
def test_synthetic_data_is_trained_on(run, precision):
    line = f"--data synthetic --model resnet18 --iterations 2 --epoch 1 --micro-batch-size 2 --precision {precision}"
    answer = run("train/train.py", f"{line} --validation-mode none {QUICK}")
    assert len(answer.losses) == 1


def test_recomputation_changes_no_loss(run):
    run("train/train.py", f"{GENERATED} --checkpoint-output-path kept {QUICK}")
    recomputed = "--recompute-mode manual --recompute-checkpoints layer2/1/conv1 layer3/0/conv2"
    run("train/train.py", f"{GENERATED} {recomputed} --checkpoint-output-path recomputed {QUICK}")
    assert losses("kept") == losses("recomputed")
    assert len(losses("kept")) == 3


def test_eight_bit_images_give_the_same_losses(run):
    run("train/train.py", f"{GENERATED} --checkpoint-output-path values {QUICK}")
    run("train/train.py", f"{GENERATED} --eight-bit-io --checkpoint-output-path bytes {QUICK}")
    assert losses("values") == pytest.approx(losses("bytes"), abs=4e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 1.0])
def test_the_smoothed_loss_equals_the_closed_form(smoothing):
    logits, labels = torch.randn(4, 10, generator=torch.manual_seed(0)), torch.tensor([3, 0, 9, 3])
    loss = Loss(10, smoothing)
    logs = torch.log_softmax(logits, 1)
    expected = -(1 - smoothing) * logs[range(4), labels] - smoothing * logs.mean(1)
    assert torch.allclose(loss(logits, loss.targets(labels)), expected, atol=1e-6)


def test_the_shape_of_an_efficientnet_changes_its_parameters(run):
    def parameters(line: str) -> int:
        shown = run("train/train.py", f"--data generated --model efficientnet-b0 --compile-only {line}").out
        return int(shown.partition("model efficientnet-b0, ")[2].partition(" ")[0].replace(",", ""))

    usual = parameters("")
    assert usual == 5_288_548
    assert parameters("--efficientnet-expand-ratio 2") < 0.6 * usual
    assert parameters("--efficientnet-group-dim 4") > usual


MIXED = "--mixup-alpha 0.1 --cutmix-lambda-low 0.2 --cutmix-lambda-high 0.8 --cutmix-disable-prob 0.5"


@pytest.mark.parametrize("mixing", ["", MIXED], ids=["plain", "mixup and cutmix"])
def test_checkpoints_are_validated_averaged_and_restored(run, tmp_path, mixing):
    saved = tmp_path / "saved"
    line = f"--model resnet18 {SMALL} --epoch 2 --precision 32.32 --validation-mode after {mixing}"
    average = "--weight-avg-strategy exponential --weight-avg-exp-decay 0.5"
    trained = run("train/train.py", f"{line} {average} --checkpoint-output-path {saved} {QUICK}")
    last, averaged = trained.test_accuracies
    names = sorted(path.name for path in saved.glob("resnet18_cifar10_*"))
    assert names[:2] == ["resnet18_cifar10_1", "resnet18_cifar10_2"]

    validated = run("train/validate.py", f"--checkpoint-input-path {saved / names[1]}")
    assert validated.test_accuracies == pytest.approx([last], abs=0.01)
    each = run("train/validate.py", f"--checkpoint-input-path {saved}").test_accuracies
    assert each[1] == pytest.approx(last, abs=0.01)
    assert each[-1] == pytest.approx(averaged, abs=0.01)

    again = tmp_path / "again"
    shared = f"--checkpoint-input-path {saved} --checkpoint-output-path {again}"
    run("train/weight_avg.py", f"{shared} --weight-avg-strategy exponential --weight-avg-exp-decay 0.5")
    assert run("train/validate.py", f"--checkpoint-input-path {again}").test_accuracies == pytest.approx(
        [averaged], abs=5
    )

    restored = run("train/restore.py", f"--checkpoint-input-path {saved / names[1]} -- --epoch 3")
    assert "restored" in restored.out
    assert restored.train_accuracy >= trained.train_accuracy - 5
    assert math.isfinite(restored.losses[-1])
