"""`falconet validate`: what training logged, for checkpoints and foreign weights; and what is refused."""

import csv
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import gloo
import replica_scenarios
from falconet.checkpoint import format
from falconet.cli import main
from falconet.config.commands import ValidateOptions
from falconet.data.input import Input
from falconet.evaluation import accuracy_table, saved_model
from falconet.evaluation.accuracy_table import Accuracy
from falconet.evaluation.evaluate import Evaluation
from falconet.models import zoo
from falconet.parallel.world import ALONE
from tiny import TINY

# 16 validation images, so that accuracies differ; the seed and the accumulation decide which ones they are.
DATA = f"{TINY} --iterations 10 --epoch 3 --lr 0.2"
TRAIN = f"{DATA} --gradient-accumulation 2 --seed 5 --checkpoints-kept all"
SMALL = "--model resnet8-cifar --image-size 32"
NAMES = [f"resnet8-cifar_generated_{epoch}" for epoch in (1, 2, 3)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three epochs with a moving average."""
    folder = tmp_path_factory.mktemp("trained") / "r"
    assert main(f"train {TRAIN} --ema-half-life 0.5 --run-dir {folder}".split()) == 0
    return folder


@pytest.fixture
def checkpoints(falconet, trained):
    """The checkpoints of that run, in the run folder r."""
    shutil.copytree(trained, "r")
    return Path("r/checkpoints")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Weights of a run whose data any line can name, their accuracy, and the model that they fit."""
    folder = tmp_path_factory.mktemp("foreign") / "r"
    assert main(f"train {DATA} --run-dir {folder}".split()) == 0
    newest = format.checkpoints_in(folder)[-1]
    weights = format.read_tensors(newest, "model", verified=format.verify(newest))
    return weights, logged(folder)["validation/accuracy"][30]


def logged(run):
    """name -> update -> number, from metrics.jsonl."""
    numbers = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for name, number in line.items():
            numbers.setdefault(name, {})[line["update"]] = number
    return numbers


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:  # noqa: PTH123
        return list(csv.DictReader(file))


def test_folder_gives_a_row_per_model_as_training_logged_and_marks_the_best(falconet, checkpoints):
    answer = falconet("validate r --checkpoint all")
    assert answer.code == 0, answer.err
    assert answer.out.rstrip().endswith("written to r/validation.csv and r/validation.json")
    assert "by class" not in answer.out  # of six models it would be long
    found, numbers = rows("r/validation.csv"), logged(Path("r"))
    names = [name + suffix for name in NAMES for suffix in ("", " (moving average)")]
    assert [row["checkpoint"] for row in found] == names
    assert [row["epoch"] for row in found] == ["1", "1", "2", "2", "3", "3"]
    for row in found:
        update = 10 * int(row["epoch"])
        group = "validation_ema" if "moving" in row["checkpoint"] else "validation"
        assert row["top1"] == f"{numbers[f'{group}/accuracy'][update]:.2f}"
        assert row["top5"] == f"{numbers[f'{group}/top5_accuracy'][update]:.2f}"
        assert row["loss"] == f"{numbers[f'{group}/loss'][update]:.4f}"
        assert row["images"] == "16"
    best = max(found, key=lambda row: (float(row["top1"]), float(row["top5"])))
    assert [row["checkpoint"] for row in found if row["best"] == "best"] == [best["checkpoint"]]
    assert len({row["top1"] for row in found}) > 1


@pytest.mark.parametrize(("line", "epoch"), [("", "2"), ("--checkpoint best", "2"), ("--checkpoint last", "3")])
def test_the_best_checkpoint_is_measured_unless_another_is_asked_for(falconet, checkpoints, line, epoch):
    for name, score in zip(NAMES, (50.0, 75.0, 60.0), strict=True):
        format.amend(checkpoints / name, {"metrics": {"score": score}})
    answer = falconet(f"validate r {line}")
    assert answer.code == 0, answer.err
    assert {row["epoch"] for row in rows("r/validation.csv")} == {epoch}


def test_the_printed_table_is_that_of_the_file(falconet, checkpoints):
    out = falconet("validate --checkpoint-input-path r/checkpoints --output table.csv --checkpoint all").out
    found = rows("table.csv")
    table = [re.split(r"  +", line) for line in out.splitlines()[: len(found) + 1]]
    assert table[0] == ["checkpoint", "epoch", "top1", "top5", "loss", "images", "best"]
    assert [cells + [""] * (7 - len(cells)) for cells in table[1:]] == [list(row.values()) for row in found]


@pytest.fixture
def batches(monkeypatch):
    """The sizes of the batches that validations ask for."""
    asked, loader = [], Input.evaluation_loader

    def spy(*given, shape, **more):
        asked.append(shape.micro_batch)
        return loader(*given, shape=shape, **more)

    monkeypatch.setattr(Input, "evaluation_loader", spy)
    return asked


@pytest.mark.parametrize("option", ["micro-batch-size", "validation-batch-size"])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_accuracy_is_the_same_for_any_batch_size(falconet, checkpoints, batches, option, size):
    name = checkpoints / NAMES[1]
    falconet(f"validate --checkpoint-input-path {name} --output table.csv --{option} {size}")
    assert set(batches) == {size}
    numbers = logged(Path("r"))
    weights = rows("table.csv")[0]
    assert (weights["top1"], weights["images"]) == (f"{numbers['validation/accuracy'][20]:.2f}", "16")


def test_validation_during_training_uses_its_batch_size(falconet, batches):
    answer = falconet(f"train {TINY} --validation-batch-size 3 --run-dir b", "tensorflow")
    assert answer.code == 0, answer.err
    assert set(batches) == {3}
    row = rows("b/validation.csv")[-1]
    images, seconds = int(row["val_size"]), float(row["val_time"])
    assert float(row["latency"]) == pytest.approx(1000 * seconds * 3 / images)  # of one batch


def test_single_checkpoint_is_measured_and_left_unchanged(falconet, checkpoints):
    folder = checkpoints / NAMES[2]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    answer = falconet(f"validate --checkpoint-input-path {folder}")
    assert answer.code == 0, answer.err
    assert [row["checkpoint"] for row in rows(checkpoints / f"validation-{NAMES[2]}.csv")] == [
        NAMES[2],
        f"{NAMES[2]} (moving average)",
    ]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_checkpoint_that_is_measured_from_within_is_left_unchanged(falconet, checkpoints, monkeypatch):
    folder = (checkpoints / NAMES[2]).absolute()
    before = {path.name for path in folder.iterdir()}
    monkeypatch.chdir(folder)
    answer = falconet("validate --checkpoint-input-path .")
    assert answer.code == 0, answer.err
    assert {path.name for path in folder.iterdir()} == before
    assert len(rows(folder.with_name(f"validation-{NAMES[2]}.csv"))) == 2


def test_best_is_marked_by_exact_accuracy():
    right = (76_120, 76_122, 76_124, 76_121)
    found = [Accuracy(name="x", epoch="1", found=Evaluation(100_000, top1, 90_000, 1.0), classes=9) for top1 in right]
    assert [row["best"] for row in accuracy_table.tabulate(found)] == ["", "", "best", ""]


def test_details_are_those_of_the_better_weights_and_all_of_them_are_in_the_file(falconet, checkpoints):
    format.amend(checkpoints / NAMES[2], {"metrics": {"validation_accuracy": 5.0, "score": 90.0}})
    answer = falconet("validate r --checkpoint last --predictions images.csv")
    assert answer.code == 0, answer.err
    plain, average = json.loads(Path("r/validation.json").read_text())["models"]
    assert [plain["checkpoint"], average["checkpoint"]] == [NAMES[2], f"{NAMES[2]} (moving average)"]
    table = rows("r/validation.csv")
    for model, row in zip((plain, average), table, strict=True):
        assert f"{model['accuracy']:.2f}" == row["top1"]
        assert sum(each["correct"] for each in model["per_class"]) / 16 == model["accuracy"] / 100
        cells = model["confusion"]["cells"]
        assert sum(images for _, _, images in cells) == 16
        assert sum(images for label, predicted, images in cells if label == predicted) / 16 == model["accuracy"] / 100
        assert sum(each["images"] for each in model["calibration"]["bins"]) == 16
    shown = rows("images.csv")
    assert [row["path"] for row in shown] == [str(number) for number in range(16)]
    assert sum(row["label"] == row["predicted"] for row in shown) == 16 * average["accuracy"] / 100
    assert [list(row)[:4] for row in shown[:1]] == [["path", "label", "predicted", "probability"]]
    wrong = Counter((row["label"], row["predicted"]) for row in shown if row["label"] != row["predicted"])
    (label, predicted), count = min(wrong.items(), key=lambda each: (-each[1], each[0]))
    of = sum(row["label"] == label for row in shown)
    assert f"most confused:\n  {label} taken for {predicted}: {count} of {of}\n" in answer.out
    assert f"calibration error {average['calibration']['error']:.2f}%: on average " in answer.out


def test_predictions_name_the_photos_and_leave_out_those_that_cannot_be_read(falconet, image_folder):
    line = f"train --data folder --data-dir {image_folder} --image-size 32 --micro-batch-size 8 --epoch 1 --threads 1"
    assert falconet(f"{line} --run-dir r --config photos --model resnet8-cifar --device cpu").code == 0
    (image_folder / "val/dark/1.png").write_bytes(b"")
    answer = falconet("validate r --predictions images.csv --micro-batch-size 3")
    assert answer.code == 0, answer.err
    found = rows("images.csv")
    photos = sorted(image_folder.glob("val/*/*.png"))
    assert [row["path"] for row in found] == [str(path) for path in photos if path.parts[-2:] != ("dark", "1.png")]
    assert all(row["label"] == Path(row["path"]).parent.name for row in found)
    assert all(float(row["probability"]) + float(row["probability_2"]) == pytest.approx(1, abs=2e-6) for row in found)
    assert rows("r/validation.csv")[0]["top5"] == ""
    assert "top5" not in answer.out
    (model, *_) = json.loads(Path("r/validation.json").read_text())["models"]
    assert [(each["class"], each["images"]) for each in model["per_class"]] == [("dark", 3), ("light", 4)]


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_foreign_weights_are_measured_with_the_model_and_data_of_the_line(falconet, foreign, suffix):
    weights, accuracy = foreign
    path = Path("w").with_suffix(suffix)
    if suffix == ".safetensors":
        safetensors.torch.save_file(weights, path)
    else:
        torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in weights.items()}, "epoch": 3}, path)
    line = "--model resnet8-cifar --data generated --image-size 16 --iterations 10 --micro-batch-size 8 --threads 1"
    answer = falconet(f"validate --checkpoint-input-path {path} {line}")
    assert answer.code == 0, answer.err
    assert f"  {accuracy:.2f}  " in answer.out
    named = rows(f"validation-{path.name}-generated.csv")
    assert [(row["checkpoint"], row["best"]) for row in named] == [(path.name, "best")]


