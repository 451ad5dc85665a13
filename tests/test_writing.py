"""Files below a folder: whatever lies there already, nothing outside of it is written."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from falconet import writing
from falconet.errors import ConfigError, LinkError

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


def test_a_file_that_could_not_be_written_is_refused_and_its_folder_is_created(tmp_path):
    writing.require_writable(tmp_path / "new/folder/t.csv", "--output")
    assert names(tmp_path / "new/folder") == []
    (tmp_path / "file").write_text("")
    for path, why in (("file/t.csv", "--output: cannot write to "), ("new", "--output: .* is a folder, expected a")):
        with pytest.raises(ConfigError, match=why):
            writing.require_writable(tmp_path / path, "--output")


def test_names_that_are_not_utf_8_are_escaped_in_a_text(places):
    folder, _ = places
    text = "bär " + os.fsdecode(b"caf\xe9")
    writing.replace(folder, "whole", text)
    lines = writing.GrowingFile(folder / "lines")
    lines.add(text)
    lines.close()
    assert (folder / "whole").read_text(encoding="utf-8") == r"bär caf\udce9"
    assert (folder / "lines").read_text(encoding="utf-8") == "bär caf\\udce9\n"


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


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary directory, in which everything is two minutes old."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()

    def make(name, *, seconds=120.0):
        folder = tmp_path / "tmp" / name
        folder.mkdir()
        folder.chmod(0o700)
        (folder / "file").write_text("x")
        (folder / writing.MARK).touch()
        os.utime(folder, (time.time() - seconds,) * 2)
        return folder

    return make


def test_a_scratch_folder_is_private_and_removed(temporary):
    with writing.scratch() as name:
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
        assert Path(name).name.startswith(writing.SCRATCH)
    assert not Path(name).exists()


HOLD = "from falconet import writing\nwith writing.scratch() as name: print(name, flush=True); input()"


def test_what_a_killed_process_left_is_removed_by_the_next(temporary):
    killed = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": tempfile.gettempdir()},
    )  # fmt: skip
    left = Path(killed.stdout.readline().strip())
    os.utime(left, (0, 0))
    with writing.scratch():
        assert left.is_dir(), "its process still lives"
    killed.kill()
    killed.wait()
    with writing.scratch():
        assert not left.exists()


def test_only_abandoned_folders_of_ours_are_removed(temporary, tmp_path):
    other = {
        temporary(name)
        for name in ("falconet-imagenet", "falconet-scratch-mine", "torchelastic_abcd1234", "falconet-scratch-ABCD1234")
    }
    young = temporary("falconet-scratch-abcd1234", seconds=5.0)
    target = temporary("target")
    link = target.with_name("falconet-scratch-link5678")
    link.symlink_to(target)
    os.utime(link, (0, 0), follow_symlinks=False)
    (file := target.with_name("falconet-scratch-file5678")).write_text("x")
    os.utime(file, (0, 0))
    old = temporary("falconet-scratch-olda5678")
    (old / "link").symlink_to(target)
    os.utime(old, (0, 0))
    (unmarked := temporary("falconet-scratch-resnet50")).joinpath(writing.MARK).unlink()
    os.utime(unmarked, (0, 0))
    (shared := temporary("falconet-scratch-resnet18")).chmod(0o755)
    with writing.scratch():
        pass
    assert not old.exists()
    assert all(path.exists() for path in (*other, young, target / "file", link, file, unmarked, shared))


def test_a_folder_of_another_user_is_left_alone(temporary, monkeypatch):
    old = temporary("falconet-scratch-olda5678")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with writing.scratch():
        pass
    assert old.exists()
