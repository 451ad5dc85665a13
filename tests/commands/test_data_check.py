"""`falconet data check`: what it prints, writes and exits with, and training without the photos that it lists."""

import json
import os
import re
from pathlib import Path

import pytest
from PIL import Image

import layouts
import odd_photos
from falconet import writing
from falconet.commands import data_check
from falconet.data import findings, inspection


@pytest.fixture
def odd(tmp_path):
    return odd_photos.build(tmp_path / "odd")


@pytest.fixture
def fine(tmp_path):
    return layouts.class_folders(tmp_path / "photos", ending=".jpg")


def test_a_sound_dataset_is_said_to_be_one(falconet, fine):
    for path in fine.rglob("*_1.jpg"):  # one of them is a PNG
        path.unlink()
    answer = falconet("data check photos")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[0] == (
        "photos: 18 photos of 3 classes, 60 x 50 to 95 x 60 pixels, class folders; 15 to train, 3 to validate"
    )
    assert lines[1].startswith("decoded all of them in ")
    assert lines[2:] == ["nothing found: every photo is complete, ordinary and present only once"]
    assert not Path("photos-check.txt").exists()


def test_everything_is_in_the_table_the_list_and_the_json(falconet, odd):
    answer = falconet("data check odd --json check.json")
    assert answer.code == 1, answer.err
    table = {line[2:].split("  ")[0].strip() for line in answer.out.splitlines() if line.startswith("  ")}
    assert {"broken: truncated", "CMYK", "same file in train and val", "class without a photo in val"} <= table
    assert "7 photos of 'cat' to train on, 2 of 'bird', 3.5 times as many; `--sampler balanced`" in answer.out
    assert "note: odd/train/dog/pipe.jpg: passed over, a pipe" in answer.out
    assert "note: 1 hidden name passed over" in answer.out
    assert "note: 1 other file passed over: 1 .txt" in answer.out
    assert "odd-check.txt lists every finding" in answer.out
    rows = [line.split("\t") for line in Path("odd-check.txt").read_text().splitlines() if not line.startswith("#")]
    listed = {(row[0], os.path.relpath(row[1], "odd")) for row in rows}
    assert {(f"broken-{kind}", path) for path, kind in odd_photos.BROKEN.items()} <= listed
    assert {(kind, path) for path, kind in odd_photos.REMARKS.items()} <= listed
    assert {("leak-1", "train/dog/a.jpg"), ("leak-1", "val/cat/same-as-train.jpg")} <= listed
    found = json.loads(Path("check.json").read_text())
    assert (found["photos"], found["checked"], found["complete"]) == (24, 24, True)
    named = {photo["path"] for kind in found["broken"].values() for photo in kind["photos"]}
    assert named == {f"odd/{path}" for path in odd_photos.BROKEN}
    assert found["classes"]["bird"] == {"train": 2, "val": 0}
    assert [photo["part"] for photo in found["copies"]["leak"][0]] == ["train", "val"]


def test_the_example_of_copies_shows_what_is_stated_of_them(falconet, tmp_path):
    (tmp_path / "photos/train/cat").mkdir(parents=True)
    for place in ("train/bird", "train/dog", "val/bird", "val/dog", "val/cat"):
        (tmp_path / "photos" / place).mkdir(parents=True)
    photo = layouts.encoded(odd_photos.sample("chelsea"))
    for path in ("train/bird/1", "train/bird/2", "train/dog/3", "val/dog/4"):
        (tmp_path / f"photos/{path}.jpg").write_bytes(photo)
    for number, name in enumerate(("coffee", "astronaut", "rocket")):
        place = ("train/cat", "val/bird", "val/cat")[number]
        (tmp_path / f"photos/{place}/a.jpg").write_bytes(layouts.encoded(odd_photos.sample(name)))
    out = falconet("data check photos").out
    assert "same file in train and val       1  photos/train/bird/1.jpg = photos/val/dog/4.jpg\n" in out
    assert "same file under several classes  1  photos/train/bird/1.jpg = photos/train/dog/3.jpg\n" in out


