"""`falconet average`: the numbers by hand, and a result that validates and restores like any other."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from falconet.checkpoint import format
from falconet.cli import main
from falconet.commands import average as command
from falconet.errors import ConfigError
from falconet.train import run_folder
from tiny import TINY

TRAIN = f"train {TINY} --iterations 10 --epoch 4 --lr 0.2 --checkpoints-kept all"
NAMES = [f"resnet8-cifar_generated_{epoch}" for epoch in (1, 2, 3, 4)]
AVERAGED = Path("r/checkpoints/resnet8-cifar_generated_4_averaged")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four epochs, averaged at its end as well."""
    folder = tmp_path_factory.mktemp("trained") / "r"
    assert main(f"{TRAIN} --weight-avg-strategy mean --run-dir {folder}".split()) == 0
    return folder


@pytest.fixture
def run(falconet, trained):
    """That run in r, without its average."""
    shutil.copytree(trained, "r")
    shutil.rmtree(AVERAGED)
    return Path("r")


def weights(folder, stem="model"):
    return format.read_tensors(folder, stem, verified=format.verify(folder))


def by_hand(names, combine):
    """Every tensor of the average: float64 for real numbers, the newest's for counters."""
    parts = [weights(Path("r/checkpoints") / name) for name in names]
    return {
        name: combine([part[name].double() for part in parts]).to(newest.dtype)
        if newest.is_floating_point()
        else newest
        for name, newest in parts[-1].items()
    }


def mean(values):
    return torch.stack(values).sum(0) / len(values)


def exponential(values, decay=0.7):
    total = values[0]
    for value in values[1:]:
        total = decay * total + (1 - decay) * value
    return total


def assert_same(found, expected, *, exactly=True):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        if exactly:
            assert torch.equal(found[name], tensor), name
        else:
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=0.0)


RULES = {
    "": (NAMES, mean, "mean"),
    "--weight-avg-N 2": (NAMES[2:], mean, "mean"),
    "--weight-avg-N 1": (NAMES[3:], mean, "mean"),
    "--weight-avg-N 99": (NAMES, mean, "mean"),
    "--weight-avg-N -1": (NAMES, mean, "mean"),
    "--weight-avg-strategy exponential --weight-avg-exp-decay 0.7": (NAMES, exponential, "exponential"),
    "--weight-avg-strategy exponential --weight-avg-exp-decay 0.7 --weight-avg-N 3": (
        NAMES[1:],
        exponential,
        "exponential",
    ),
}


@pytest.mark.parametrize("line", RULES)
def test_average_equals_the_one_made_by_hand(falconet, run, line):
    names, combine, word = RULES[line]
    answer = falconet(f"average --checkpoint-input-path r {line}")
    assert answer.code == 0, answer.err
    said = f"{len(names)} checkpoint{'s' if len(names) > 1 else ''} ({word}): {', '.join(names)}"
    assert answer.out == f"averaged {said}\nwritten to {AVERAGED}\n"
    assert_same(weights(AVERAGED), by_hand(names, combine), exactly=combine is mean)
    assert_same(weights(AVERAGED, "optimizer"), weights(run / "checkpoints" / names[-1], "optimizer"))
    assert format.verify(AVERAGED).content["averaged"]["of"] == names


def test_average_after_training_equals_that_of_the_command(falconet, run, trained):
    falconet("average --checkpoint-input-path r")
    assert_same(weights(trained / "checkpoints" / AVERAGED.name), weights(AVERAGED))


def test_average_after_training_is_validated_logged_and_reported(falconet, trained):
    answer = falconet(f"{TRAIN} --weight-avg-strategy exponential --weight-avg-N 2 --run-dir r")
    assert answer.code == 0, answer.err
    said = re.search(r"^accuracy of the averaged checkpoints: (.*)%$", answer.out, re.M)
    numbers = json.loads(Path("r/metrics.jsonl").read_text().splitlines()[-1])
    assert said[1] == f"{numbers['validation_averaged/accuracy']:.2f}"
    assert json.loads(Path("r/summary.json").read_text())["metrics"].items() >= numbers.items() - {("update", 40)}
    assert f"averaged 2 checkpoints (exponential) into {AVERAGED}" in answer.out
    assert f"  {said[1]}  " in falconet(f"validate --checkpoint-input-path {AVERAGED}").out


def test_average_is_validated_on_request(falconet, run):
    out = falconet("average --checkpoint-input-path r --validate").out
    said = re.search(r"^accuracy of the average: (\d+\.\d\d)%$", out, re.M)[1]
    assert f"  {said}  " in falconet(f"validate --checkpoint-input-path {AVERAGED}").out


