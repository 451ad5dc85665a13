"""Files below a folder: whatever lies there already, nothing outside of it is written."""

import os
import threading

import pytest

from falconet import writing
from falconet.errors import LinkError

WRITERS = {
    "replace": lambda folder, name: writing.replace(folder, name, "new"),
    "growing": lambda folder, name: os.close(writing.growing(folder, name)),
    "refuse_links": lambda folder, name: writing.refuse_links(folder, [name]),
}


@pytest.fixture
def places(tmp_path):
    """A folder that came from another person, and a file of the user."""
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("mine")
    return tmp_path / "run", tmp_path / "precious"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("target", ["../precious", "../nowhere"], ids=["a file", "a link to nowhere"])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_link_is_refused_in_one_line_and_its_target_is_unchanged(places, write, target):
    folder, precious = places
    (folder / "file").symlink_to(target)
    with pytest.raises(LinkError) as refused:
        write(folder, "file")
    words = f"{folder}/file: is a symbolic link; refusing to write through it; remove it or choose another --run-dir"
    assert str(refused.value) == words
    assert precious.read_text() == "mine"
    assert names(folder.parent) == ["precious", "run"]
    assert names(folder) == ["file"]


@pytest.mark.parametrize("write", [WRITERS["replace"], WRITERS["growing"]], ids=["replace", "growing"])
def test_link_among_the_subfolders_is_refused(places, tmp_path, write):
    folder, _ = places
    (tmp_path / "victim").mkdir()
    (folder / "sub").symlink_to("../victim")
    with pytest.raises(LinkError, match="run/sub: is a symbolic link"):
        write(folder, "sub/file")
    with pytest.raises(LinkError, match="run/sub: is a symbolic link"):
        writing.subfolder(folder, "sub")
    assert names(tmp_path / "victim") == []


def test_folder_itself_may_be_a_link(places, tmp_path):
    folder, _ = places
    (tmp_path / "short").symlink_to(folder)
    writing.replace(tmp_path / "short", "sub/file", "text")
    assert (folder / "sub/file").read_text() == "text"
    writing.probe(tmp_path / "short")
    assert names(folder) == ["sub"]


def test_link_made_after_the_check_is_not_followed(places, monkeypatch):
    folder, precious = places
    (folder / "file").symlink_to("../precious")
    monkeypatch.setattr(writing, "_refuse_link", lambda *_: None)
    writing.replace(folder, "file", "new")  # in the place of the link
    assert (folder / "file").read_text() == "new"
    (folder / "other").symlink_to("../precious")
    with pytest.raises(OSError, match="symbolic links"):
        writing.growing(folder, "other")
    assert precious.read_text() == "mine"


def test_other_hard_links_keep_their_content(places):
    folder, precious = places
    os.link(precious, folder / "file")
    with os.fdopen(writing.growing(folder, "file"), "a") as file:
        file.write(" and more")
    assert (folder / "file").read_text() == "mine and more"
    (folder / "file").unlink()
    os.link(precious, folder / "file")
    writing.replace(folder, "file", "new")
    assert precious.read_text() == "mine"


def test_pipe_does_not_block(places):
    folder, _ = places
    os.mkfifo(folder / "file")
    with pytest.raises(OSError, match="is not a regular file"):
        writing.growing(folder, "file")


def test_failed_write_leaves_the_file_unchanged_and_names_it(places, monkeypatch):
    folder, _ = places
    writing.replace(folder, "file", "old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            writing.replace(folder, "file", "new")
    assert (folder / "file").read_text() == "old"
    assert names(folder) == ["file"]
    (folder / "sub").mkdir()
    with pytest.raises(IsADirectoryError) as failed:
        writing.growing(folder, "sub")
    assert failed.value.filename == f"{folder}/sub"


def test_concurrent_writers_leave_one_whole_text(places):
    folder, _ = places
    texts = [str(number) * 10_000 for number in range(8)]
    writers = [threading.Thread(target=writing.replace, args=(folder, "file", text)) for text in texts]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert (folder / "file").read_text() in texts
    assert names(folder) == ["file"]