def test_every_photo_cut_at_256_kib_is_found_and_named(falconet, tmp_path):
    root = layouts.class_folders(tmp_path / "photos", train=40, ending=".jpg")
    whole = odd_photos.large_jpeg(1)
    cut = sorted((root / "train").rglob("*.jpg"))[:112]
    for path in cut:
        path.write_bytes(whole[: odd_photos.CUT])
    answer = falconet("data check photos --exclude-list broken.txt")
    assert answer.code == 1
    assert re.search(r"^  broken: truncated +112  photos/train/\S+, photos/train/\S+ and 110 more$", answer.out, re.M)
    found = Path("photos-check.txt").read_text().splitlines()
    listed = [line for line in found if line.startswith("broken-truncated")]
    assert [line.split("\t")[1] for line in listed] == [os.path.relpath(path) for path in cut]
    lines = Path("broken.txt").read_text().splitlines()
    assert lines[1:] == [os.path.relpath(path, "photos") for path in cut]
    gone = [line for line in found if line.startswith("broken-class-only-in-val")]  # no whole photo is left to train on
    assert gone == [f"broken-class-only-in-val\t{name}" for name in layouts.CLASSES[:2]]


TRAIN = "--model resnet8-cifar --image-size 24 --micro-batch-size 4 --warmup-epoch 0 --threads 1 --device cpu --epoch 1"


def test_training_and_what_follows_leave_out_what_the_check_listed(falconet, odd):
    (odd / "train/dog/b.jpg").write_bytes(layouts.encoded(layouts.photo(50, width=120)))
    answer = falconet("data check odd --exclude-list broken.txt --exclude-duplicates exact")
    assert "broken.txt lists 6 broken photos and 2 copies" in answer.out
    with Path("broken.txt").open("a") as file:
        file.write("train/cat/long-gone.jpg\n")
    refused = falconet(f"train odd {TRAIN} --config none --run-dir refused --bad-images-allowed 0")
    assert refused.code == 2
    answer = falconet(f"train odd {TRAIN} --run-dir r --bad-images-allowed 0 --exclude-list broken.txt")
    assert answer.code == 0, answer.err
    assert "note: left out 8 photos that broken.txt lists" in answer.out
    assert "note: broken.txt: 1 entry matches no photo of odd: 'train/cat/long-gone.jpg'" in answer.out
    assert "13 to train, 4 to validate" in answer.out
    config = Path("r/config.yaml").read_text()
    assert re.search(r"^exclude-list: .*broken.txt  # command line$", config, re.M)
    answer = falconet("validate r")
    assert answer.code == 0, answer.err
    answer = falconet("restore r --epoch 2 --run-dir again")
    assert answer.code == 0, answer.err
    assert "has changed since" not in answer.out
    assert "note: left out 8 photos that broken.txt lists" in answer.out
    Path("broken.txt").unlink()
    gone = falconet("restore r --epoch 2 --run-dir third")
    assert (gone.code, "--exclude-list: broken.txt: no such file; expected" in gone.err) == (2, True)
    assert gone.err.count("falconet restore: ") == 1
    elsewhere = odd_photos.build(Path("elsewhere"))
    (elsewhere / "val/dog/cut.jpg").unlink()
    assert falconet("validate r elsewhere").code == 0


def test_training_is_recommended_only_where_it_works(falconet, fine):
    broken = fine / "train" / layouts.CLASSES[0] / "broken.jpg"
    broken.write_bytes(b"no photo")
    ends = "broken.txt lists 1 broken photo; `falconet train photos --exclude-list broken.txt` leaves it out"
    assert falconet("data check photos --exclude-list broken.txt").out.endswith(f"{ends}\n")
    split = "--val-fraction 0.3 --seed 5"
    answer = falconet(f"data check photos --exclude-list broken.txt {split}")
    assert f"`falconet train photos --exclude-list broken.txt {split}`" in answer.out
    (fine / "val/heron").mkdir()
    broken.replace(fine / "val/heron/broken.jpg")
    other = next((fine / "val" / layouts.CLASSES[0]).iterdir())
    (fine / "val/heron/whole.jpg").write_bytes(other.read_bytes())
    answer = falconet("data check photos --exclude-list broken.txt")
    why = "photos/val/heron: photos/train has no class 'heron'; expected the same classes in both"
    assert answer.out.endswith(f"{ends} once this is fixed: {why}\n")
    assert falconet(f"train photos {TRAIN} --exclude-list broken.txt").err == f"falconet train: {why}\n"