def test_every_file_of_weights_and_every_data_has_a_table_of_its_own(falconet, image_folder):
    for name in ("w.pt", "w.pth"):
        torch.save(zoo.build("resnet8-cifar", classes=2, seed=0).state_dict(), name)
    shutil.copytree(image_folder, "other")
    Path("validation.csv").write_text("of another program")
    line = "--model resnet8-cifar --image-size 16 --micro-batch-size 4 --threads 1 --device cpu"
    tables = {"w.pt --data-dir photos": "w.pt-photos", "w.pth --data-dir photos": "w.pth-photos"}
    tables |= {"w.pt --data-dir other": "w.pt-other", f"--pretrained {Path('w.pt').absolute()} --data-dir other": ""}
    for given, name in tables.items():
        answer = falconet(f"validate {given} {line}")
        assert answer.code == 0, answer.err
        named = f"validation-{name or 'w.pt-other'}"
        assert answer.out.endswith(f"written to {named}.csv and {named}.json\n")
    tables = {"validation-w.pt-other.csv", "validation-w.pt-photos.csv", "validation-w.pth-photos.csv"}
    assert {path.name for path in Path().glob("*.csv")} == {*tables, "validation.csv"}
    assert Path("validation.csv").read_text() == "of another program"


def test_checkpoints_that_are_measured_alone_leave_each_others_table_as_it_is(falconet, checkpoints):
    for name in NAMES[:2]:
        assert falconet(f"validate {checkpoints / name}").code == 0
    assert {path.name for path in checkpoints.glob("*.csv")} == {f"validation-{name}.csv" for name in NAMES[:2]}


