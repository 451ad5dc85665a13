"""Runs that are looked at as they grow: each byte is read once, and what is written anew is read anew."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from falconet.errors import DataError
from falconet.report import foreign_folder
from falconet.report.followed_runs import FollowedFolder, FollowedRun, what_is_there
from falconet.report.foreign_folder import ForeignFolder
from falconet.report.run_files import read_all, read_run
from growing_runs import growing
from report_runs import write_run
from runs import wait_for


@pytest.fixture
def read_bytes(monkeypatch):
    """The bytes read of each file."""
    counts, plain = {}, ForeignFolder._bytes

    def counted(self, handle, name, *, since):
        found = plain(self, handle, name, since=since)
        counts[name] = counts.get(name, 0) + len(found)
        return found

    monkeypatch.setattr(ForeignFolder, "_bytes", counted)
    return counts


def test_what_is_followed_equals_what_is_read_at_once(tmp_path):
    with growing(tmp_path / "run", 2) as run:
        followed = FollowedRun(run.folder, read_all)
        for _ in range(5):
            followed.look()
            run.grow()
        assert followed.look() == read_run(run.folder)
        assert len(followed.look().moments) == 7


def test_of_a_growing_file_only_what_is_new_is_read(tmp_path, read_bytes):
    with growing(tmp_path / "run", 3) as run:
        followed = FollowedRun(run.folder)
        followed.look()
        before = dict(read_bytes)
        assert before["metrics.jsonl"] == (run.folder / "metrics.jsonl").stat().st_size
        assert followed.look() is followed.look(), "nothing has changed"
        assert read_bytes == before
        run.grow()
        followed.look()
        assert read_bytes["metrics.jsonl"] == (run.folder / "metrics.jsonl").stat().st_size
        assert read_bytes["config.yaml"] == before["config.yaml"]


def test_half_a_line_is_left_out_until_it_is_whole(tmp_path):
    with growing(tmp_path / "run", 1) as run:
        followed = FollowedRun(run.folder)
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"update": 20, "epoch": 2.0, "train/l')
            file.flush()
            assert [len(followed.look().moments), followed.look().problems] == [1, []]
            file.write('oss": 0.5}\n')
        assert followed.look().series("train/loss")[-1] == (2.0, 0.5)


def test_the_torn_line_of_a_killed_run_is_noted(tmp_path):
    with growing(tmp_path / "run", 1) as run:
        followed = FollowedRun(run.folder)
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"update": 20, "epo')
        followed.look()
        run.release()
        assert followed.look().problems == ["run/metrics.jsonl: the last line is incomplete; left out"]
        assert followed.look().state == "stopped"


@pytest.mark.parametrize("is_in_place", [False, True])
def test_the_log_of_a_restored_run_is_read_anew(tmp_path, is_in_place):
    with growing(tmp_path / "run", 5) as run:
        followed = FollowedRun(run.folder)
        assert followed.look().moments[-1].update == 50
        log = run.folder / "metrics.jsonl"
        lines = log.read_text().splitlines(keepends=True)
        content = "".join(lines[:6]) + lines[6].replace('"train/loss": 0.5', '"train/loss": 0.75') + "".join(lines[7:])
        if is_in_place:  # the same inode, and more bytes than before
            log.write_text(content + '{"update": 60, "epoch": 6.0, "train/loss": 0.125}\n')
        else:
            (run.folder / "other").write_text("".join(lines[:4]))
            (run.folder / "other").replace(log)
        assert followed.look().moments == read_run(run.folder).moments
        assert followed.look().moments[-1].update == (60 if is_in_place else 20)


def test_a_writer_in_another_thread_is_followed_to_its_end(tmp_path):
    with growing(tmp_path / "run") as run:
        followed, seen = FollowedRun(run.folder), []

        def write():
            for _ in range(20):
                run.grow()
            run.end()

        writer = threading.Thread(target=write)
        writer.start()

        def is_done():
            found = followed.look()
            seen.append(len(found.moments))
            return found.state == "done"

        wait_for(is_done, "the end of the run")
        writer.join()
    assert seen == sorted(seen)
    assert seen[-1] == 20
    assert followed.look().problems == []


def test_a_run_that_vanishes_is_an_error_and_what_was_read_stays(tmp_path):
    with growing(tmp_path / "run", 2) as run:
        followed = FollowedRun(run.folder)
        last = followed.look()
        shutil.rmtree(run.folder)
        with pytest.raises(DataError, match="no such folder"):
            followed.look()
        assert followed.run is last


def test_without_locks_a_run_that_has_just_written_counts_as_going(tmp_path, monkeypatch):
    with growing(tmp_path / "run", 2) as run:
        run.release()
        assert FollowedRun(run.folder).look().state == "stopped"

        def refused(*_):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(foreign_folder.fcntl, "flock", refused)
        followed = FollowedRun(run.folder)
        assert followed.look().state == "going"
        monkeypatch.setattr("falconet.report.run_files.RECENT", 0.0)
        assert followed.look().state == "stopped"


def test_new_runs_of_a_folder_appear_those_going_first_and_removed_ones_go(tmp_path):
    write_run(tmp_path / "old")
    (tmp_path / "not a run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "old")
    followed = FollowedFolder(tmp_path)
    assert list(followed.look()) == ["old"]
    with growing(tmp_path / "new", 1):
        assert list(followed.look()) == ["new", "old"]
        assert [run.state for run in followed.look().values()] == ["going", "done"]
    shutil.rmtree(tmp_path / "old")
    assert list(followed.look()) == ["new"]


def test_of_many_runs_the_newest_are_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("falconet.report.followed_runs.MOST_RUNS", 2)
    for number in range(4):
        write_run(tmp_path / f"run-{number}")
    followed = FollowedFolder(tmp_path)
    assert len(followed.look()) == 2
    assert followed.left_out == 2


def test_what_can_become_a_run_is_waited_for_and_the_rest_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert what_is_there(Path("runs")) == "runs does not exist yet"
    Path("runs/claimed").mkdir(parents=True)
    assert what_is_there(Path("runs")) == "there is no run in runs yet"
    write_run(tmp_path / "runs/first")
    assert isinstance(what_is_there(Path("runs")), FollowedFolder)
    assert isinstance(what_is_there(Path("runs/first")), FollowedRun)
    with pytest.raises(DataError, match="a file; expected a run folder, or a folder of runs"):
        what_is_there(Path("runs/first/config.yaml"))


NEW = "no such folder; expected a run folder, or a folder of runs"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("runs/frist", f"runs/frist: {NEW}; did you mean 'runs/first'?"),
        ("first", f"first: {NEW}; did you mean 'runs/first'?"),
        ("run", f"run: {NEW}; did you mean 'runs'?"),
        ("no/such", f"no/such: {NEW}"),
        (
            "photos",
            "photos: holds photos, such as train/cat/a.JPG, and no run; expected a run folder, or a folder of runs",
        ),
        ("photos/train/cat", "photos/train/cat: holds photos, such as a.JPG, and no run; expected a run folder, or a"),
        ("texts", "texts: not a run folder, nor are there runs in it; expected config.yaml and metrics.jsonl"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_an_error(tmp_path, monkeypatch, typed, words):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/first")
    for name in ("photos/train/cat/a.JPG", "texts/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    with pytest.raises(DataError) as refused:
        what_is_there(Path(typed))
    assert str(refused.value).startswith(words)


def test_a_folder_that_is_removed_while_photos_are_looked_for_changes_nothing(tmp_path, monkeypatch):
    for name in ("begun", "other"):
        (tmp_path / name).mkdir()
    look = os.scandir

    def removing(place):
        if str(place).endswith("begun"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(place))
        return look(place)

    monkeypatch.setattr(os, "scandir", removing)
    assert what_is_there(tmp_path) == f"there is no run in {tmp_path} yet"
    (tmp_path / "other/a.png").touch()
    with pytest.raises(DataError, match=r"holds photos, such as other/a\.png"):
        what_is_there(tmp_path)
