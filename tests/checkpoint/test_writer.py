"""Saving in the background writes the state as it was when asked, and survives being killed."""

import subprocess
import sys
import threading

import pytest
import torch

from falconet.checkpoint import format
from falconet.checkpoint.writer import Writer
from falconet.errors import CheckpointError


def content(epoch=1):
    return {"model": "m", "classes": 2, "progress": {"epoch": epoch, "images": 0, "update": 0}}


def weights(value=1.0):
    return {"model": {"w": torch.full((3,), value)}}


def read(folder):
    return format.read_tensors(folder, "model", verified=format.verify(folder))["w"]


@pytest.fixture
def held(monkeypatch):
    """Writing waits until this event is set."""
    released = threading.Event()
    write = format.write

    def slow(*args):
        assert released.wait(300)
        write(*args)

    monkeypatch.setattr(format, "write", slow)
    return released


def test_training_can_continue_while_the_state_is_written(tmp_path, held):
    state, given = weights(1.0), content(1)
    with Writer() as writer:
        writer.save(tmp_path / "a", state, given)
        state["model"]["w"].add_(5)
        given["progress"]["epoch"] = 99
        held.set()
    assert read(tmp_path / "a").tolist() == [1, 1, 1]
    assert format.read_manifest(tmp_path / "a").progress.epoch == 1


def test_saving_returns_before_anything_is_written(tmp_path, held):
    with Writer() as writer:
        writer.save(tmp_path / "a", weights(), content())
        assert list(tmp_path.iterdir()) == []
        held.set()
        writer.wait()
        assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_second_save_waits_for_the_first(tmp_path, held):
    order = []
    with Writer() as writer:
        writer.save(tmp_path / "a", weights(), content(), after=lambda: order.append("a written"))

        def second():
            order.append("b asked for")
            held.set()  # the first save can only finish once the second has been asked for

        asked = threading.Thread(target=second)
        asked.start()
        writer.save(tmp_path / "b", weights(), content(), after=lambda: order.append("b written"))
        order.append("b copied")
        asked.join()
    assert order.index("a written") < order.index("b copied")
    assert order.index("b asked for") < order.index("a written") < order.index("b written")


def test_after_is_called_once_the_checkpoint_is_complete(tmp_path):
    seen = []
    with Writer() as writer:
        writer.save(tmp_path / "a", weights(), content(), after=lambda: seen.append(format.verify(tmp_path / "a")))
    assert seen[0].progress.epoch == 1


def test_a_failed_save_is_raised_once_by_the_next_call_and_saving_continues(tmp_path):
    (tmp_path / "file").touch()
    with Writer() as writer:
        writer.save(tmp_path / "file", weights(), content())
        with pytest.raises(CheckpointError, match="cannot save"):
            writer.save(tmp_path / "b", weights(), content())
        writer.save(tmp_path / "b", weights(), content())
        writer.wait()
        writer.save(tmp_path / "file", weights(), content())
        with pytest.raises(CheckpointError, match="cannot save"):
            writer.wait()
    assert read(tmp_path / "b").tolist() == [1, 1, 1]


def test_closing_raises_the_error_of_a_failed_save(tmp_path):
    (tmp_path / "file").touch()
    writer = Writer()
    writer.save(tmp_path / "file", weights(), content())
    with pytest.raises(CheckpointError, match="cannot save"):
        writer.close()


def run_that_stops(folder, error):
    with Writer() as writer:
        writer.save(folder, weights(), content())
        raise error


def test_a_failed_save_does_not_hide_what_stopped_the_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(KeyboardInterrupt) as caught:
        run_that_stops(tmp_path / "file", KeyboardInterrupt())
    assert caught.value.__notes__ == [f"cannot save {tmp_path / 'file'}: Not a directory"]


def test_a_stopped_run_finishes_its_save(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_that_stops(tmp_path / "a", KeyboardInterrupt())
    assert read(tmp_path / "a").tolist() == [1, 1, 1]


def test_content_that_json_cannot_hold_fails_in_the_caller(tmp_path):
    with Writer() as writer, pytest.raises(TypeError, match="not JSON serializable"):
        writer.save(tmp_path / "a", weights(), content() | {"plan": torch.zeros(1)})


def test_saving_waits_for_the_copy_not_for_the_disk(tmp_path, held):
    state = {"model": {str(i): torch.zeros(1 << 18) for i in range(32)}}  # 32 MiB
    with Writer() as writer:
        writer.save(tmp_path / "a", state, content())
        assert not held.is_set()  # back already, though nothing can be written before this
        held.set()
    assert list(format.verify(tmp_path / "a").stems) == ["model"]


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from falconet.checkpoint import format
from falconet.checkpoint.writer import Writer

home = Path(sys.argv[1])

def save(writer, epoch):
    group = {"x": torch.full((20_000,), float(epoch))}
    progress = dict.fromkeys(("epoch", "images", "update"), epoch)
    content = {"model": "m", "classes": 2, "progress": progress}
    writer.save(home / f"epoch_{epoch}", {"model": group, "optimizer": group}, content)

def half_written():
    return sum(p.name.startswith(".") for p in home.iterdir())

with Writer() as writer:
    save(writer, 0)
    writer.wait()
    began = time.perf_counter()
    save(writer, 1)
usual = min(time.perf_counter() - began, 0.1)  # seconds; on a busy machine this one may take far longer than others
random.seed(0)
newest = 1
for attempt in range(300):
    if attempt >= 30 and newest > 2 and half_written() > 2:
        break  # on a busy machine a child may be killed before it starts, or between two saves
    child = os.fork()
    if child == 0:
        with Writer() as writer:
            for epoch in range(newest + 1, newest + 100):
                save(writer, epoch)
        os._exit(0)
    time.sleep(random.uniform(0, (4 + attempt / 10) * usual))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = format.checkpoints_in(home)
    assert [p.name for p in found] == [f"epoch_{i}" for i in range(len(found))]
    newest = len(found) - 1
for epoch, folder in enumerate(found):
    manifest = format.verify(folder)
    for stem in ("model", "optimizer"):
        assert torch.all(format.read_tensors(folder, stem, verified=manifest)["x"] == epoch)
print(len(found), half_written())
"""


@pytest.mark.run
def test_kill_9_while_saving_leaves_only_complete_checkpoints(tmp_path):
    run = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    whole, half_written = map(int, run.stdout.split())
    assert whole > 2, "every kill came before the first save"
    assert half_written > 2, "no kill fell within a save"
