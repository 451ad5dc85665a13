"""Tar archives as WebDataset writes them."""

import gzip
import tarfile

import pytest

import layouts
from falconet.data import layout
from falconet.errors import DataError


@pytest.fixture
def folders(tmp_path):
    return layouts.class_folders(tmp_path / "folders")


@pytest.mark.parametrize(
    ("label", "names"), [("cls", ("0", "1", "2")), ("json", ("0", "1", "2")), ("txt", layouts.CLASSES)]
)
def test_images_and_labels_are_read_as_written(folders, tmp_path, label, names):
    splits = layout.load_photos(layouts.tar_archives(folders, tmp_path / "tar", label=label))
    assert (splits.layout, splits.class_names) == ("tar archives", names)
    for source, split in ((splits.train, "train"), (splits.validation, "val")):
        written = list(layouts.photos_of(folders, split))
        assert [source.encoded(index) for index in range(len(source))] == [path.read_bytes() for path, _ in written]
        assert source.labels.tolist() == [own for _, own in written]
    assert splits.train.name(7) == "n01443537_1.jpg"


@pytest.mark.parametrize("first", ["tench", "tench\u2028Tinca"])
def test_names_come_from_a_file_next_to_the_archives(folders, tmp_path, first):
    root = layouts.tar_archives(folders, tmp_path / "tar")
    (root / "classnames.txt").write_text(f"{first}\ngoldfish\nspaniel\n", encoding="utf-8")
    assert layout.load_photos(root).class_names == (first, "goldfish", "spaniel")


def test_what_finder_leaves_beside_archives_is_passed_over(folders, tmp_path):
    root = layouts.tar_archives(folders, tmp_path / "tar")
    for path in list(root.rglob("*.tar")):
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7" + bytes(4092))
    assert len(layout.load_photos(root).train) == 18


def archive(path, **members):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
        for name, data in members.items():
            layouts.add_member(file, name, data)


@pytest.fixture
def root(tmp_path):
    image = layouts.encoded(layouts.photo(1))
    for split in ("train", "validation"):
        archive(tmp_path / f"{split}.tar", **{"a.jpg": image, "a.cls": b"1", "b.cls": b" 0\n", "b.png": image})
    return tmp_path


def test_long_names_folders_and_odd_members_are_harmless(root):
    image, far = layouts.encoded(layouts.photo(2)), "f" * 120 + "/x"
    names = {"__MACOSX/a.jpg": b"", "readme": b"hi", f"{far}/k.1.JPG": image, f"{far}/k.cls": b"2", "._b.jpg": b""}
    archive(root / "train.tar", **names)
    train = layout.load_photos(root).train
    assert [(train.name(0), train.labels.tolist(), train.encoded(0))] == [(f"{far}/k.1.JPG", [2], image)]


IMAGE = layouts.encoded(layouts.photo(1))
MISTAKES = {
    "a: an image without a label; expected one in .cls, .json, .txt": {"a.jpg": IMAGE},
    "a: a label without an image": {"a.cls": b"1"},
    "has no image, and neither do the other train archives": {"readme": b""},
}


@pytest.mark.parametrize(("message", "members"), MISTAKES.items())
def test_a_mistake_names_its_archive(root, message, members):
    archive(root / "train.tar", **members)
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root}/train.tar: {message}"


def test_numbers_and_names_do_not_mix(root):
    archive(root / "train.tar", **{"a.jpg": IMAGE, "a.cls": b"dog"})
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root}: some labels are numbers, such as 1, and others are not, such as 'dog'"


def test_an_impossible_label_is_refused(root):
    archive(root / "train.tar", **{"a.jpg": IMAGE, "a.cls": b"99999999999"})
    with pytest.raises(DataError, match=r"the label 99999999999 in an archive; expected less than 1,000,000"):
        layout.load_photos(root)


@pytest.mark.parametrize("damage", [gzip.compress, lambda data: data[:700], lambda data: b"", lambda data: b"x" * 5000])
def test_anything_but_a_plain_archive_is_refused(root, damage):
    path = root / "train.tar"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"train.tar: .*(not a complete|cut short|has no image)"):
        layout.load_photos(root)


def test_archives_without_a_validation_set_are_refused(root):
    (root / "validation.tar").unlink()
    with pytest.raises(DataError, match="tar archives, but none with validation in its name"):
        layout.load_photos(root)


@pytest.mark.parametrize("at", [0, 100, 148])  # its name, its mode, its checksum
def test_a_damaged_header_in_the_middle_is_noticed(root, at):
    path = root / "train.tar"
    with tarfile.open(path) as whole:
        second = whole.getmembers()[2].offset
    data = bytearray(path.read_bytes())
    data[second + at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == (
        f"{path}: not a complete, uncompressed tar archive (a damaged header at byte {second})"
    )


def test_a_member_of_negative_size_is_refused(root):
    path = root / "train.tar"
    with tarfile.open(path) as whole:
        last = whole.getmembers()[-1].offset
    data = bytearray(path.read_bytes())
    data[last + 124 : last + 136] = (-512).to_bytes(12, "big", signed=True)  # base 256: leads back to this header
    data[last + 148 : last + 156] = b" " * 8
    data[last + 148 : last + 156] = b"%06o\0 " % sum(data[last : last + 512])
    path.write_bytes(data)
    with pytest.raises(
        DataError, match=r"train.tar: not a complete, uncompressed tar archive \(a member of -512 bytes\)"
    ):
        layout.load_photos(root)


@pytest.mark.parametrize(
    ("name", "label", "message"),
    [("a.cls", b"7" * 5000, "a: a label of 5000 digits"), ("a.json", b"[" * 100_000, "a: an image without a label")],
)
def test_a_hostile_label_is_refused_in_one_line(root, name, label, message):
    archive(root / "train.tar", **{"a.jpg": IMAGE, name: label})
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value).startswith(f"{root}/train.tar: {message}")
