"""Several processes: the accuracy of their training, and that replicas change nothing but who does the work."""

import csv
from pathlib import Path

import pytest

TWO = "poprun --num-instances=2 --num-replicas=2 --ipus-per-replica=1"


def test_two_instances_learn_and_one_validates_the_same(started, run, tmp_path):
    line = "--model resnet18 --data cifar10 --micro-batch-size 5 --lr 0.002 --momentum 0.9 --epoch 2 --precision 32.32"
    line += f" --validation-mode after --checkpoint-output-path {tmp_path} -- --image-size 32"
    answer = started(f"{TWO} python3 train/train.py {line}")
    assert answer.train_accuracy > 15
    (accuracy,) = answer.test_accuracies
    assert accuracy > 15
    alone = run("train/validate.py", f"--checkpoint-input-path {tmp_path / 'resnet18_cifar10_2'}")
    assert alone.test_accuracies == pytest.approx([accuracy], abs=0.01)


def test_two_instances_have_a_positive_throughput(started):
    line = "--data generated --random-weights --model resnet18 --iterations 3 --micro-batch-size 2 -- --image-size 64"
    answer = started(f"{TWO} python3 inference/run_benchmark.py {line}")
    (best,) = answer.numbers(r"throughput: .* max: ([\d.]+),")
    assert best > 0


def test_replicas_give_the_losses_of_one_process(started, run, tmp_path):
    line = "--data generated --model resnet18 --norm-type group --epoch 1 --iterations 3 --logs-per-epoch 3"
    line += " --validation-mode none --precision 32.32 --momentum 0.9"
    own = "-- --image-size 32 --threads 1"

    def losses(folder: Path) -> list[float]:
        with (folder / "training.csv").open(newline="") as file:
            return [float(row["loss_batch"]) for row in csv.DictReader(file)]

    one, two = tmp_path / "one", tmp_path / "two"
    run("train/train.py", f"{line} --micro-batch-size 2 --gradient-accumulation 2 --checkpoint-output-path {one} {own}")
    started(f"{TWO} python3 train/train.py {line} --micro-batch-size 2 --checkpoint-output-path {two} {own}")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
