"""The list of photos to leave out holds any name, and reports what it does."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import layouts
from falconet.data import exclusion, layout
from falconet.errors import DataError

NAMES = [
    "train/cat/a.jpg",
    "train/cat/with space.jpg",
    " leading.jpg",
    "#remark.jpg",
    '"quoted".jpg',
    "line\nbreak.jpg",
    "tab\there.jpg",
    os.fsdecode(b"caf\xe9.jpg"),  # no UTF-8
    "café.jpg",
    "\u202egpj.exe",
]


def test_every_name_can_be_listed(tmp_path):
    paths = [tmp_path / name for name in NAMES]
    file = tmp_path / "list.txt"
    text = exclusion.text_of(paths, home=tmp_path, remarks=["of a test\nof lists"])
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert exclusion.read(file, home=tmp_path).entries == frozenset(NAMES)
    assert text.splitlines()[:3] == ["# of a test\\nof lists", "train/cat/a.jpg", "train/cat/with space.jpg"]


@given(st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_a_line_of_the_list_is_read_back(name):
    line = exclusion.line_of(name)
    assert "\n" not in line
    assert line == line.strip()
    assert not line.startswith("#")
    assert exclusion._unquoted(line, where="here") == name


@pytest.fixture
def root(tmp_path):
    return layouts.class_folders(tmp_path / "photos")


def left(root, text, *, home=None):
    file = root.parent / "list.txt"
    file.write_text(text)
    before = layout.load_photos(root)
    return before, exclusion.applied(before, exclusion.read(file, home=home or root))


A, B = (f"{layouts.CLASSES[0]}/{layouts.CLASSES[0]}_{number}.JPEG" for number in (0, 1))


def test_listed_photos_are_left_out_of_both_parts(root):
    before, after = left(root, f"# two\ntrain/{A}\n\nval/{B}\n")
    assert (len(after.train), len(after.validation)) == (len(before.train) - 1, len(before.validation) - 1)
    assert A not in [after.train.name(number) for number in range(len(after.train))]
    assert after.class_names == before.class_names
    assert after.notes == (f"left out 2 photos that {root.parent}/list.txt lists",)
    kept = np.array([before.train.name(number) != A for number in range(len(before.train))])
    assert np.array_equal(after.train.labels, before.train.labels[kept])


def test_absolute_paths_and_paths_from_the_current_folder_match_too(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    _, after = left(Path("photos"), f"{root}/train/{A}\nphotos/train/{B}\n./train/../val/{A}\n")
    assert (len(after.train), len(after.validation)) == (16, 5)


def test_entries_that_match_nothing_are_named(root):
    _, after = left(root, f"train/{A}\nnowhere.jpg\ntrain/x.jpg\na\nb\n")
    assert after.notes[1] == (
        f"{root.parent}/list.txt: 4 entries match no photo of {root}: 'a', 'b', 'nowhere.jpg' and 1 more"
    )
    _, after = left(root, "nowhere.jpg")
    assert after.notes == (
        f"left out 0 photos that {root.parent}/list.txt lists",
        f"{root.parent}/list.txt: 1 entry matches no photo of {root}: 'nowhere.jpg'",
    )


def test_losing_a_class_is_refused(root):
    every = "\n".join(f"train/{layouts.CLASSES[1]}/{layouts.CLASSES[1]}_{number}.JPEG" for number in range(6))
    with pytest.raises(DataError, match="lists every training photo of 'n01443537'; expected some to be left"):
        left(root, every)


def test_shards_have_no_files_to_leave_out(root, tmp_path):
    _, after = left(layouts.pack(root, tmp_path / "packed"), f"train/{A}")
    assert "has no effect, because packed shards have no files of their own" in after.notes[-1]
    assert len(after.train) == 18


def test_photos_of_a_table_are_left_out(root):
    rows = [f"{path.relative_to(root)},{label}" for path, label in layouts.photos_of(root, "train")]
    table = root / "rows.csv"
    table.write_text("\n".join(["path,label", *rows]))
    file = root.parent / "list.txt"
    file.write_text(f"train/{A}\n")
    splits = layout.load_photos(table)
    after = exclusion.applied(splits, exclusion.read(file, home=root))
    assert len(after.train) + len(after.validation) == len(rows) - 1


def missing(file):
    """Nothing is there."""


def folder(file):
    file.mkdir()


def pipe(file):
    os.mkfifo(file)


def binary(file):
    file.write_bytes(b"\0\1\2")


def half_quoted(file):
    file.write_text('"half\n')


REFUSED = {
    missing: "no such file; expected a list that `falconet data check",
    folder: "cannot be read",
    pipe: "cannot be read",
    binary: "not a text file; expected one path per line",
    half_quoted: 'line 1: got "half; expected a path',
}


@pytest.mark.parametrize(("make", "words"), REFUSED.items())
def test_a_file_that_is_no_list_is_refused_in_one_line(tmp_path, make, words):
    file = tmp_path / "list.txt"
    make(file)
    with pytest.raises(DataError) as caught:
        exclusion.read(file, home=tmp_path)
    assert words in str(caught.value)
