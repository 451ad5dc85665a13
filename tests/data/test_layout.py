"""How layouts are recognised, and how photos are split."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import layouts
from falconet.data import layout
from falconet.data.layout import Division
from falconet.data.sources import folder
from falconet.errors import DataError


def photos(root, *names, count=1):
    """Write photos with these names, or `count` into each folder whose name ends with a slash."""
    for name in names:
        for path in [root / name] if not name.endswith("/") else [root / name / f"{n}.png" for n in range(count)]:
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4)).save(path, "PNG")
    return root


def names(source):
    return [source.name(number) for number in range(len(source))]


@pytest.mark.parametrize(("name", "made"), layouts.LAYOUTS.items())
def test_every_layout_is_recognised(tmp_path, name, made):
    splits = layout.load_photos(made(layouts.class_folders(tmp_path / "folders"), tmp_path / "made"))
    assert (splits.layout, len(splits.train), len(splits.validation)) == (name, 18, 6)


def test_a_folder_without_photos_reports_what_was_expected(tmp_path):
    with pytest.raises(DataError) as caught:
        layout.load_photos(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: found no photos; expected a folder per class, such as {tmp_path}/cat/ and {tmp_path}/dog/, or"
        " such folders in train/ and val/, a table of photos and labels, TFRecords, tar archives or packed shards"
    )


def test_a_forbidden_folder_is_reported_in_one_line(tmp_path, monkeypatch):
    def refused(place):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError) as caught:
        layout.load_photos(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read (Permission denied)"


def test_a_folder_that_may_not_be_entered_is_named_itself(tmp_path, monkeypatch):
    """Looking for the files of a run in it fails first."""

    def refused(path, **_):
        if path == tmp_path:
            return False  # a folder
        raise PermissionError(13, "Permission denied", str(path))

    def unlistable(place):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(Path, "is_file", refused)
    monkeypatch.setattr(os, "scandir", unlistable)
    with pytest.raises(DataError) as caught:
        layout.load_photos(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read (Permission denied)"


@pytest.mark.parametrize("validation", ["val", "valid", "validation", "test", "Validation"])
@pytest.mark.parametrize("train", ["train", "Training"])
def test_the_parts_may_have_any_of_their_usual_names(tmp_path, train, validation):
    photos(tmp_path, f"{train}/cat/", f"{train}/dog/", count=3)
    photos(tmp_path, f"{validation}/cat/", count=2)
    splits = layout.load_photos(tmp_path)
    assert (len(splits.train), len(splits.validation), splits.held_out) == (6, 2, None)


def test_validation_is_used_and_test_is_not(tmp_path):
    photos(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/2.png", "val/dog/2.png", "test/cat/3.png")
    splits = layout.load_photos(tmp_path)
    assert names(splits.validation) == ["cat/2.png", "dog/2.png"]
    assert splits.notes == (f"{tmp_path}/test: unused; val/ validates",)


@pytest.mark.parametrize("part", ["val", "test"])
def test_photos_to_validate_need_none_to_train_on(tmp_path, part):
    photos(tmp_path, f"{part}/cat/", f"{part}/dog/", count=3)
    splits = layout.load_photos(tmp_path)
    assert (len(splits.train), len(splits.validation), splits.class_names) == (0, 6, ("cat", "dog"))


@pytest.mark.parametrize("inner", ["", "train/", "photos/", "a/b/"])
def test_unsplit_class_folders_are_split(tmp_path, inner):
    photos(tmp_path, f"{inner}cat/", f"{inner}dog/", count=50)
    splits = layout.load_photos(tmp_path)
    assert splits.class_names == ("cat", "dog")
    assert len(splits.train) + len(splits.validation) == 100
    assert splits.held_out == 0.2
    for label in range(2):
        assert 4 <= np.count_nonzero(splits.validation.labels == label) <= 16
    assert not {*names(splits.train)} & {*names(splits.validation)}


def test_a_wrapper_folder_is_entered_and_noted(tmp_path):
    photos(tmp_path, "photos/cat/", "photos/dog/", "__MACOSX/cat/", count=2)
    (tmp_path / ".DS_Store").write_text("")
    splits = layout.load_photos(tmp_path)
    assert splits.class_names == ("cat", "dog")
    assert splits.notes == (f"the photos are in {tmp_path}/photos, the only folder in {tmp_path}",)


@pytest.mark.parametrize("validation", [True, False])
def test_a_wrapper_folder_may_be_divided(tmp_path, validation):
    photos(tmp_path, "photos/train/cat/", "photos/train/dog/", count=10)
    if validation:
        photos(tmp_path, "photos/valid/cat/", "photos/valid/dog/", count=2)
    splits = layout.load_photos(tmp_path)
    assert len(splits.train) + len(splits.validation) == (24 if validation else 20)
    assert (splits.held_out is None) == validation
    assert splits.notes == (f"the photos are in {tmp_path}/photos, the only folder in {tmp_path}",)


def test_a_dataset_among_the_classes_is_noted(tmp_path):
    photos(tmp_path, "other/", "split/train/cat/", "split/val/cat/", count=3)
    expected = f"{tmp_path}/split: a class here, but it holds train/ and val/; did you mean `falconet train"
    assert layout.load_photos(tmp_path).notes == (f"{expected} {tmp_path}/split`?",)


def test_a_photo_and_a_run_are_no_folders_of_photos(tmp_path):
    photos(tmp_path, "one.png")
    with pytest.raises(DataError, match=r"one\.png: is a photo; expected the folder"):
        layout.load_photos(tmp_path / "one.png")
    for name in ("config.yaml", "plan.txt"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"{tmp_path}: is a run folder; expected photos, or `falconet restore"):
        layout.load_photos(tmp_path)


def test_a_class_may_be_called_test(tmp_path):
    photos(tmp_path, "control/", "test/", count=5)
    assert layout.load_photos(tmp_path).class_names == ("control", "test")


def test_photos_in_train_and_val_without_class_folders_have_no_classes(tmp_path):
    photos(tmp_path, "train/", "val/", count=5)
    with pytest.raises(DataError, match=r"train: 10 photos, but no classes; expected a folder per class"):
        layout.load_photos(tmp_path)


def test_the_same_photo_is_always_on_the_same_side(tmp_path):
    photos(tmp_path, "cat/", "dog/", count=60)
    before = {*names(layout.load_photos(tmp_path).validation)}
    shutil.rmtree(tmp_path / ".falconet-index")
    for number in range(0, 30, 3):
        (tmp_path / f"cat/{number}.png").unlink()
    photos(tmp_path, "cat/x.png", "rat/", count=60)
    splits = layout.load_photos(tmp_path)
    after, kept = {*names(splits.validation)}, {*names(splits.train), *names(splits.validation)}
    assert after & before == before & kept
    assert {name for name in after - before if not name.startswith("rat/")} <= {"cat/x.png"}


def test_another_seed_or_share_divides_differently(tmp_path):
    photos(tmp_path, "cat/", "dog/", count=40)
    sides = [
        frozenset(names(layout.load_photos(tmp_path, Division(share, seed)).validation))
        for share, seed in ((0.2, 0), (0.2, 1), (0.5, 0), (1.0, 0))
    ]
    assert len({*sides}) == 4
    assert sides[0] < sides[2] < sides[3]  # a larger share adds photos and moves none back
    assert len(sides[3]) == 80


@pytest.mark.parametrize("share", [0.01, 0.2, 0.99])
def test_every_class_of_two_photos_has_one_on_each_side(tmp_path, share):
    photos(tmp_path, *(f"{number:02}/" for number in range(30)), count=2)
    photos(tmp_path, "single/1.png")
    splits = layout.load_photos(tmp_path, Division(share))
    assert np.bincount(splits.train.labels, minlength=31).tolist() == [1] * 31
    assert np.bincount(splits.validation.labels, minlength=31).tolist() == [1] * 30 + [0]


def test_what_people_have_beside_their_photos_is_passed_over(tmp_path, capfd):
    photos(tmp_path, "Meine Katzen/a b.JPG", "Meine Katzen/sub folder/ü.PNG", "犬/1.jpeg", "犬/2.webp")
    photos(tmp_path, "@eaDir/x.jpg", "__MACOSX/y.jpg", "loose.jpg", "犬/._1.jpeg")
    (tmp_path / "empty").mkdir()
    for name in ("Thumbs.db", ".DS_Store", "犬/notes.txt", "犬/desktop.ini"):
        (tmp_path / name).write_text("x")
    for name in ("犬/1.HEIC", "犬/2.heic", "犬/clip.mp4"):
        (tmp_path / name).write_text("x")
    (tmp_path / "犬/3.png").symlink_to(tmp_path / "loose.jpg")
    splits = layout.load_photos(tmp_path, Division(0.5))
    assert splits.class_names == ("Meine Katzen", "犬")
    assert {*names(splits.train), *names(splits.validation)} == {
        "Meine Katzen/a b.JPG", "Meine Katzen/sub folder/ü.PNG", "犬/1.jpeg", "犬/2.webp", "犬/3.png",
    }  # fmt: skip
    assert splits.notes == (
        f"{tmp_path}/empty: no photo in it, so it is not a class",
        f"{tmp_path}: 1 photo is in no class folder, and skipped",
        f"{tmp_path}: skipped 2 .heic, 1 .mp4, which Pillow cannot read; convert photos among them to JPEG",
    )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("classes", "shown"),
    [
        (("Cat", "cat", "dog"), "'Cat' and 'cat'"),
        (("CAT ", "Cat", "cat"), "'CAT ', 'Cat' and 'cat'"),
        (("sports car", "sports_car", "dog"), "'sports car' and 'sports_car'"),
        (("a\u0308ffle", "\u00e4ffle"), "'a\u0308ffle' and '\u00e4ffle'"),  # one word, as macOS and Linux write it
        (
            [letter * times for letter in "abcdAB" for times in (1, 2)],
            "'A' and 'a'; 'AA' and 'aa'; 'B' and 'b'; 1 more",
        ),
    ],
)
def test_classes_with_nearly_the_same_name_are_noted(tmp_path, classes, shown):
    photos(tmp_path, *(f"{name}/" for name in classes), count=2)
    (note,) = layout.load_photos(tmp_path).notes
    assert note == f"{tmp_path}: classes with nearly the same name are trained as different ones: {shown}"


def test_labels_with_nearly_the_same_name_are_noted(tmp_path):
    photos(tmp_path, *(f"{number}.jpg" for number in range(4)))
    (tmp_path / "labels.csv").write_text("photo,label\n0.jpg,cat\n1.jpg,Cat\n2.jpg,cat\n3.jpg,Cat\n")
    (note,) = layout.load_photos(tmp_path).notes
    assert note == f"{tmp_path}: classes with nearly the same name are trained as different ones: 'Cat' and 'cat'"


@pytest.mark.parametrize("name", ["packed shards", "TFRecords", "tar archives"])
@pytest.mark.parametrize("part", ["", "train"])
def test_shards_say_that_they_hide_class_folders(tmp_path, name, part):
    """Photos added to these folders would otherwise be left out without a word."""
    made = layouts.LAYOUTS[name](layouts.class_folders(tmp_path / "folders"), tmp_path / "made")
    assert not layout.load_photos(made).notes
    photos(made / part, "cat/old/", "dog/", count=2)
    splits = layout.load_photos(made)
    if part and name != "packed shards":  # class folders that are split come first
        assert splits.layout == "class folders"
        return
    first = made / part / "cat"
    assert splits.layout == name
    assert splits.notes == (f"{first} and other class folders: unused, because the {name} in {made} are read instead",)


@pytest.mark.parametrize("inner", ["", "train", "images"])
def test_photos_without_classes_show_the_expected_layout(tmp_path, inner):
    photos(tmp_path / inner, "1.jpg", "2.jpg", "3.jpg")
    if inner == "images":
        (tmp_path / "more").mkdir()
    with pytest.raises(DataError) as caught:
        layout.load_photos(tmp_path / inner if inner == "images" else tmp_path)
    place = tmp_path / inner
    assert str(caught.value) == (
        f"{place}: 3 photos, but no classes; expected a folder per class, such as {place}/cat/ and {place}/dog/, or a"
        " table of photos and labels beside them, such as labels.csv"
    )


@pytest.mark.parametrize("name", ["labels.xlsx", "Labels.ODS"])
def test_a_spreadsheet_is_to_be_saved_as_a_table(tmp_path, name):
    photos(tmp_path, "1.jpg", "2.jpg")
    (tmp_path / name).write_bytes(b"PK\3\4")
    with pytest.raises(DataError, match=rf"such as labels\.csv; {name} is a spreadsheet, save it as CSV$"):
        layout.load_photos(tmp_path)
    with pytest.raises(DataError, match=rf"{name}: is a spreadsheet; expected a table of photos and labels; save it"):
        layout.load_photos(tmp_path / name)


def test_a_folder_of_other_files_says_what_they_are(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.heic").write_text("x")
    with pytest.raises(
        DataError, match=r"skipped 1 \.heic, which Pillow cannot read; convert photos among them to JPEG"
    ):
        layout.load_photos(tmp_path)


def test_the_training_part_alone_is_noted_with_the_part_beside_it(tmp_path):
    photos(tmp_path, "train/cat/", "train/dog/", "val/cat/", count=3)
    splits = layout.load_photos(tmp_path / "train")
    assert splits.notes == (
        f"{tmp_path}/val: unused, because it is beside the folder given; {tmp_path} would validate on it",
    )


def test_the_second_start_does_not_list_the_photos_again(tmp_path, monkeypatch):
    root = photos(tmp_path / "photos", "cat/", "dog/", count=3)
    for path in (*root.rglob("*"), root):
        os.utime(path, ns=(10**18, 10**18))
    searches, plain = [], folder.indexed

    def indexed(place, *, search, **more):
        return plain(place, search=lambda: searches.append(place) or search(), **more)

    monkeypatch.setattr(folder, "indexed", indexed)
    first = layout.load_photos(root)
    assert len(searches) == 1
    assert names(layout.load_photos(root).train) == names(first.train)
    assert len(searches) == 1


def test_a_new_class_is_seen_beside_an_index(tmp_path):
    photos(tmp_path, "cat/", "dog/", count=3)
    layout.load_photos(tmp_path)
    photos(tmp_path, "rat/", count=3)
    assert layout.load_photos(tmp_path).class_names == ("cat", "dog", "rat")
