"""`train` and `validate` on folders of photos, as people have them."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import runs
from falconet.data import layout
from falconet.data.layout import load_photos

SMALL = (
    "--model resnet10 --image-size 16 --micro-batch-size 4 --epoch 1 --threads 1 --dataloader-workers 1 --device cpu"
)


@pytest.fixture
def heap(tmp_path):
    """Two classes, dark and light, of 12 unsplit photos each."""
    for name, level in (("dark", 40), ("light", 220)):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (20 + number, 16), (level, level + number, level)).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


@pytest.fixture
def trained(falconet, heap):
    answer = falconet(f"train photos {SMALL} --run-dir run")
    assert answer.code == 0, answer.err
    return answer


def test_what_was_found_is_printed_before_training(trained):
    lines = trained.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("photos: "))
    assert lines[at].startswith("photos: 2 classes (dark, light), 24 photos (12 per class)")
    assert lines[at].endswith(", class folders")
    assert lines[at + 1].startswith("split by file name: ")
    assert re.search(r" to validate \((\d+ %, for )?--val-fraction 0\.2\)$", lines[at + 1])


def test_only_the_first_of_many_classes_are_named(falconet, heap):
    for number in range(30):
        shutil.copytree(heap / "dark", heap / f"class {number:02}")
    out = falconet(f"train photos {SMALL} --plan").out
    assert "photos: 32 classes (class 00, class 01, class 02, class 03, ...), 384 photos" in out


def test_the_plan_says_which_values_the_photos_and_the_device_changed(falconet, heap):
    lines = falconet("train photos --plan --pretrained none --model resnet8-cifar --device cpu").out.splitlines()
    sources = dict(line.split("  # ") for line in lines if "  # " in line)
    images = next(line for line in lines if line.startswith("split by file name")).split()[4]
    changed = {setting.split(":")[0]: source for setting, source in sources.items() if source.startswith("config ")}
    assert changed["epoch"] == changed["micro-batch-size"] == f"config photos: for {images} training images"
    assert changed["precision"] == "config photos: auto on cpu"
    assert changed["lr"] == changed["warmup-epoch"] == "config photos"


def test_details_are_left_to_the_plan(falconet, trained):
    details = ["loader: reads at most", "decoded by the native", "global batch 4"]
    assert "1 epoch, 4 photos of 16 x 16 per update, " in trained.out
    assert not any(detail in trained.out for detail in details)
    assert trained.out.count(" to validate") == 1
    plan = falconet(f"train photos {SMALL} --plan").out
    written = Path("run/plan.txt").read_text()
    assert details[0] in plan
    assert details[0] in written
    assert written in plan


def test_runs_beside_photos_are_no_class(falconet, heap, trained):
    shutil.move("run", heap / "runs/a")
    Image.new("RGB", (20, 16)).save(heap / "runs/a/confusion.png")
    shutil.copytree(heap / "runs/a", heap / "mine")
    out = falconet(f"train photos {SMALL} --plan").out
    assert "photos: 2 classes (dark, light), 24 photos" in out
    assert "note: photos/mine: left out, because it holds runs\n" in out
    assert "note: photos/runs: left out, because it holds runs\n" in out


def test_photos_are_found_beside_their_runs(falconet, heap, trained):
    shutil.move("run", "runs/a")
    assert ".: 2 classes (dark, light), 24 photos" in falconet(f"train . {SMALL} --plan").out


def spoil(heap, *names):
    for name in names:
        (heap / name).write_bytes((heap / name).read_bytes()[:-30])


def test_a_run_on_names_that_are_not_utf_8_lives_as_any_other(falconet, heap):
    name, data = os.fsdecode(b"caf\xe9"), os.fsdecode(b"photos-\xe9")
    (heap / "dark").rename(heap / name)
    (heap / name / f"{name}.jpg").write_bytes(b"broken")
    heap.rename(data)
    weights = os.fsdecode(b"run/w\xe9.safetensors")
    answers = [
        falconet(f"train {data} {SMALL} --run-dir run"),
        falconet("restore run --epoch 2"),
        falconet("report run"),
        falconet("validate run --predictions answers.csv"),
        falconet(f"predict run {data}/light --csv --output predicted.csv"),
    ]
    shutil.copy("run/checkpoints/resnet10_folder_2/model.safetensors", weights)
    answers.append(falconet(f"validate {weights} {data} --model resnet10 --image-size 16 --output weights.csv"))
    assert [answer.code for answer in answers] == [0] * len(answers), answers
    plan = Path("run/plan.txt").read_text(encoding="utf-8")
    assert r"photos-\udce9: 2 classes (caf\udce9, light), 24 photos" in plan
    assert r"caf\udce9.jpg: not an image" in Path("run/bad_photos.txt").read_text(encoding="utf-8")
    assert name.encode("utf-8", "surrogateescape") in Path("answers.csv").read_bytes()
    assert r"w\udce9.safetensors," in Path("weights.csv").read_text(encoding="utf-8")
    refused = falconet(f"export run --output {data}-export")
    assert refused.code == 2
    assert "-export: its name is not UTF-8" in refused.err


def test_a_link_to_itself_is_no_traceback(falconet, trained):
    Path("round").symlink_to("round")
    lines = {
        "predict run photos --output round": "--output: cannot write round: Too many levels of symbolic links",
        "validate run --predictions round": "--predictions: cannot write round: Too many levels of symbolic links",
        "validate run round": "round: no such folder",
    }
    for line, words in lines.items():
        answer = falconet(line)
        assert (answer.code, words in answer.err) == (2, True), answer.err
        assert Path("round").is_symlink()
    assert falconet("average run --checkpoint-output-path round").code == 0  # in the link's place


def split(heap):
    """The names of the photos on each side."""
    splits = load_photos(heap)
    return [[source.name(number) for number in range(len(source))] for source in (splits.train, splits.validation)]


def test_broken_photos_are_listed_together_and_skipped(falconet, heap):
    train, validation = split(heap)
    spoil(heap, train[0], train[-1], validation[0])
    answer = falconet(f"train photos {SMALL} --run-dir run")
    assert answer.code == 0, answer.err
    assert "photos: 2 classes (dark, light), 21 photos (" in answer.out
    listed = [f"photos/{train[0]}: truncated (training)", f"photos/{train[-1]}: truncated (training)"]
    listed.append(f"photos/{validation[0]}: truncated (validation)")
    headline = "note: skipped 3 broken photos; bad_photos.txt in the run folder lists all\n"
    assert headline + "".join(f"  {line}\n" for line in listed) in answer.out
    assert (heap.parent / "run/bad_photos.txt").read_text().splitlines() == listed
    left_out = f"left out of the validation, because they cannot be read: 1 image: photos/{validation[0]}"
    lines = answer.out.splitlines()
    assert lines[lines.index(left_out) + 1] == ""  # before the summary, which ends with what to do next


def test_of_many_broken_photos_five_are_named(falconet, heap):
    train, _ = split(heap)
    spoil(heap, *train[:7])
    out = falconet(f"train photos {SMALL} --run-dir run --bad-images-allowed 7").out
    headline = "note: skipped 7 broken photos; bad_photos.txt in the run folder lists all\n"
    named = "".join(f"  photos/{name}: truncated (training)\n" for name in train[:5])
    assert f"{headline}{named}  and 2 more\n" in out
    assert len((heap.parent / "run/bad_photos.txt").read_text().splitlines()) == 7


def test_a_run_with_broken_photos_is_restored_bit_for_bit(falconet, heap, monkeypatch):
    train, _ = split(heap)
    spoil(heap, train[0], train[3])
    line = f"train photos {SMALL} --epoch 2"
    assert falconet(f"{line} --run-dir whole").code == 0
    runs.stop_at(monkeypatch, 6)
    assert falconet(f"{line} --run-dir part").code == 130
    monkeypatch.undo()
    monkeypatch.chdir(heap.parent)
    answer = falconet("restore part")
    assert answer.code == 0, answer.err
    runs.assert_bitwise(heap.parent / "part", heap.parent / "whole")


@pytest.mark.parametrize(("allowed", "code"), [("0", 2), ("1", 2), ("2", 0), ("5%", 2), ("20%", 0), ("auto", 0)])
def test_more_broken_photos_than_allowed_stop_the_run_before_it_starts(falconet, heap, allowed, code):
    train, _ = split(heap)
    spoil(heap, train[0], train[-1])
    answer = falconet(f"train photos {SMALL} --updates 1 --bad-images-allowed {allowed} --run-dir run")
    assert answer.code == code, answer.err
    if code:
        number = {"0": 0, "1": 1, "5%": 0}[allowed]
        assert answer.err.splitlines()[-1] == (
            f"falconet train: --bad-images-allowed: 2 of {len(train)} training photos are broken, {number} are allowed;"
            f" expected fewer, or 2 here: photos/{train[0]}: truncated; photos/{train[-1]}: truncated"
        )
        assert not (heap.parent / "run").exists()


def test_a_class_without_a_whole_photo_stops_the_run(falconet, heap):
    train, _ = split(heap)
    dark = [name for name in train if name.startswith("dark/")]
    spoil(heap, *dark)
    answer = falconet(f"train photos {SMALL} --bad-images-allowed 99")
    assert answer.code == 2
    assert answer.err.splitlines()[-1] == (
        f"falconet train: no photo of 'dark' is left to train on; the broken ones include photos/{dark[0]}: truncated"
    )


def test_broken_validation_photos_never_stop_a_run(falconet, heap):
    _, validation = split(heap)
    spoil(heap, *validation[1:])
    answer = falconet(f"train photos {SMALL} --bad-images-allowed 0")
    assert answer.code == 0, answer.err
    assert f"they cannot be read: {len(validation) - 1} image" in answer.out


def test_a_class_without_a_photo_to_validate_on_is_noted(falconet, heap):
    """Its validation photos are broken, or excluded; the accuracy says nothing of it."""
    note = "note: no photo of 1 class to validate on: 'dark'"
    splits = load_photos(heap)
    dark = [splits.validation.path(at) for at in np.flatnonzero(splits.validation.labels == 0)]
    assert note not in falconet(f"train photos {SMALL} --plan").out
    Path("left-out.txt").write_text("".join(f"dark/{path.name}\n" for path in dark))
    assert note in falconet(f"train photos {SMALL} --plan --exclude-list left-out.txt").out
    for path in dark:
        path.write_bytes(b"")
    assert note in falconet(f"train photos {SMALL} --plan").out


def test_labels_that_no_validation_photo_has_are_noted(falconet, heap):
    names = [path.relative_to(heap) for path in sorted(heap.rglob("*.jpg"))]
    rows = [f"{name},{name.parent}{'|rare' if number == 0 else ''}" for number, name in enumerate(names)]
    (heap / "labels.csv").write_text("\n".join(["photo,labels", *rows]))
    answer = falconet(f"train photos {SMALL} --plan")
    assert "note: no photo of 1 class to validate on: 'rare'" in answer.out, answer.err


def test_a_run_needs_a_photo_to_validate_on(falconet, heap):
    _, validation = split(heap)
    spoil(heap, *validation)
    answer = falconet(f"train photos {SMALL}")
    assert answer.code == 2
    assert answer.err.splitlines()[-1] == (
        f"falconet train: photos: no photos to validate on, because they are broken; the first: photos/{validation[0]}:"
        " truncated; expected some in val/, or at least two photos in each class"
    )


@pytest.mark.parametrize("given", ["many", "-1", "1.5", "1000%", "%"])
@pytest.mark.usefixtures("heap")
def test_the_number_of_bad_images_is_a_number_or_a_percentage(falconet, given):
    answer = falconet(f"train photos {SMALL} --bad-images-allowed {given}")
    assert answer.code == 2
    expected = "expected a number, a percentage such as 2%, or auto"
    assert f"--bad-images-allowed: got '{given}', {expected}" in answer.err


def test_a_fraction_for_photos_that_are_split_is_noted(falconet, image_folder):
    answer = falconet(f"train {image_folder} {SMALL} --val-fraction 0.5 --plan")
    assert "note: --val-fraction 0.5 has no effect: the photos are split already" in answer.out
    assert "split: 24 to train, 8 to validate\n" in answer.out


@pytest.mark.dist
@pytest.mark.usefixtures("two_cores", "forked_workers")
def test_replicas_check_the_photos_once_and_train_on_the_same(falconet, heap):
    train, _ = split(heap)
    spoil(heap, train[0])
    answer = falconet(f"train photos {SMALL} --micro-batch-size 2 --replicas 2 --run-dir run")
    assert answer.code == 0, answer.err
    assert answer.out.count("skipped 1 broken photo; ") == 1


def validated(answer):
    """How many images were measured."""
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("checkpoint "))
    return int(lines[at + 1].split()[lines[at].split().index("images")])


def test_validation_uses_the_photos_that_training_held_out(falconet, trained):
    held_out = int(re.search(r"(\d+) to validate", trained.out)[1])
    answer = falconet("validate --checkpoint-input-path run")
    assert validated(answer) == held_out
    share = f"{100 * held_out / 24:.0f} %, for --val-fraction 0.2"
    assert (
        answer.out.splitlines()[1] == f"split by file name: {24 - held_out} to train, {held_out} to validate ({share})"
    )
    assert validated(falconet("validate --checkpoint-input-path run --val-fraction 1")) == 24


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("place", ["new/test", "new"])
def test_validation_needs_no_photos_to_train_on_and_not_every_class(falconet, heap, place):
    target = heap.parent / "new/test/light"
    target.mkdir(parents=True)
    for number in range(5):
        shutil.copy(heap / f"light/{number}.jpg", target)
    assert validated(falconet(f"validate --checkpoint-input-path run --data-dir {place}")) == 5


@pytest.mark.usefixtures("trained")
def test_other_photos_are_the_second_word_and_leave_the_runs_table_as_it_is(falconet, heap):
    assert falconet("validate run photos").code == 0  # its own, though named
    own = Path("run/validation.csv").read_bytes()
    shutil.copytree(heap / "light", "new/light")
    answer = falconet("validate run new")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("new: 2 classes (dark, light), 12 photos (0 to 12 per class)")
    assert "note: --val-fraction 1 validates on all of them\n" in answer.out
    assert answer.out.endswith("written to run/validation-new.csv and run/validation-new.json\n")
    assert Path("run/validation.csv").read_bytes() == own
    assert validated(falconet("validate run new --val-fraction 1")) == 12


def test_photos_are_the_only_word_beside_published_weights(falconet):
    answer = falconet("validate photos --model resnet18 --pretrained nowhere.pth")
    assert (
        answer.err == "falconet validate: --pretrained: nowhere.pth: no such file or folder; expected a"
        " safetensors or torch file, a checkpoint or a run folder\n"
    )


@pytest.mark.usefixtures("trained")
def test_a_restored_run_notes_that_its_photos_have_changed(falconet, heap):
    assert "has changed" not in falconet("restore run --epoch 2").out
    before = load_photos(heap)
    for number in range(12, 20):
        Image.new("RGB", (20, 16), (40, number, 40)).save(heap / f"dark/{number}.jpg")
    found = load_photos(heap)
    answer = falconet("restore run --epoch 3")
    assert answer.code == 0, answer.err
    then = f"{len(before.train)} to train and {len(before.validation)} to validate then"
    now = f"{len(found.train)} and {len(found.validation)} now"
    assert f"note: photos has changed since the checkpoint was saved: {then}, {now};" in answer.out


@pytest.mark.usefixtures("trained")
def test_a_class_that_the_checkpoint_does_not_know_is_named(falconet, heap):
    (heap.parent / "new/test/grey").mkdir(parents=True)
    shutil.copy(heap / "light/1.jpg", heap.parent / "new/test/grey")
    answer = falconet("validate --checkpoint-input-path run --data-dir new")
    assert answer.code == 2
    assert "was trained on 2 classes, the data has 1: 'grey' is new and 'dark', 'light' are missing" in answer.err


def test_photos_that_a_table_names_and_are_not_there_are_missing(falconet, heap):
    rows = [f"{name}/{number}.jpg,{name}" for name in ("dark", "light") for number in range(14)]
    (heap / "labels.csv").write_text("\n".join(["file,label", *rows]))
    line = f"train photos {SMALL} --pretrained none"
    out = falconet(f"{line} --plan").out
    assert "note: skipped 4 missing photos; bad_photos.txt in the run folder lists all\n" in out
    assert "  photos/dark/12.jpg: missing (" in out
    (heap / "light/3.jpg").write_bytes(b"")
    assert "note: skipped 5 photos (4 missing, 1 broken); " in falconet(f"{line} --plan").out
    answer = falconet(f"{line} --bad-images-allowed 0")
    assert answer.code == 2
    assert re.search(
        r"--bad-images-allowed: \d of 2\d training photos are missing( or broken)?, 0 are allowed", answer.err
    )


def test_a_missing_device_is_reported_before_weights_are_fetched(falconet, heap, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = falconet("train photos --device cuda")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "device cuda: PyTorch finds no CUDA device here" in answer.err


def test_a_folder_without_photos_is_reported_before_weights_are_fetched(falconet):
    Path("empty").mkdir()
    answer = falconet("train empty")  # no test has a network, nor the weights
    assert answer.code == 2
    assert answer.err.startswith(
        "falconet train: empty: found no photos; expected a folder per class, such as empty/cat/"
    )


def test_a_start_that_settles_everything_opens_the_photos_once(falconet, heap, monkeypatch):
    opened = []
    plain = layout.load_photos
    monkeypatch.setattr(layout, "load_photos", lambda *given: opened.append(given) or plain(*given))
    line = "train photos --pretrained none --model resnet8-cifar --image-size 16 --threads 1 --device cpu"
    answer = falconet(f"{line} --updates 1 --lr auto")
    assert answer.code == 0, answer.err
    assert len(opened) == 1


def only_validated(root):
    (root / "val").mkdir()
    for name in ("dark", "light"):
        (root / name).rename(root / "val" / name)


MISTAKES = {
    "one class": (
        lambda root: shutil.rmtree(root / "light"),
        "photos: all photos are of one class, 'dark'; expected at least two, each in a folder of its own",
    ),
    "only validation": (
        only_validated,
        "photos: no photos to train on, only 24 to validate; expected train/ as well, or `falconet validate`",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_folder_that_cannot_be_trained_on_is_answered_in_one_line(falconet, heap, change, message):
    change(heap)
    answer = falconet(f"train photos {SMALL}")
    assert answer.code == 2
    assert answer.err.splitlines()[-1] == f"falconet train: {message}"


@pytest.mark.parametrize("given", ["0", "1.5", "-0.1"])
@pytest.mark.usefixtures("heap")
def test_a_fraction_to_validate_is_more_than_nothing(falconet, given):
    answer = falconet(f"train photos {SMALL} --val-fraction {given}")
    assert answer.code == 2
    assert "--val-fraction: got" in answer.err
    assert "expected a number, more than 0 and at most 1" in answer.err