def test_a_class_that_the_list_would_empty_is_named(falconet, fine):
    for photo in (fine / "train" / layouts.CLASSES[0]).iterdir():
        photo.write_bytes(b"no photo")
    answer = falconet("data check photos --exclude-list broken.txt")
    why = f"--exclude-list: broken.txt: lists every training photo of '{layouts.CLASSES[0]}'; expected some to be left"
    assert answer.out.endswith(f" once this is fixed: {why}\n")


def test_a_line_break_in_a_name_stays_on_its_line(falconet, fine):
    folder = fine / "train" / layouts.CLASSES[0]
    (folder / "two\nlines.jpg").write_bytes(b"no photo")
    (fine / "train/empty\nfolder").mkdir()
    answer = falconet("data check photos")
    assert r"/two\nlines.jpg" in answer.out
    assert r"train/empty\nfolder" in answer.out
    assert not [line for line in answer.out.splitlines() if line.startswith(("lines.jpg", "folder"))]


def test_names_with_odd_bytes_and_markup_are_checked_listed_and_left_out(falconet, fine):
    names = ["<img src=x onerror=alert(1)>.jpg", "line\nbreak.jpg", os.fsdecode(b"caf\xe9.jpg"), "\x1b[31mred.jpg"]
    for name in names:
        (fine / "train" / layouts.CLASSES[0] / name).write_bytes(b"no photo")
    answer = falconet("data check photos --exclude-list broken.txt --json c.json --html c.html")
    assert answer.code == 1, answer.err
    assert "\x1b" not in answer.out
    found = json.loads(Path("c.json").read_text())["broken"]["not-an-image"]["photos"]
    assert {Path(photo["path"]).name for photo in found} == {*names}
    page = Path("c.html").read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    answer = falconet("data check photos")
    assert falconet("data pack photos packed --exclude-list broken.txt").code == 0


def test_ctrl_c_reports_what_was_found_so_far(falconet, odd, monkeypatch):
    plain = inspection.inspect
    monkeypatch.setattr(inspection, "PORTION", 4)

    def interrupted(sources, *, workers):
        for number, each in enumerate(plain(sources, workers=1)):
            if number == 3:
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(data_check, "inspect", interrupted)
    answer = falconet("data check odd --json check.json --exclude-list broken.txt")
    assert answer.code == 130
    assert "stopped after 16 of 24 photos; the following is about those" in answer.out
    found = json.loads(Path("check.json").read_text())
    assert (found["checked"], found["complete"]) == (16, False)
    assert "train/cat/cut.jpg" in Path("broken.txt").read_text()
    assert "# incomplete: the check was stopped" in Path("broken.txt").read_text()


def test_photos_without_classes_are_checked(falconet):
    Path("flat").mkdir()
    Path("flat/a.jpg").write_bytes(layouts.encoded(layouts.photo(1)))
    Path("flat/b.jpg").write_bytes(layouts.encoded(layouts.photo(1)))
    Path("flat/c.jpg").write_bytes(b"")
    answer = falconet("data check flat")
    assert answer.code == 1, answer.err
    assert "same file several times" in answer.out
    assert "broken: empty file" in answer.out


def test_tables_with_several_labels_are_checked(falconet):
    Path("t/images").mkdir(parents=True)
    rows = ["path,labels"]
    for number in range(8):
        Path(f"t/images/{number}.jpg").write_bytes(layouts.encoded(layouts.photo(number)))
        rows.append(f"images/{number}.jpg,{'cat|outdoor' if number % 2 else 'dog'}")
    Path("t/images/5.jpg").write_bytes(Path("t/images/4.jpg").read_bytes())
    Path("t/images/6.jpg").write_bytes(b"")
    rows.append("images/gone.jpg,dog")
    Path("t/labels.csv").write_text("\n".join(rows))
    for source in ("t", "t/labels.csv"):
        answer = falconet(f"data check {source} --json c.json")
        assert answer.code == 1, answer.err
        found = json.loads(Path("c.json").read_text())
        assert [photo["class"] for photo in found["copies"]["conflict"][0]] == ["dog", "cat | outdoor"]
        assert {kind: len(own["photos"]) for kind, own in found["broken"].items()} == {"empty": 1, "missing": 1}