def test_average_can_be_restored_and_trained(falconet, run):
    falconet("average --checkpoint-input-path r")
    answer = falconet(f"restore --checkpoint-input-path {AVERAGED} --epoch 5 --weight-avg-strategy none")
    assert answer.code == 0, answer.err
    assert f"restored {AVERAGED}, update 40 of 50" in answer.out
    assert " 5/5 " in answer.out
    assert not format.verify(run / "checkpoints/resnet8-cifar_generated_5").averaged


def test_average_of_a_scaled_run_restores_with_its_scale(falconet):
    falconet(f"train {TINY} --precision 16.16 --auto-loss-scaling --epoch 1 --run-dir r --weight-avg-strategy mean")
    line = "restore --checkpoint-input-path r/checkpoints/resnet8-cifar_generated_1_averaged --epoch 2"
    answer = falconet(f"{line} --weight-avg-strategy none")
    assert answer.code == 0, answer.err


def test_links_and_copies_count_once(falconet, run):
    falconet("average --checkpoint-input-path r")
    first = weights(AVERAGED)
    shutil.copytree(run / "checkpoints" / NAMES[1], run / "checkpoints/best")
    (run / "checkpoints/newest").symlink_to(NAMES[3])
    answer = falconet("average --checkpoint-input-path r")
    assert "averaged 4 checkpoints" in answer.out
    assert_same(weights(AVERAGED), first)


def test_batch_norm_is_reestimated_and_nothing_else_changes(falconet, run):
    falconet("average --checkpoint-input-path r")
    plain = weights(AVERAGED)
    answer = falconet("average --checkpoint-input-path r --batchnorm-images 33")
    assert answer.code == 0, answer.err
    assert "batch norm re-estimated on 40 training images" in answer.out  # whole micro-batches
    again = weights(AVERAGED)
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, again[name])}
    assert changed == {name for name in plain if name.endswith(STATISTICS)}
    assert again["bn1.num_batches_tracked"] == 5  # of 8 images
    assert_same(weights(AVERAGED, "optimizer"), weights(run / "checkpoints" / NAMES[3], "optimizer"))


