"""Nothing but a file is opened, and nothing is waited for."""

import os
import socket

import pytest

from falconet.data.image_files import UnreadableImageError, open_regular, open_rgb, read_regular
from falconet.data.shards import open_shard
from falconet.data.sources import photos
from falconet.data.sources.bounding_boxes import parse_xml
from falconet.data.storage import FileSource
from falconet.errors import DataError


def pipe(path):
    os.mkfifo(path)


def link_to_pipe(path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def listening(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


KINDS = {pipe: "a pipe", link_to_pipe: "a pipe", device: "a device", folder: "a folder", listening: "a socket"}


@pytest.mark.parametrize(("make", "what"), KINDS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_anything_but_a_regular_file_is_refused_at_once(tmp_path, monkeypatch, make, what):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = type(tmp_path)("x.jpg")
    make(path)
    for opened in (open_regular, read_regular):
        with pytest.raises(OSError, match=f"{what}, not a file"):
            opened(path)
    with pytest.raises(UnreadableImageError, match=f"^{what}, not a file$"):
        open_rgb(path)
    with pytest.raises(DataError, match=f"x.jpg: cannot be opened .{what}, not a file"):
        open_shard(path)
    with pytest.raises(OSError, match=f"{what}, not a file"):
        parse_xml(path)
    source = FileSource.of(tmp_path.parent, names=["x.jpg"], labels=[0], class_names=(tmp_path.name,))
    with pytest.raises(OSError, match=f"{what}, not a file"):
        source.encoded(0)


def test_a_file_and_a_link_to_one_are_opened(tmp_path):
    (tmp_path / "a").write_bytes(b"words")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "a") == read_regular(tmp_path / "b") == b"words"


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a.jpg").symlink_to("b.jpg")
    (tmp_path / "b.jpg").symlink_to("a.jpg")
    with pytest.raises(UnreadableImageError, match="Too many levels of symbolic links"):
        open_rgb(tmp_path / "a.jpg")


SHARDS = {
    "train-00000-of-00001": "validation-00000-of-00001",
    "train-0.tar": "val-0.tar",
    "train-00000.falconet": "validation-00000.falconet",
}


@pytest.mark.parametrize(("name", "other"), SHARDS.items())
def test_a_pipe_under_a_shards_name_is_refused_in_one_line(tmp_path, name, other):
    os.mkfifo(tmp_path / name)
    (tmp_path / other).touch()
    with pytest.raises(DataError) as caught:
        photos.load_photos(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name}: cannot be ")
    assert str(caught.value).endswith(" (a pipe, not a file)")