def test_foreign_weights_without_a_model_are_refused_in_one_line(falconet, foreign):
    torch.save(foreign[0], "w.pt")
    fits = "; these weights fit --model resnet8-cifar"
    for line, expected in {
        "": f"--model and --data as well{fits}",
        "--model resnet8-cifar": "--data as well",
        "--data digits": f"--model as well{fits}",
    }.items():
        answer = falconet(f"validate --checkpoint-input-path w.pt {line}")
        assert answer.code == 2
        assert answer.err == f"falconet validate: w.pt: holds only weights; expected {expected}\n"


def test_a_folder_of_photos_is_the_data_of_foreign_weights(falconet, image_folder):
    torch.save(zoo.build("resnet8-cifar", classes=2, seed=0).state_dict(), "w.pth")
    line = "validate w.pth --model resnet8-cifar --image-size 16 --micro-batch-size 4 --threads 1 --device cpu"
    answer = falconet(f"{line} --data-dir photos")
    assert answer.code == 0, answer.err
    assert falconet(f"{line} --data folder --data-dir photos").out == answer.out


@pytest.mark.parametrize("command", ["validate", "average --validate --checkpoint-output-path a"])
def test_a_run_finds_its_photos_from_another_folder_or_asks_for_them(falconet, image_folder, monkeypatch, command):
    line = "train photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1 --threads 1 --device cpu"
    assert falconet(f"{line} --warmup-epoch 0 --run-dir r").code == 0
    Path("elsewhere").mkdir()
    shutil.copytree(image_folder / "val", "elsewhere/photos/other")  # of the same name, but other photos
    monkeypatch.chdir("elsewhere")
    assert falconet(f"{command} --checkpoint-input-path ../r").code == 0
    image_folder.rename(image_folder.with_name("moved"))
    shutil.rmtree("a", ignore_errors=True)
    answer = falconet(f"{command} --checkpoint-input-path ../r")
    assert answer.code == 2
    assert f"{image_folder}: no such folder; the run was trained on it; expected --data-dir" in answer.err
    assert falconet(f"{command} --checkpoint-input-path ../r --data-dir ../moved").code == 0


