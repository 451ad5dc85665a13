"""Training that starts with pretrained weights: what it takes from them, and what its checkpoints state."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

import hub
from falconet.checkpoint import format
from falconet.models import pretrained, zoo

NAME, REPOSITORY = "mobilenet-v3-small", "timm/mobilenetv3_small_100.lamb_in1k"
LINE = f"train photos --model {NAME} --image-size 32 --micro-batch-size 4 --updates 1 --run-dir run --threads 1"
ABSENT = (
    f"falconet train: --pretrained: the weights {REPOSITORY} are not in the Hugging Face cache, and HF_HUB_OFFLINE is"
    f" set; expected a network, --pretrained model.safetensors after `hf download {REPOSITORY} model.safetensors"
    " --local-dir .` on another machine, or --pretrained none to train from scratch\n"
)

pytestmark = pytest.mark.usefixtures("image_folder")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return hub.fill(tmp_path / "hub", NAME)


def checkpoint(run="run"):
    folder = format.newest_whole(Path(run), note=pytest.fail)
    return folder, json.loads((folder / "manifest.json").read_text())


def test_photos_start_with_published_weights_and_their_preparation(falconet, cache):
    answer = falconet(f"{LINE} --initial-checkpoint")
    assert answer.code == 0, answer.err
    assert (
        f"starts with the weights of {REPOSITORY}, except the classifier's: 1,000 classes there, 2 here" in answer.out
    )
    first = min(Path("run/checkpoints").glob("*/model.safetensors"))
    begun, new = safetensors.torch.load_file(first), zoo.build(NAME, classes=2, seed=0).state_dict()
    assert all(torch.equal(begun[key], tensor) for key, tensor in cache.items() if not key.startswith("classifier."))
    drawn = new["classifier.weight"]
    torch.testing.assert_close(begun["classifier.weight"], drawn * (0.01 / drawn.std()))
    _, manifest = checkpoint()
    assert manifest["initial_weights"] == REPOSITORY
    assert manifest["config"]["interpolation"] == {"value": "bicubic", "source": "pretrained weights"}
    assert manifest["config"]["image-size"]["value"] == "32"  # the line's
    assert (manifest["preprocessing"]["interpolation"], manifest["preprocessing"]["resize"]) == ("bicubic", 36)


@pytest.mark.usefixtures("cache")
def test_what_the_line_states_is_not_taken_from_the_weights(falconet):
    stated = "--interpolation bilinear --validation-crop-ratio 0.5 --pixel-mean 0.1 0.2 0.3"
    answer = falconet(f"{LINE} {stated} --plan")
    options = yaml.safe_load(answer.out.partition("\n\n")[2])
    assert (options["interpolation"], options["validation-crop-ratio"]) == ("bilinear", 0.5)
    assert options["pixel-mean"] == [0.1, 0.2, 0.3]
    assert options["pixel-deviation"] == [0.229, 0.224, 0.225]


@pytest.mark.usefixtures("cache")
def test_validation_of_the_run_uses_the_stored_preparation(falconet):
    trained = falconet(LINE)
    assert trained.code == 0, trained.err
    measured = falconet("validate --checkpoint-input-path run --device cpu")
    assert measured.code == 0, measured.err
    accuracy = json.loads(Path("run/summary.json").read_text())["best"]["validation_accuracy"]
    assert f"{accuracy:.2f}" in measured.out


@pytest.mark.usefixtures("cache")
def test_restored_and_resumed_runs_read_no_weights(falconet, monkeypatch):
    assert falconet(f"{LINE} --resume").code == 0
    monkeypatch.setattr(pretrained, "fetch", lambda _: pytest.fail("fetched"))
    again = falconet(f"{LINE} --resume")
    assert again.code == 0, again.err
    assert "nothing left to train" in again.out
    restored = falconet("restore run --updates 2")
    assert restored.code == 0, restored.err
    _, manifest = checkpoint()
    assert manifest["progress"]["update"] == 2
    assert manifest["initial_weights"] == REPOSITORY
    assert manifest["config"]["interpolation"] == {"value": "bicubic", "source": "pretrained weights"}
    assert falconet(LINE.replace("--updates 1", "--updates 2") + " --resume").code == 0


@pytest.mark.parametrize("extra", ["--plan", ""])
def test_a_file_that_does_not_fit_is_refused_by_the_plan_too(falconet, extra):
    torch.save(zoo.build("resnet10", classes=2, seed=1).state_dict(), "other.pth")
    answer = falconet(f"{LINE} --pretrained other.pth {extra}")
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert f"--pretrained: other.pth does not fit {NAME}: " in answer.err
    assert "these weights fit resnet10 with 2 classes" in answer.err
    assert len(answer.err) < 1000


@pytest.mark.parametrize("option", ["--pretrained", "--init-path"])
def test_a_restored_run_still_names_the_file_it_started_with(falconet, option):
    torch.save(zoo.build(NAME, classes=2, seed=1).state_dict(), "mine.pth")
    none = "" if option == "--pretrained" else " --pretrained none"
    line = f"{LINE}{none} {option} mine.pth --resume"
    started = falconet(line)
    assert started.code == 0, started.err
    assert falconet("restore run --updates 2").code == 0
    assert f"\n{option.lstrip('-')}: mine.pth  # checkpoint\n" in Path("run/config.yaml").read_text()
    Path("mine.pth").unlink()  # not read again
    again = falconet(line.replace("--updates 1", "--updates 2"))
    assert again.code == 0, again.err
    assert "nothing left to train" in again.out
    other = falconet(line.replace("--updates 1", "--updates 2").replace("mine.pth", "other.pth"))
    assert other.code == 2
    assert f"was trained with {option} mine.pth, but this command line has other.pth" in other.err


@pytest.mark.parametrize("asked", ["", "--pretrained", "--pretrained auto", "--pretrained published"])
def test_missing_weights_end_the_run_with_one_line(falconet, tmp_path, asked):
    answer = falconet(f"{LINE} {asked}")
    assert (answer.code, answer.out, answer.err) == (2, "", ABSENT)
    assert not (tmp_path / "run").exists()


def test_random_weights_are_used_only_if_asked_for(falconet):
    answer = falconet(f"{LINE} --pretrained none")
    assert answer.code == 0, answer.err
    assert "starts with" not in answer.out
    _, manifest = checkpoint()
    assert manifest["initial_weights"] is None
    assert manifest["config"]["interpolation"]["value"] == "bilinear"


def test_models_without_published_weights_start_with_random_ones_and_say_so(falconet):
    answer = falconet(LINE.replace(NAME, "resnet10"))
    assert answer.code == 0, answer.err
    assert "note: there are no published weights for resnet10: it starts with random ones\n" in answer.out
    refused = falconet(LINE.replace(NAME, "resnet10") + " --pretrained")
    assert refused.code == 2
    assert refused.err == (
        "falconet train: --pretrained: there are no published weights for resnet10; expected a model of `falconet"
        " models` that has some, a file as --pretrained PATH, or --pretrained none to train from scratch\n"
    )


def test_other_data_and_named_configs_start_with_random_weights(falconet):
    assert "starts with" not in falconet("train --data digits --updates 1 --run-dir digits").out


def test_a_plan_downloads_nothing(falconet, monkeypatch):
    monkeypatch.setattr(pretrained, "fetch", lambda _: pytest.fail("fetched"))
    answer = falconet(f"{LINE} --plan")
    assert answer.code == 0, answer.err
    assert f"starts with the weights of {REPOSITORY}" in answer.out


UNFIT = {
    "--norm-type group": "norm-type",
    "--padding same": "padding",
    "--norm-eps 0.01": "norm-eps",
    "--mobilenet-wide-head": "mobilenet-wide-head",
    "--input-image-padding": "input-image-padding",
}


@pytest.mark.parametrize(("option", "name"), UNFIT.items())
@pytest.mark.parametrize("asked", ["", "--pretrained"])
def test_an_option_that_the_weights_do_not_fit_is_named(falconet, option, name, asked):
    answer = falconet(f"{LINE} {option} {asked}")
    assert answer.code == 2
    assert answer.err == (
        f"falconet train: --{name}: the published weights of {NAME} were trained without it; expected --pretrained"
        f" none, which starts with random weights, or --pretrained PATH, a file that was trained with --{name}\n"
    )


WITHOUT_EFFECT = {
    "--norm-num-groups 8": "--norm-num-groups has no effect without --norm-type group",
    "--norm-grouping strided": "--norm-grouping has no effect without --norm-type group",
}


@pytest.mark.parametrize(("option", "note"), WITHOUT_EFFECT.items())
@pytest.mark.parametrize("asked", ["", "--pretrained"])
def test_an_option_without_effect_fits_the_weights(falconet, option, note, asked):
    answer = falconet(f"{LINE} {option} {asked} --plan")
    assert answer.code == 0, answer.err
    assert f"note: {note}\n" in answer.out


def test_two_sources_of_weights_are_refused(falconet):
    answer = falconet(f"{LINE} --pretrained --init-path w.pth")
    assert answer.code == 2
    assert "--pretrained: contradicts --init-path" in answer.err
    restored = falconet("restore run --pretrained")
    assert restored.code == 2


def test_a_missing_file_is_named(falconet):
    answer = falconet(f"{LINE} --pretrained nowhere.pth")
    assert answer.code == 2
    assert answer.err == (
        "falconet train: --pretrained: nowhere.pth: no such file or folder; expected a safetensors or torch file, a"
        " checkpoint or a run folder\n"
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("w", "w.pth"), ("./W.pht", "W.pth"), ("first", "runs/first"), ("runs/fisrt", "runs/first"), ("photo", "")],
)
def test_a_mistyped_file_or_run_gets_a_suggestion(falconet, typed, meant):
    Path("runs/first/checkpoints").mkdir(parents=True)
    Path(meant if meant.endswith(".pth") else "w.pth").touch()
    Path("photo-1.png").touch()  # a near name, but no weights
    answer = falconet(f"{LINE} --pretrained {typed}")
    suggestion = f"; did you mean '{meant}'?" if meant else ""
    assert (answer.code, answer.err.count("did you mean")) == (2, bool(meant))
    assert answer.err.endswith(f" a checkpoint or a run folder{suggestion}\n")


def test_a_folder_without_a_checkpoint_is_told_once_what_was_expected(falconet):
    Path("runs").mkdir()
    answer = falconet(f"{LINE} --pretrained runs")
    assert answer.err.startswith("falconet train: --pretrained: runs: holds no checkpoint; expected a checkpoint, a")
    assert (answer.code, answer.err.count("expected")) == (2, 1)


def test_a_run_starts_with_the_weights_of_another(falconet):
    scratch = f"{LINE} --pretrained none --interpolation bicubic --validation-crop-ratio 0.9"
    assert falconet(scratch).code == 0
    answer = falconet(LINE.replace("--run-dir run", "--run-dir second --lr 0") + " --pretrained run")
    assert answer.code == 0, answer.err
    assert ", classifier included" in answer.out
    (before, _), (after, manifest) = checkpoint(), checkpoint("second")
    assert manifest["initial_weights"] == str(before)
    assert manifest["preprocessing"]["interpolation"] == "bicubic"
    assert manifest["preprocessing"]["resize"] == 35
    old, new = (safetensors.torch.load_file(each / "model.safetensors") for each in (before, after))
    assert torch.equal(old["classifier.weight"], new["classifier.weight"])


def test_a_file_can_be_validated_on_its_classes(falconet):
    weights = {key: tensor.contiguous() for key, tensor in zoo.build(NAME, classes=2, seed=3).state_dict().items()}
    safetensors.torch.save_file(weights, "two.safetensors")
    line = f"validate --model {NAME} --data-dir photos --image-size 32"
    answer = falconet(f"{line} --pretrained two.safetensors")
    assert answer.code == 0, answer.err
    assert "two.safetensors" in answer.out
    pretrained_file = {**weights, "classifier.weight": torch.zeros(7, 1024), "classifier.bias": torch.zeros(7)}
    safetensors.torch.save_file(pretrained_file, "seven.safetensors")
    refused = falconet(f"{line} --pretrained seven.safetensors")
    assert refused.code == 2
    assert "--pretrained: seven.safetensors knows 7 classes, the data has 2; `falconet train photos`" in refused.err
    assert "contradicts --checkpoint-input-path" in falconet(f"{line} --pretrained --checkpoint-input-path run").err


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_replicas_start_with_the_same_weights(falconet, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    answer = falconet(f"{LINE} --replicas 2")
    assert answer.code == 0, answer.err
    assert checkpoint()[1]["initial_weights"] == REPOSITORY