def test_an_unreadable_photo_is_broken(falconet, fine, monkeypatch):
    path = sorted(fine.rglob("*_1.jpg"))[1]  # a PNG, which Pillow opens
    plain = inspection.open_regular

    def refused(asked):
        if asked == path:
            raise PermissionError(13, "Permission denied", str(asked))
        return plain(asked)

    monkeypatch.setattr(inspection, "open_regular", refused)
    answer = falconet(f"data check {fine}")
    assert answer.code == 1
    assert "broken: cannot be read" in answer.out
    assert f"{path} (Permission denied)" in answer.out


@pytest.mark.parametrize("option", ["output", "json", "html", "exclude-list"])
def test_a_link_in_the_place_of_a_report_is_refused_before_photos_are_decoded(falconet, odd, monkeypatch, option):
    monkeypatch.setattr(data_check, "inspect", lambda *_, **__: pytest.fail("decoded"))
    Path("link").symlink_to("precious")
    answer = falconet(f"data check odd --{option} link")
    assert (answer.code, answer.out) == (2, "")
    words = f"link: is a symbolic link; refusing to write through it; remove it or choose another --{option}\n"
    assert answer.err.endswith(words)


def test_the_report_is_shown_even_if_it_cannot_be_written(falconet, odd, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "odd-check.txt")

    monkeypatch.setattr(writing, "replace", full)
    answer = falconet("data check odd")
    assert (answer.code, "the disk is full (odd-check.txt)" in answer.err) == (2, True)
    assert "broken: empty file" in answer.out


def run_folder():
    Path("runs/r").mkdir(parents=True)
    for name in ("config.yaml", "plan.txt"):
        Path("runs/r", name).write_text("")
    return "runs/r"


def photo_file():
    layouts.photo(1).save("one.jpg")
    return "one.jpg"


def empty_folder():
    Path("empty").mkdir()
    return "empty"


WRONG = {
    lambda: "": "expected a folder of photos, as in `falconet data check photos`",
    lambda: "nowhere": "nowhere: no such folder; expected photos in a folder per class",
    run_folder: "runs/r: is a run folder; expected photos, or `falconet restore runs/r`",
    photo_file: "one.jpg: is a photo; expected the folder with a folder per class",
    empty_folder: "empty: found no photos; expected a folder per class",
    lambda: f"{empty_folder()} --exclude-duplicates near": "--exclude-duplicates: needs --exclude-list",
    lambda: f"{empty_folder()} --json x --html x": "--json: x is also --html; expected another file",
    lambda: f"{empty_folder()} --html {photo_file()}": "--html: one.jpg would replace a photo",
    lambda: f"{empty_folder()} --html {photo_file()}/x": "--html: cannot write to one.jpg/x: File exists",
}


@pytest.mark.parametrize(("make", "words"), WRONG.items(), ids=range(len(WRONG)))
def test_a_mistake_is_one_line(falconet, make, words):
    answer = falconet(f"data check {make()}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert f"falconet data check: {words}" in answer.err


def test_a_list_of_another_program_is_not_replaced(falconet, odd):
    Path("odd-check.txt").write_text("mine")
    answer = falconet("data check odd")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "odd-check.txt: exists, and is not from `falconet data check`; expected --output" in answer.err
    assert Path("odd-check.txt").read_text() == "mine"
    assert falconet("data check odd --output other.txt").code == 1
    assert falconet("data check odd --output other.txt").code == 1


def test_limits_are_options(falconet, fine):
    answer = falconet("data check photos --smallest-side 55 --largest-ratio 1.5 --largest-megapixels 0.005")
    assert answer.code == 0, answer.err
    for words in ("a side below 55 pixels", "one side over 1.5 times the other", "more than 0.005 megapixels"):
        assert words in answer.out


def test_the_checks_threshold_is_the_options_default():
    assert findings.Limits().most_bits == data_check.DataCheck.near_bits
    assert findings.Limits().least_side == data_check.DataCheck.smallest_side
    assert Image.MAX_IMAGE_PIXELS is not None


def test_the_kinds_of_other_files_add_up(falconet, fine):
    for ending in ("csv", "db", "heic", "ini", "mp4", "txt", "xml"):
        (fine / f"train/other.{ending}").write_text("x")
    answer = falconet("data check photos")
    assert "note: 7 other files passed over: 1 .csv, 1 .db, 1 .heic, 1 .ini, 1 .mp4 and 2 of other kinds" in answer.out