def test_photos_that_moved_with_their_run_are_suggested(falconet, image_folder, monkeypatch):
    Path("project").mkdir()
    image_folder.rename("project/photos")
    monkeypatch.chdir("project")
    line = "train photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1 --threads 1 --device cpu"
    assert falconet(f"{line} --warmup-epoch 0 --pretrained none --run-dir r").code == 0
    monkeypatch.chdir("..")
    Path("project").rename("renamed")
    monkeypatch.chdir("renamed")
    answer = falconet("validate r")
    assert answer.code == 2
    assert "expected --data-dir, where its photos are; did you mean '--data-dir photos'?" in answer.err
    assert falconet("validate r --data-dir photos").code == 0


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_hostile_pickle_is_refused_and_not_executed(falconet, suffix):
    torch.save({"state_dict": Hostile()}, f"w{suffix}")
    answer = falconet(f"validate --checkpoint-input-path w{suffix} --model resnet8-cifar --data digits")
    assert answer.code == 2
    assert re.fullmatch(rf"falconet validate: w{suffix}: refused: it would import \S*mkdir; .*\n", answer.err), (
        answer.err
    )
    assert not Path("executed").exists()


def tear(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def test_torn_checkpoint_in_a_folder_is_named_and_skipped(falconet, checkpoints):
    tear(checkpoints / NAMES[1])
    answer = falconet("validate --checkpoint-input-path r --checkpoint all")
    assert answer.code == 0, answer.err
    assert f"passed over r/checkpoints/{NAMES[1]}/model.safetensors: 7 bytes short" in answer.out
    assert {row["epoch"] for row in rows("r/validation.csv")} == {"1", "3"}


def test_torn_checkpoint_asked_for_by_name_is_refused_and_the_newest_whole_one_offered(falconet, checkpoints):
    tear(checkpoints / NAMES[0])
    answer = falconet(f"validate --checkpoint-input-path r/checkpoints/{NAMES[0]}")
    assert answer.code == 2
    assert f"{NAMES[0]}/model.safetensors: 7 bytes short" in answer.err
    assert answer.err.endswith(f"; the newest complete one is r/checkpoints/{NAMES[2]}\n")
    assert answer.err.count("\n") == 1


def test_folder_of_torn_checkpoints_is_refused_and_nothing_is_deleted(falconet, checkpoints):
    for name in NAMES:
        tear(checkpoints / name)
    answer = falconet("validate --checkpoint-input-path r --checkpoint all")
    assert answer.code == 2
    assert "7 bytes short" in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out.count("passed over") == 3
    assert sorted(path.name for path in checkpoints.iterdir()) == NAMES
    assert not Path("r/validation.csv").exists()


MISTAKES = {
    "": "expected a run, such as runs/my-run, a checkpoint or a folder of them",
    "--checkpoint-input-path nowhere": "nowhere: no such file or folder",
    "--checkpoint-input-path nowhere.pt": "nowhere.pt: no such file or folder",
    "empty": "empty: holds no checkpoint; expected a checkpoint, a folder of them or a run folder",
    "empty --checkpoint all": "empty: no checkpoint in it; expected a checkpoint, a folder of them or a run",
    "r --checkpoint 7": "r: holds no checkpoint of epoch 7; the epochs it has: 1, 2, 3",
    "r --checkpoint latest": "--checkpoint: got 'latest', expected a whole number, at least 0, or best, last or all",
    "--checkpoint-input-path r/plan.txt": "r/plan.txt: truncated, or neither safetensors nor a torch weights file",
    "r --output table.json": "--output: got table.json, expected a CSV file; the details are written as JSON",
    "r --predictions no/such.csv": "--predictions: cannot write no/such.csv: No such file or directory",
    "r --predictions x.csv --checkpoint all": "--predictions: takes one checkpoint, got --checkpoint all",
    "--checkpoint-input-path r --model resnet14-cifar": "does not fit resnet14-cifar: ",
    "--checkpoint-input-path r --model resnet9-cifar": "'resnet9-cifar' is not a model; did you mean 'resnet",
    "--checkpoint-input-path r --data generated --classes 3": "was trained on 10 classes, the data has 3",
    "--checkpoint-input-path r --data synthetic": "--data synthetic: has no validation images",
    "--checkpoint-input-path r --data folder --data-dir empty": "empty",
    "--checkpoint-input-path r --epoch 3": "--epoch",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_what_cannot_be_measured_is_refused_in_one_line(falconet, checkpoints, line, message):
    Path("empty").mkdir()
    answer = falconet(f"validate {line}")
    assert answer.code == 2
    assert answer.err.startswith("falconet validate: ")
    assert message in answer.err
    assert answer.err.count("\n") == 1


UNWRITABLE = {
    "r --output r/plan.txt/t.csv": "--output: cannot write to r/plan.txt/t.csv: File exists",
    "r --output empty": "--output: empty is a folder, expected a file",
    "r --output t.csv --predictions ./t.csv": "--predictions: t.csv is also written by --output; expected another file",
    "r --output t.csv --predictions t.json": "--predictions: t.json is also written by --output; expected another",
    "r --predictions r/validation.csv": "--predictions: r/validation.csv is also written by --output; expected",
}


@pytest.mark.parametrize(("line", "message"), UNWRITABLE.items())
def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(
    falconet, checkpoints, monkeypatch, line, message
):
    monkeypatch.setattr(saved_model, "measure", lambda *_, **__: pytest.fail("measured"))
    Path("empty").mkdir()
    answer = falconet(f"validate {line}")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert message in answer.err


def test_the_folder_of_a_table_is_created(falconet, checkpoints):
    answer = falconet("validate r --output new/tables/t.csv")
    assert answer.code == 0, answer.err
    assert sorted(path.name for path in Path("new/tables").iterdir()) == ["t.csv", "t.json"]


def test_images_of_other_classes_are_refused_and_the_difference_named(falconet, image_folder):
    line = f"train --data-dir {image_folder} {SMALL} --micro-batch-size 8 --epoch 1 --threads 1"
    assert falconet(f"{line} --run-dir r").code == 0
    (image_folder / "val/light").rename(image_folder / "val/night")
    (image_folder / "train/light").rename(image_folder / "train/night")
    answer = falconet("validate --checkpoint-input-path r")
    assert answer.code == 2
    assert "was trained on 2 classes, the data has 2: 'night' is new and 'light' is missing" in answer.err


def test_unreadable_photos_give_no_accuracy(falconet, image_folder):
    line = f"train --data-dir {image_folder} {SMALL} --micro-batch-size 8 --epoch 1 --threads 1"
    assert falconet(f"{line} --run-dir r").code == 0
    for path in image_folder.glob("val/*/*.png"):
        path.write_bytes(b"")
    answer = falconet("validate --checkpoint-input-path r")
    assert answer.code == 2
    assert answer.err == "falconet validate: validation: none of the images could be read, so there is no accuracy\n"


SHARED = "--data generated --image-size 8 --classes 3 --iterations 9 --micro-batch-size 25 --epoch 1 --warmup-epoch 0"


@pytest.mark.dist
def test_several_processes_share_the_images_and_write_what_one_does(falconet, tmp_path):
    falconet(f"train {SHARED} --threads 1 --device cpu --run-dir r --ema-half-life 1")
    line = f"validate {tmp_path}/r --threads 1 --validation-batch-size 4"
    one = falconet(f"{line} --output one.csv --predictions one-by-one.csv")
    line = f"{line} --output {tmp_path}/three.csv --predictions {tmp_path}/three-by-one.csv"
    (code, out, err), *others = gloo.in_world(3, replica_scenarios.validated, line.removeprefix("validate "))
    assert (code, err, others) == (0, "", [(0, "", "")] * 2), "the first process alone prints"
    written = f"written to {tmp_path}/three"
    assert out.partition(written)[0] == one.out.partition("written to one")[0]
    for name in (".csv", "-by-one.csv"):
        assert Path(f"three{name}").read_bytes() == Path(f"one{name}").read_bytes(), name
    mine, theirs = (json.loads(Path(f"{name}.json").read_text())["models"] for name in ("three", "one"))
    assert len(mine) == 2
    for found, expected in zip(mine, theirs, strict=True):
        assert found.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-12)  # summed in another order
        assert found == expected


@pytest.mark.dist
def test_processes_that_see_different_checkpoints_are_refused():
    found = gloo.in_world(2, replica_scenarios.validated_apart)
    assert {code for code, _, _ in found} == {2}
    assert "the checkpoints: is" in "".join(err for _, _, err in found)


@pytest.mark.usefixtures("two_cores")
def test_replicas_that_find_no_device_are_left_out_with_a_note(falconet, monkeypatch):
    from falconet.parallel import launch

    started = []
    monkeypatch.setattr(launch, "launch", lambda workers, **_: started.append(workers) or 0)
    Path("r").mkdir()
    answer = falconet("validate r --replicas 9 --device cpu")
    assert answer.out == (
        "note: 9 replicas requested, 2 cores are available, enough for 4 processes: 4 measure, with the same result\n"
    )
    assert [(each.processes, each.restarts) for each in started] == [(4, 0)]


def test_nan_loss_is_reported(monkeypatch):
    found = Evaluation(images=10, top1=1, top5=5, loss=float("nan"))
    monkeypatch.setattr(saved_model.evaluate, "evaluator", lambda *given, **named: lambda model, stopping: found)
    images = SimpleNamespace(check_classes=lambda *given, **named: None)
    monkeypatch.setattr(saved_model, "open_machine", lambda machine: ALONE)
    options = ValidateOptions()
    opened = saved_model.Opened("old_7", "7", torch.nn.Identity(), options, images, ())
    said = []
    assert saved_model.measure(opened, said.append) is found
    assert said[0].startswith("warning: old_7: the validation loss is nan")
