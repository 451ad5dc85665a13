"""Class folders: what is listed, what is refused, and their md5."""

import hashlib
import os
import shutil

import pytest
from PIL import Image

from falconet.data import layout
from falconet.data.sources import folder
from falconet.data.sources.folder import folder_md5, is_imagenet
from falconet.errors import DataError

ENDLESS = "x" * 300  # no file has such a name: of a link to it, the system says neither yes nor no


def image(root, name):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(path)


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "photos"
    for name in ("train/dog/2.png", "train/dog/1.JPEG", "train/cat/b/1.webp", "train/cat/a.gif", "val/dog/9.bmp"):
        image(root, name)
    (root / "train/dog/notes.txt").write_text("not an image")
    (root / "train/dog/.hidden.png").write_text("")
    (root / "train/.cache").mkdir()
    return root


def paths(source):
    return [source.path(index).relative_to(source.root).as_posix() for index in range(len(source))]


def test_images_are_listed_by_class_and_name(root):
    splits = layout.load_photos(root)
    assert splits.class_names == ("cat", "dog")
    assert paths(splits.train) == ["cat/a.gif", "cat/b/1.webp", "dog/1.JPEG", "dog/2.png"]
    assert splits.train.labels.tolist() == [0, 0, 1, 1]
    assert splits.native_size is None


def test_validation_has_the_numbers_of_the_training_classes(root):
    validation = layout.load_photos(root).validation
    assert paths(validation) == ["dog/9.bmp"]
    assert validation.labels.tolist() == [1]
    assert validation.class_names == ("cat", "dog")


def test_the_validation_folder_may_have_its_full_name(root):
    (root / "val").rename(root / "validation")
    assert len(layout.load_photos(root).validation) == 1


def test_a_link_to_a_parent_folder_does_not_loop(root):
    (root / "train/cat/again").symlink_to(root / "train/cat")
    assert len(layout.load_photos(root).train) == 4


def test_only_files_are_listed_and_other_entries_are_named(root, capfd):
    os.mkfifo(root / "train/dog/3.jpg")
    (root / "train/dog/4.jpg").symlink_to("nowhere")  # listed, so that the reader names it
    (root / "train/dog/5.jpg").symlink_to("5.jpg")  # likewise
    (root / "train/dog/6.jpg").symlink_to("3.jpg")
    (root / "train/dog/7.jpg").symlink_to("/dev/zero")
    (root / "train/dog/8.jpg").symlink_to(root / "val/dog/9.bmp")
    (root / "train/dog/9.jpg").symlink_to(root / "val/dog")
    (root / "train/dog/above").symlink_to("..")
    (root / "train/dog/readme").symlink_to("notes.txt")
    listed = ["dog/1.JPEG", "dog/2.png", "dog/4.jpg", "dog/5.jpg", "dog/8.jpg"]
    assert paths(layout.load_photos(root).train)[2:] == listed
    dog = root / "train/dog"
    assert capfd.readouterr().err.splitlines() == [
        f"{dog}/3.jpg: skipped, a pipe",
        f"{dog}/6.jpg: skipped, a link to a pipe",
        f"{dog}/7.jpg: skipped, a link to a device",
        f"{dog}/9.jpg: skipped, a link to a folder",
        f"{dog}/above: skipped, a link to a folder",
    ]


def test_only_the_first_skipped_entries_are_named(root, capfd):
    for number in range(10, 40):
        os.mkfifo(root / f"train/dog/{number}.jpg")
    layout.load_photos(root)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[-1] == f"{root}/train: 25 more were skipped, because they are not files"


def test_an_unreadable_folder_is_reported_in_one_line(root, monkeypatch):
    def refused(place, prefix, listing):
        raise PermissionError(13, "Permission denied", place)

    monkeypatch.setattr(folder, "image_names", refused)
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root}/train/cat: cannot be read (Permission denied)"


@pytest.mark.parametrize("place", ["train/cat", "train/cat/b"])
def test_a_folder_that_cannot_be_listed_is_refused_wherever_it_is(root, monkeypatch, place):
    plain = os.scandir

    def scanned(path):
        if str(path) == f"{root}/{place}":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scanned)
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root}/{place}: cannot be read (Permission denied)"


@pytest.mark.parametrize("place", [".", "train", "train/cat"])
def test_a_link_to_itself_stops_no_training(root, capfd, place):
    (root / place / "again").symlink_to("again")
    splits = layout.load_photos(root)
    assert (len(splits.train), splits.class_names) == (4, ("cat", "dog"))
    line = f"{root / place}/again: skipped, a link that leads nowhere\n"
    assert capfd.readouterr().err == ("" if place == "." else line)  # the folder of train/ and val/ is not listed


