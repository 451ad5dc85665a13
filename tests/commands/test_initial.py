"""`falconet train` starting with the weights of another run, and with a share of the data."""

import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from falconet.checkpoint import format
from tiny import TINY

STILL = "--lr 0 --warmup-epoch 0 --seed 1 --epoch 1"  # a run whose weights never change


def weights(run):
    folder = format.checkpoints_in(run)[-1]
    return format.read_tensors(folder, "model", verified=format.verify(folder))


def assert_same_parameters(left, right):
    """Running statistics move in any case."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(tensor, right[name]), name


def test_run_starts_with_the_best_weights_of_another(falconet, tmp_path):
    assert falconet(f"train {TINY} --ema-half-life 0.5 --lr 1 --run-dir a").code == 0
    folder, manifest = format.choose(tmp_path / "a", "best", print)
    assert manifest.better_stem == "ema"
    assert falconet(f"train {TINY} {STILL} --run-dir b --init-path a").code == 0
    assert_same_parameters(format.model_weights(folder, manifest, "ema"), weights(tmp_path / "b"))


def test_run_starts_with_the_weights_of_another_or_of_a_file(falconet, tmp_path):
    first = falconet(f"train {TINY} --run-dir a --epoch 2")
    assert first.code == 0, first.err
    answer = falconet(f"train {TINY} {STILL} --run-dir b --init-path a")
    assert answer.code == 0, answer.err
    assert "starts with the weights of a\n" in answer.out
    best = format.choose(tmp_path / "a", "best", print).folder
    assert_same_parameters(load_file(best / "model.safetensors"), weights(tmp_path / "b"))
    file = format.checkpoints_in(tmp_path / "a")[0] / "model.safetensors"
    assert falconet(f"train {TINY} {STILL} --run-dir c --init-path {file}").code == 0
    assert_same_parameters(load_file(file), weights(tmp_path / "c"))


def test_restored_run_does_not_read_the_initial_weights_again(falconet, tmp_path):
    assert falconet(f"train {TINY} --run-dir a --epoch 1").code == 0
    assert falconet(f"train {TINY} --run-dir b --epoch 1 --init-path a").code == 0
    refused = falconet("restore --checkpoint-input-path b --init-path a")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--init-path: " in refused.err
    shutil.rmtree(tmp_path / "a")
    answer = falconet("restore --checkpoint-input-path b --epoch 2")
    assert answer.code == 0, answer.err
    assert "begins with" not in answer.out


def test_unfit_or_missing_weights_are_refused_in_one_line(falconet):
    assert falconet(f"train {TINY} --run-dir a --epoch 1").code == 0
    for line, message in {
        "--init-path a --model resnet14-cifar": "does not fit resnet14-cifar: ",
        "--init-path b": "falconet train: --init-path: b: no such file or folder\n",
        "--init-path ax": "falconet train: --init-path: ax: no such file or folder; did you mean 'a'?\n",
    }.items():
        answer = falconet(f"train {TINY} --run-dir c {line}")
        assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
        assert message in answer.err


COMPUTED = "--model resnet14-cifar --shortcut-padding both --padding same --norm-eps 0.01"


def test_run_takes_over_what_the_other_stated_about_its_model(falconet, tmp_path):
    assert falconet(f"train {TINY} {COMPUTED} --batchnorm-momentum 0.3 --run-dir a --epoch 1").code == 0
    (folder,) = format.checkpoints_in(tmp_path / "a")
    for place in ("a", folder, folder / "model.safetensors"):
        answer = falconet(f"train {TINY} --init-path {place} --norm-eps 0.1 --plan")
        assert answer.code == 0, answer.err
        taken = "--model resnet14-cifar --padding same --shortcut-padding both"
        assert f"note: the checkpoint was trained with: {taken}\n" in answer.out
        options = yaml.safe_load(answer.out.partition("\n\n")[2])
        assert (options["model"], options["padding"], options["norm-eps"]) == ("resnet14-cifar", "same", 0.1)
        assert options["batchnorm-momentum"] == "auto"
    for option in ("--init-path", "--pretrained"):
        answer = falconet(f"train {TINY} --model speednet8-cifar {option} a --run-dir b")
        assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
        assert "does not fit speednet8-cifar: " in answer.err


PHOTOS = "photos --image-size 16 --epoch 1 --threads 1 --device cpu"


@pytest.mark.usefixtures("image_folder")
def test_run_on_photos_takes_over_the_model_unless_the_line_names_one(falconet, tmp_path):
    assert falconet(f"train {PHOTOS} --model resnet8-cifar --run-dir a").code == 0
    line = f"train {PHOTOS} --init-path a --run-dir b --resume"
    (tmp_path / "mine.yaml").write_text("extends: photos\nlabel-smoothing: 0\n")
    for config in ("", "--config mine.yaml"):
        answer = falconet(f"{line} {config} --plan")
        assert answer.code == 0, answer.err
        assert "note: the checkpoint was trained with: --model resnet8-cifar\n" in answer.out
        assert "model: resnet8-cifar  # pretrained weights\n" in answer.out
        assert "optimizer: adamw  # config photos\n" in answer.out
    assert falconet(line).code == 0
    shutil.rmtree(tmp_path / "a")
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert "nothing left to train" in answer.out
    answer = falconet(f"train {PHOTOS} --init-path b --model resnet14-cifar --run-dir c")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert "does not fit resnet14-cifar: " in answer.err


def test_resumed_run_needs_the_other_run_no_more(falconet, tmp_path):
    assert falconet(f"train {TINY} {COMPUTED} --run-dir a --epoch 1").code == 0
    line = f"train {TINY} --epoch 1 --run-dir b --init-path a --resume"
    assert falconet(line).code == 0
    shutil.rmtree(tmp_path / "a")
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert "nothing left to train" in answer.out


DRAWN = "--weight-init channels --zero-init none"


@pytest.mark.dist
@pytest.mark.slow
def test_initial_weights_are_the_same_in_stages(falconet, tmp_path):
    for run, line in {"a": "", "b": "--pipeline-splits layer2"}.items():
        answer = falconet(f"train {TINY} {STILL} {DRAWN} --run-dir {run} --validation-mode none {line}")
        assert answer.code == 0, answer.err
    assert_same_parameters(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_initial_weights_follow_the_options(falconet, tmp_path):
    answer = falconet(f"train {TINY} {STILL} {DRAWN} --run-dir a --validation-mode none")
    assert answer.code == 0, answer.err
    found = weights(tmp_path / "a")
    assert (
        found["layer3.0.conv2.weight"].abs().max()
        <= (6 / 128) ** 0.5
        < 1.1 * found["layer3.0.conv2.weight"].abs().max()
    )
    assert all(found[name].eq(1).all() for name in found if name.endswith("bn2.weight"))


def test_weight_init_has_no_effect_on_a_restored_run(falconet):
    assert falconet(f"train {TINY} {DRAWN} --run-dir a --epoch 1").code == 0
    plain = falconet("restore --checkpoint-input-path a --epoch 2 --plan")
    assert "weight-init has no effect" not in plain.out
    assert "weight-init: channels  # checkpoint" in plain.out
    asked = falconet("restore --checkpoint-input-path a --epoch 2 --plan --weight-init he")
    assert "note: --weight-init has no effect without new weights: they are read from a file" in asked.out


def test_percentage_of_the_training_images_is_used(falconet):
    found = []
    for percentage in (100, 10):
        plan = falconet(f"train --plan --dataset-percentage {percentage}").out
        found.append([int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:training|validation)", plan)])
    (whole, validation), part = found
    assert part == [whole // 10, validation]
    generated = falconet(f"train {TINY} --plan --dataset-percentage 10")
    assert "note: --dataset-percentage has no effect without --data other than generated" in generated.out
