"""The index of a folder: used while nothing changes, and never if it is torn."""

import functools
import json
import os
import threading

import numpy as np
import pytest

from falconet.data import index
from falconet.data.index import FOLDER, Found

indexed = functools.partial(index.indexed, check=lambda found: None)


def listed(root):
    return sorted(path.name for path in (root / "train").iterdir())


class Search:
    """A search that counts its calls."""

    def __init__(self, root):
        self.root, self.times = root, 0

    def __call__(self):
        self.times += 1
        names = listed(self.root)
        numbers = np.arange(len(names), dtype=np.int64)
        return Found({"numbers": numbers}, {"names": names}, [self.root / "train"])


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/a.png").write_text("")
    settle(tmp_path / "data/train")
    return tmp_path / "data"


def settle(path, seconds=100):
    """Date the last change back."""
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns - seconds * 10**9))


def kept(root):
    return root / FOLDER / "test.safetensors"


def test_the_second_time_the_index_is_used(root):
    search = Search(root)
    first, second = (indexed(root, kind="test", search=search) for _ in range(2))
    assert search.times == 1
    assert second.facts == first.facts == {"names": ["a.png"]}
    assert second.arrays["numbers"].tolist() == [0]


def add(root):
    (root / "train/b.png").write_text("")
    settle(root / "train", 50)


def remove(root):
    (root / "train/a.png").unlink()
    settle(root / "train", 50)


def rename(root):
    (root / "train/a.png").rename(root / "train/c.png")
    settle(root / "train", 50)


def tear(root):
    kept(root).write_bytes(kept(root).read_bytes()[:-5])


def flip(root):
    data = bytearray(kept(root).read_bytes())
    data[-3] ^= 4
    kept(root).write_bytes(data)


def empty(root):
    kept(root).write_bytes(b"")


def other_version(root):
    data = kept(root).read_bytes()
    kept(root).write_bytes(data.replace(index.FORMAT.encode(), b"falconet index 9"))


def nonsense(root):
    header = json.dumps({"__metadata__": {"format": index.FORMAT, "stamps": "5", "began": "x"}}).encode()
    kept(root).write_bytes(len(header).to_bytes(8, "little") + header)


def vanish(root):
    (root / "train").rename(root / "train2")
    (root / "train").mkdir()
    settle(root / "train", 70)


@pytest.mark.parametrize(
    "change",
    [add, remove, rename, tear, flip, empty, other_version, nonsense, vanish],
    ids=lambda change: change.__name__,
)
def test_a_change_causes_a_new_search(root, change):
    search = Search(root)
    indexed(root, kind="test", search=search)
    change(root)
    found = indexed(root, kind="test", search=search)
    assert search.times == 2
    assert found.facts["names"] == listed(root)
    indexed(root, kind="test", search=search)
    assert search.times == 2


def test_an_index_with_a_change_just_before_the_search_is_not_used(root):
    os.utime(root / "train")  # another change within the clock's grain would have the same time
    search = Search(root)
    indexed(root, kind="test", search=search)
    indexed(root, kind="test", search=search)
    assert search.times == 2


def test_an_index_is_not_used_if_a_folder_vanished_during_the_search(root):
    search, gone = Search(root), root / "train/gone"
    for _ in range(2):
        indexed(root, kind="test", search=lambda: search()._replace(watched=[root / "train", gone]))
    assert search.times == 2


def test_listed_files_are_compared_with_the_index(root):
    search, one, two = Search(root), root / "train/a.png", root / "train/b.png"
    settle(one)
    two.write_text("")
    settle(two)

    def found(watched):
        return indexed(root, kind="test", search=lambda: search()._replace(watched=watched), watched=watched)

    found([one])
    found([one])
    assert search.times == 1
    found([one, two])
    assert search.times == 2
    two.write_text("longer")
    settle(two)
    found([one, two])
    assert search.times == 3


def test_the_index_of_a_read_only_folder_is_in_the_users_cache(root, tmp_path):
    (root / FOLDER).write_text("in the way")
    search = Search(root)
    indexed(root, kind="test", search=search)
    indexed(root, kind="test", search=search)
    assert search.times == 1
    assert len(list((tmp_path / "cache/falconet/index").glob("*/test.safetensors"))) == 1


def test_every_run_searches_if_no_index_can_be_written(root, tmp_path):
    (root / FOLDER).write_text("in the way")
    (tmp_path / "cache").write_text("in the way too")
    search = Search(root)
    assert indexed(root, kind="test", search=search).facts == indexed(root, kind="test", search=search).facts
    assert search.times == 2


def test_a_failed_write_leaves_nothing(root, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
    indexed(root, kind="test", search=Search(root))
    assert list((root / FOLDER).iterdir()) == []


LINKS = {  # in the data folder, to what of the user's
    ".falconet-index": "victim",
    ".falconet-index/test.safetensors": "victim/file",
    f".falconet-index/.test.safetensors.{os.getpid()}": "victim/file",  # where earlier versions wrote first
}


@pytest.mark.parametrize("link", LINKS, ids=["folder", "file", "temporary"])
def test_an_index_is_not_written_through_a_link(root, tmp_path, link):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").write_text("mine")
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(tmp_path / LINKS[link])
    indexed(root, kind="test", search=Search(root))
    assert [path.name for path in (tmp_path / "victim").iterdir()] == ["file"]
    assert (tmp_path / "victim/file").read_text() == "mine"
    search = Search(root)
    indexed(root, kind="test", search=search)
    assert search.times == 0, "the index is in the user's folder, or under another name"


def test_of_several_processes_one_searches_and_the_others_wait(root):
    search, found, arriving = Search(root), [], threading.Semaphore(0)

    def slow():
        for _ in range(4):
            assert arriving.acquire(timeout=60)  # all are looking for the index, or about to
        return search()

    def look():
        arriving.release()
        found.append(indexed(root, kind="test", search=slow).facts)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert search.times == 1
    assert found == [{"names": ["a.png"]}] * 4