@pytest.mark.parametrize("wrapped", ["unsplit", "unsplit/photos", "one"])
def test_a_link_in_a_class_that_cannot_be_followed_stops_no_training(root, capfd, wrapped):
    home = root / wrapped
    for name in ("cat", *([] if wrapped == "one" else ["dog"])):
        shutil.copytree(root / "train", home / name)
    (home / "cat/some").symlink_to(ENDLESS)
    (home / "cat/some.jpg").symlink_to(ENDLESS)  # listed, so that the reader names it
    splits = layout.load_photos(root / wrapped.split("/")[0])
    assert len(splits.train) + len(splits.validation) == 4 * len(splits.class_names) + 1
    line = f"{home}/cat/some: skipped, a link that cannot be followed (File name too long)\n"
    assert capfd.readouterr().err == line


def test_a_link_in_the_place_of_a_class_that_cannot_be_followed_is_refused(root):
    for name in ("cat", "dog"):
        shutil.rmtree(root / "train" / name)
        (root / "train" / name).symlink_to(ENDLESS)
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root}/train/cat: cannot be read (File name too long)"


def test_the_folder_above_need_not_be_listed(root, monkeypatch):
    plain = os.scandir

    def scanned(path):
        if str(path) == str(root):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scanned)
    assert layout.load_photos(root / "train").class_names == ("cat", "dog")


def test_what_the_system_refuses_is_kept_and_the_rest_listed(root, monkeypatch):
    (root / "train/again").symlink_to("again")
    (root / "train/dog/itself.png").symlink_to("itself.png")  # listed, so that the reader names it
    plain = os.scandir

    def scanned(path):
        if str(path) == f"{root}/train/cat/b":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scanned)
    listing = folder.Listing()
    names = list(folder.image_names(f"{root}/train", "", listing, linked=True))
    assert names == ["cat/a.gif", "dog/1.JPEG", "dog/2.png", "dog/itself.png"]
    assert [(error.filename, error.strerror) for error in listing.refused] == [
        (f"{root}/train/again", "Too many levels of symbolic links"),
        (f"{root}/train/cat/b", "Permission denied"),
    ]


def test_a_folder_that_may_not_be_searched_for_runs_hides_no_other(root, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(folder, "is_run", refused)
    assert len(list(folder.image_names(f"{root}/train", "", folder.Listing()))) == 4


def empty(path):
    for child in sorted(path.rglob("*"), reverse=True):
        child.rmdir() if child.is_dir() else child.unlink()


MISTAKES = {
    "no such folder; expected photos in a folder per class, or a table of photos and labels": (
        ".",
        lambda root: empty(root) or root.rmdir(),
    ),
    "no photo in its folders, expected one folder per class": ("val", lambda root: (root / "val/dog/9.bmp").unlink()),
}


@pytest.mark.parametrize(("message", "place", "change"), [(m, *rest) for m, rest in MISTAKES.items()])
def test_a_mistake_names_its_folder(root, message, place, change):
    change(root)
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root / place}: {message}"


def test_a_folder_without_a_photo_is_noted_and_no_class(root):
    (root / "train/rat").mkdir()
    (root / "val/cat").mkdir()
    splits = layout.load_photos(root)
    assert splits.class_names == ("cat", "dog")
    assert splits.notes == (
        f"{root}/train/rat: no photo in it, so it is not a class",
        f"{root}/val/cat: no photo in it, so it is not a class",
        f"{root}/val: no photo of 1 class: 'cat'",
    )


def test_a_validation_class_that_training_lacks_is_named(root):
    image(root, "val/dogs/1.png")
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root}/val/dogs: {root}/train has no class 'dogs'; did you mean 'dog'?"


def test_the_md5_of_a_folder_is_that_of_the_sorted_md5s_of_its_files(tmp_path):
    contents = [b"one", b"two" * 1_000_000, b""]
    (tmp_path / "deep").mkdir()
    for place, content in zip(("b", "deep/a", "c"), contents, strict=True):
        (tmp_path / place).write_bytes(content)
    parts = sorted(hashlib.md5(content).hexdigest() for content in contents)
    assert folder_md5(tmp_path, workers=2) == hashlib.md5("".join(parts).encode()).hexdigest()


def test_an_unreadable_file_is_reported_in_one_line(tmp_path):
    (tmp_path / "a").symlink_to("nowhere")
    with pytest.raises(DataError) as caught:
        folder_md5(tmp_path, workers=2)
    assert str(caught.value) == f"{tmp_path}/a: cannot be read (No such file or directory)"


@pytest.mark.parametrize(
    ("digest", "split", "same"),
    [
        ("17aed950" + "0" * 20 + "aa95", "train", True),
        ("17aed950" + "0" * 20 + "aa95", "validation", False),
        ("8d6a57a7" + "0" * 20 + "d5bd", "validation", True),
        ("17aed950" + "0" * 24, "train", False),
    ],
)
def test_imagenet_is_recognised_by_the_ends_of_its_digest(digest, split, same):
    assert is_imagenet(digest, split) is same