def test_first_batch_norm_has_the_statistics_of_its_inputs(falconet, run):
    # Generated images are not augmented, so one epoch's statistics are those of all training images.
    answer = falconet("average --checkpoint-input-path r --batchnorm-images 1000")
    assert "batch norm re-estimated on 80 training images" in answer.out  # as many as there are
    from falconet.data.preprocessing import Normalise
    from falconet.data.sources.builtin import generate

    splits = generate(images=80, validated=8, image_size=16, classes=10, seed=0)
    pixels = torch.from_numpy(splits.train.images[range(80)]).permute(0, 3, 1, 2)
    found = weights(AVERAGED)
    hidden = torch.nn.functional.conv2d(
        Normalise(splits.preprocessing_at(16))(pixels), found["conv1.weight"], padding=1
    )
    torch.testing.assert_close(found["bn1.running_mean"], hidden.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_batch_norm_is_reestimated_on_the_training_images(falconet):
    line = "train --data digits --dataset-percentage 10 --micro-batch-size 16 --epoch 1 --warmup-epoch 0 --device cpu"
    assert falconet(f"{line} --validation-mode none --run-dir tenth").code == 0
    answer = falconet("average --checkpoint-input-path tenth --batchnorm-images 1000")
    assert "batch norm re-estimated on 128 training images" in answer.out, answer.err  # of 143, whole micro-batches


def test_nothing_is_written_when_batch_norm_cannot_be_reestimated(falconet, run):
    answer = falconet("average --checkpoint-input-path r --batchnorm-images 8 --data folder --data-dir nowhere")
    assert answer.code == 2
    assert "nowhere" in answer.err
    assert not AVERAGED.exists()


def test_average_can_be_written_elsewhere(falconet, run):
    answer = falconet("average --checkpoint-input-path r/checkpoints --checkpoint-output-path out/mean --validate")
    assert answer.code == 0, answer.err
    assert format.verify(Path("out/mean")).averaged
    assert not AVERAGED.exists()


def test_average_is_written_beside_a_live_run_that_saves_elsewhere(falconet, run, monkeypatch):
    monkeypatch.setattr(run_folder, "ENDING", 0.1)
    for folder in (run, Path("out")):
        folder.mkdir(exist_ok=True)
        for _ in range(2):  # the second replaces the first
            with run_folder.alone(folder):
                answer = falconet(f"average --checkpoint-input-path r --checkpoint-output-path {folder}/mean")
            assert answer.code == 0, answer.err
        assert format.verify(folder / "mean").averaged


def test_the_checkpoints_of_a_run_are_locked_until_the_average_is_written(falconet, run, monkeypatch):
    monkeypatch.setattr(run_folder, "ENDING", 0.1)
    refused, made = [], command.average

    def meanwhile(*given):
        with pytest.raises(ConfigError, match="in use by another run"), run_folder.alone(run / "checkpoints"):
            pass
        refused.append(True)
        return made(*given)

    monkeypatch.setattr(command, "average", meanwhile)
    answer = falconet("average --checkpoint-input-path r")
    assert (answer.code, refused) == (0, [True]), answer.err
    with run_folder.alone(run / "checkpoints"):
        pass


def test_torn_checkpoint_is_named_and_skipped(falconet, run):
    path = run / "checkpoints" / NAMES[2] / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    answer = falconet("average --checkpoint-input-path r")
    assert answer.code == 0, answer.err
    assert f"passed over r/checkpoints/{NAMES[2]}/optimizer.safetensors: 3 bytes short" in answer.out
    assert_same(weights(AVERAGED), by_hand([NAMES[0], NAMES[1], NAMES[3]], mean))


MISTAKES = {
    "": "expected a run, such as runs/my-run, a checkpoint or a folder of them",
    "--checkpoint-input-path nowhere": "nowhere: no such file or folder",
    "--checkpoint-input-path empty": "empty: contains no undamaged checkpoint",
    "--checkpoint-input-path averages": "averages: holds only averages; expected checkpoints of training",
    "--checkpoint-input-path averages --checkpoint-output-path x": "averages: holds only averages",
    f"--checkpoint-input-path r --checkpoint-output-path r/checkpoints/{NAMES[0]}": (
        f"--checkpoint-output-path: r/checkpoints/{NAMES[0]} is a checkpoint of training; expected another name"
    ),
    "--checkpoint-input-path r --weight-avg-N 0": "--weight-avg-N",
    "--checkpoint-input-path r --weight-avg-strategy median": "--weight-avg-strategy",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_what_cannot_be_averaged_is_refused_in_one_line(falconet, run, trained, line, message):
    Path("empty").mkdir()
    shutil.copytree(trained / "checkpoints" / AVERAGED.name, "averages/one")
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    answer = falconet(f"average {line}")
    assert answer.code == 2
    assert answer.err.startswith("falconet average: ")
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


def test_average_in_a_folder_of_other_things_is_put_inside_it(falconet, run):
    Path("results").mkdir()
    Path("results/notes.txt").write_text("mine")
    answer = falconet("average --checkpoint-input-path r --checkpoint-output-path results")
    assert answer.code == 0, answer.err
    assert f"written to results/{AVERAGED.name}" in answer.out
    assert format.verify(Path("results") / AVERAGED.name).averaged
    assert Path("results/notes.txt").read_text() == "mine"
    assert (
        f"written to {AVERAGED}" in falconet("average r --checkpoint-output-path r").out
    )  # a run folder: beside the others


def test_average_made_by_training_is_kept_when_another_one_is_made(falconet, trained):
    shutil.copytree(trained, "r")
    before = weights(AVERAGED)
    answer = falconet("average r --weight-avg-N 2")
    assert answer.code == 0, answer.err
    other = AVERAGED.with_name(f"{AVERAGED.name}_mean_2")
    assert f"{AVERAGED} is another average and is kept\n" in answer.out
    assert f"written to {other}\n" in answer.out
    assert_same(weights(AVERAGED), before)
    assert_same(weights(other), by_hand(NAMES[2:], mean))
    assert f"written to {AVERAGED}\n" in falconet("average r").out  # the same one again
    said = falconet(f"average r --weight-avg-N 2 --checkpoint-output-path {AVERAGED}").out
    assert f"written to {AVERAGED}, in place of another average\n" in said


def test_further_averages_are_made_and_measured(falconet):
    line = f"train {TINY} --epoch 3 --run-dir r --lr 0.5 --weight-avg-strategy mean --weight-avg-N 2"
    answer = falconet(f"{line} --weight-avg-also exponential:0.75 mean:3")
    assert answer.code == 0, answer.err

    def layer(folder):
        return weights(Path(folder))["layer2.0.conv1.weight"].double()

    one, two, three = (layer(f"r/checkpoints/resnet8-cifar_generated_{epoch}") for epoch in (1, 2, 3))
    averaged = "r/checkpoints/resnet8-cifar_generated_3_averaged"
    expected = {
        averaged: (two + three) / 2,
        f"{averaged}_exp_0.75": 0.75 * (0.75 * one + 0.25 * two) + 0.25 * three,
        f"{averaged}_mean_3": (one + two + three) / 3,
    }
    for folder, values in expected.items():
        torch.testing.assert_close(layer(folder), values, rtol=0, atol=1e-7)
    for which in ("", " (exp_0.75)", " (mean_3)"):
        assert re.search(rf"^accuracy of the averaged checkpoints{re.escape(which)}: ", answer.out, re.M)
    refused = falconet(f"{line} --weight-avg-also mean:0")
    assert refused.code == 2
    assert "--weight-avg-also: got 'mean:0', expected mean:N, mean:all, epochs:N or exponential:DECAY" in refused.err
