"""Which layout is found where."""

import pytest

import layouts
from falconet.data import layout
from falconet.errors import DataError


@pytest.mark.parametrize(("name", "made"), layouts.LAYOUTS.items())
def test_every_layout_is_recognised(tmp_path, name, made):
    splits = layout.load_photos(made(layouts.class_folders(tmp_path / "folders"), tmp_path / "made"))
    assert (splits.layout, len(splits.train), len(splits.validation)) == (name, 18, 6)


def test_a_folder_without_photos_reports_what_was_expected(tmp_path):
    with pytest.raises(DataError) as caught:
        layout.load_photos(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: found no photos; expected train/<class>/, train-00000-of-01024 (TFRecords), tar archives with"
        " train in their name, or train-00000.falconet (packed shards)"
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (("none/train",), "none/train: empty, expected one folder per class"),
        ((), "none: no such folder; expected one with train/ and val/"),
        (("none/val",), "none: no folder train/ in it"),
        (("none/train/cat",), "none: no folder val/ or validation/ in it"),
    ],
)
def test_incomplete_class_folders_report_what_is_missing(tmp_path, made, message):
    for name in made:
        (tmp_path / name).mkdir(parents=True)
    if made == ("none/train",):
        (tmp_path / "none/val/cat").mkdir(parents=True)
    with pytest.raises(DataError) as caught:
        layout.load_photos(tmp_path / "none")
    assert str(caught.value) == f"{tmp_path}/{message}"


def test_a_forbidden_folder_is_reported_in_one_line(tmp_path, monkeypatch):
    def refused(place):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(layout, "_from", refused)
    with pytest.raises(DataError) as caught:
        layout.load_photos(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read (Permission denied)"
