"""A checkpoint written by several processes is complete or refused, whichever of them fails."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from falconet.checkpoint import disk, format
from falconet.checkpoint.manifest import MANIFEST, _digest
from falconet.checkpoint.writer import Company, Meeting, SharedWriter, complete, write_slices
from falconet.errors import CheckpointError
from falconet.parallel.slices import Slice, fair_share

SIZE = 3
STATE = {
    "model": {
        "conv": torch.arange(2 * 3 * 2 * 2.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last),
        "bias": torch.randn(7).half(),
    },
    "optimizer": {"step/conv": torch.tensor(3.0), "untouched/bias": torch.empty(0), "v/conv": torch.randn(2, 3, 2, 2)},
    "nothing": {},
}


class State:
    """What one of several processes holds of `STATE`."""

    def __init__(self, rank):
        self.rank = rank

    def tensors(self):
        return STATE

    def slices(self):
        return {stem: fair_share(group, rank=self.rank, size=SIZE) for stem, group in STATE.items()}


def content(epoch=1):
    return {"model": "m", "classes": 2, "progress": {"epoch": epoch, "images": 0, "update": epoch}}


def meeting(folder):
    return Meeting(disk.aside(folder, "tmp"), folder, SIZE)


def write_all(folder, ranks=range(SIZE), patience=0.1):
    place = meeting(folder)
    for rank in ranks:
        write_slices(place, State(rank).slices(), rank=rank)
    complete(place, content(), patience=lambda: patience)


def read(folder):
    manifest = format.verify(folder)
    return {stem: format.read_tensors(folder, stem, verified=manifest) for stem in manifest.stems}


def test_slices_of_several_processes_are_read_as_whole_tensors(tmp_path):
    write_all(tmp_path / "a")
    found = read(tmp_path / "a")
    assert found.keys() == STATE.keys()
    for stem, group in STATE.items():
        assert found[stem].keys() == group.keys()
        for name, tensor in group.items():
            assert torch.equal(found[stem][name], tensor)
            assert found[stem][name].dtype == tensor.dtype
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        MANIFEST,
        *(f"model-{rank:05d}.safetensors" for rank in range(SIZE)),
        *(f"optimizer-{rank:05d}.safetensors" for rank in range(SIZE)),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_manifest_lists_the_slices_of_every_tensor(tmp_path):
    write_all(tmp_path / "a")
    manifest = format.read_manifest(tmp_path / "a")
    assert manifest.format == 2
    conv = [part for part in manifest.parts["model"] if part.name == "conv"]
    assert {part.shape for part in conv} == {(2, 3, 2, 2)}
    assert {part.dtype for part in conv} == {"float32"}
    assert [part.begin for part in conv[1:]] == [part.end for part in conv[:-1]]
    assert (conv[0].begin, conv[-1].end, conv[0].channels_last) == (0, 24, True)


def test_a_process_may_hold_several_slices_of_one_tensor(tmp_path):
    place, values = Meeting(tmp_path / "t", tmp_path / "a", 2), torch.arange(10.0)
    held = {0: [(0, 2), (7, 10)], 1: [(2, 7)]}
    for rank, edges in held.items():
        write_slices(place, {"model": [Slice("x", values[b:e], (5, 2), b) for b, e in edges]}, rank=rank)
    complete(place, content(), patience=lambda: 0.1)
    assert torch.equal(read(tmp_path / "a")["model"]["x"], values.view(5, 2))


GAPS = {
    "gap": [(0, 4), (5, 10)],
    "overlap": [(0, 6), (5, 10)],
    "beginning": [(1, 10)],
    "end": [(0, 9)],
}


@pytest.mark.parametrize("edges", GAPS.values(), ids=GAPS.keys())
def test_slices_that_do_not_add_up_to_a_tensor_are_never_saved(tmp_path, edges):
    place, values = Meeting(tmp_path / "t", tmp_path / "a", 1), torch.arange(10.0)
    write_slices(place, {"model": [Slice("x", values[b:e], (10,), b) for b, e in edges]}, rank=0)
    with pytest.raises(CheckpointError, match="the slices of 'x' do not add up to its 10 values"):
        complete(place, content(), patience=lambda: 0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_process_is_named_and_nothing_is_left_behind(tmp_path):
    with pytest.raises(CheckpointError, match=r"no data from rank 1 for 0.1 s; expected a folder that all") as error:
        write_all(tmp_path / "a", ranks=(0, 2))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_on_one_process_is_reported_by_the_first_at_once(tmp_path, monkeypatch):
    place = meeting(tmp_path / "a")
    for rank in (0, 2):
        write_slices(place, State(rank).slices(), rank=rank)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _no_space)
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            write_slices(place, State(1).slices(), rank=1)
    with pytest.raises(CheckpointError) as reported:
        complete(place, content(), patience=lambda: 1000.0)
    assert str(reported.value) == str(error.value) == f"cannot save {tmp_path / 'a'}: No space left on device"
    assert list(tmp_path.iterdir()) == []


def _no_space(_descriptor):
    raise OSError(28, "No space left on device")


def test_an_existing_checkpoint_stays_until_the_new_one_is_complete(tmp_path):
    write_all(tmp_path / "a")
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    with pytest.raises(CheckpointError):
        write_all(tmp_path / "a", ranks=(0,))
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before
    write_all(tmp_path / "a")
    assert read(tmp_path / "a").keys() == STATE.keys()


def test_any_truncated_changed_or_missing_file_is_named(tmp_path):
    write_all(tmp_path / "a")
    for path in sorted((tmp_path / "a").glob("*.safetensors")):
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        other = tmp_path / "b" / path.name
        data = other.read_bytes()
        for broken in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), None):
            other.unlink() if broken is None else other.write_bytes(broken)
            with pytest.raises(CheckpointError, match=path.name):
                format.verify(tmp_path / "b")
        shutil.rmtree(tmp_path / "b")


HOSTILE = {
    "another file": ({"file": "../../etc/passwd"}, "which 'files' does not name"),
    "negative": ({"begin": -5}, "do not add up"),
    "large": ({"shape": [1 << 40]}, "do not add up"),
    "huge": ({"shape": [1 << 60]}, "expected lengths"),
    "huge in two directions": ({"shape": [1 << 40, 1 << 40]}, "expected at most 281,474,976,710,656 values"),
    "not a number": ({"end": True}, "'end' is bool, expected int"),
    "not lengths": ({"shape": [2, -3]}, "expected lengths"),
    "flat channels-last": ({"channels_last": True}, "channels-last with 1 dimensions"),
    "another type": ({"dtype": "float64"}, "does not match the manifest"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_manifest_with_false_slices_is_refused_in_one_line(tmp_path, change, message):
    place = Meeting(tmp_path / "t", tmp_path / "a", 1)
    write_slices(place, {"model": [Slice("x", torch.zeros(4), (4,))]}, rank=0)
    complete(place, content(), patience=lambda: 0.1)
    stored = json.loads((tmp_path / "a" / MANIFEST).read_text())
    stored["parts"]["model"][0] |= change
    stored["digest"] = _digest(stored)
    (tmp_path / "a" / MANIFEST).write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match=message) as error:
        read(tmp_path / "a")
    assert "\n" not in str(error.value)


def company(rank, token="1-ab", timeout=20.0):
    return Company(rank=rank, size=SIZE, token=token, timeout=timeout)


def test_writers_meet_in_the_background_and_only_the_first_calls_after(tmp_path):
    called = []
    writers = [SharedWriter(company(rank)) for rank in range(SIZE)]
    for epoch in (1, 2):
        for rank, writer in enumerate(writers):  # none of them waits for the others here
            writer.save_state(
                tmp_path / f"e{epoch}", State(rank), content(epoch), after=lambda rank=rank: called.append(rank)
            )
    for writer in writers:
        writer.close()
    assert called == [0, 0]
    assert [p.name for p in format.checkpoints_in(tmp_path)] == ["e1", "e2"]


@pytest.mark.parametrize(("limit", "error"), [("GRACE", ValueError()), ("HASTE", KeyboardInterrupt())])
def test_a_stopped_run_does_not_wait_the_full_timeout_for_the_others(tmp_path, monkeypatch, limit, error):
    monkeypatch.setattr(f"falconet.checkpoint.writer.{limit}", 0.05)

    def stops():
        with SharedWriter(company(0, timeout=1000.0)) as writer:
            writer.save_state(tmp_path / "a", State(0), content())
            raise error

    with pytest.raises(type(error)) as caught:
        stops()
    assert "no data from rank 1" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []


def test_half_written_checkpoints_of_killed_runs_are_ignored_and_swept(tmp_path):
    write_all(tmp_path / "a")
    place = meeting(tmp_path / "b")
    write_slices(place, State(1).slices(), rank=1)
    old = disk.aside(tmp_path / "c", "old")
    old.mkdir()
    assert format.newest_whole(tmp_path, note=pytest.fail) == tmp_path / "a"
    disk.sweep(tmp_path)
    assert place.temporary.exists(), "it may still be written"
    disk.sweep(tmp_path, abandoned=0.0, kinds=("tmp",))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([old.name, "a"])


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from falconet.checkpoint import format
from falconet.checkpoint.writer import Company, SharedWriter
from falconet.parallel.slices import fair_share

home, SIZE = Path(sys.argv[1]), 2

class State:
    def __init__(self, rank, epoch):
        self.rank, self.epoch = rank, epoch
    def tensors(self): ...
    def slices(self):
        group = {"x": torch.full((20_000,), float(self.epoch))}
        return {stem: fair_share(group, rank=self.rank, size=SIZE) for stem in ("model", "optimizer")}

def worker(rank, attempt, first):
    with SharedWriter(Company(rank=rank, size=SIZE, token=f"{attempt}-ab", timeout=0.5)) as writer:
        for epoch in range(first, first + 100):
            content = {"model": "m", "classes": 2, "progress": dict.fromkeys(("epoch", "images", "update"), epoch)}
            writer.save_state(home / f"epoch_{epoch}", State(rank, epoch), content)
            writer.wait()

random.seed(0)
found = []
for attempt in range(80):
    left = [p for p in home.iterdir() if p.name.startswith(".")]
    if attempt >= 8 and len(found) > 2 and len(left) > 2:
        break  # on a busy machine a worker may be killed before it starts
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            worker(rank, attempt, len(found))
            os._exit(0)
        children.append(child)
    time.sleep(random.uniform(0.05, 0.4 + attempt / 40))
    for child in random.sample(children, SIZE):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        time.sleep(random.uniform(0, 0.02))
    found = format.checkpoints_in(home) if home.is_dir() else []
    assert [p.name for p in found] == [f"epoch_{i}" for i in range(len(found))]
for epoch, folder in enumerate(found):
    manifest = format.verify(folder)
    for stem in ("model", "optimizer"):
        assert torch.all(format.read_tensors(folder, stem, verified=manifest)["x"] == epoch)
print(len(found), len(left))
"""


@pytest.mark.run
def test_kill_9_of_several_writers_leaves_only_complete_checkpoints(tmp_path):
    home = tmp_path / "run"
    home.mkdir()
    run = subprocess.run([sys.executable, "-c", KILLED, home], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    whole, half_written = map(int, run.stdout.split())
    assert whole > 2, "every kill came before the first save"
    assert half_written > 2, "no kill fell within a save"
