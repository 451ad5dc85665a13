"""The folder of a run: used by no other run at the same time."""

import contextlib
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from falconet.config.commands import TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import load
from falconet.config.settings import from_line
from falconet.legacy.conventions import CONVENTIONS
from falconet.train import preparation, run, run_folder, workers
from tiny import TINY

REFUSED = "r: in use by another run; wait for it to finish, or choose another --run-dir\n"


@pytest.fixture(autouse=True)
def one_second(monkeypatch, tmp_path):
    """All of these runs start in the same second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("falconet.report.folders.time", SimpleNamespace(strftime=lambda _: "20261115-210000"))


def loaded(line=""):
    return load(TrainOptions, from_line(line.split(), options_of(TrainOptions)))


def test_runs_started_in_the_same_second_get_separate_folders():
    folders = [run_folder.claim(loaded().options) for _ in range(3)]
    name = "resnet8-cifar_digits_20261115-210000"
    assert [folder.name for folder in folders] == [name, f"{name}-2", f"{name}-3"]
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize(
    ("line", "conventions"), [("--run-dir r", "falconet"), ("--checkpoint-output-path r", "pytorch")]
)
def test_a_named_folder_is_not_created_in_advance(tmp_path, line, conventions):
    options = loaded(line).options
    assert run_folder.claim(options, CONVENTIONS[conventions]).name == "r"
    assert not (tmp_path / "r").exists()


def test_a_dangling_link_is_left_for_the_write_to_report(tmp_path):
    (tmp_path / "runs").mkdir()
    link = tmp_path / "runs/resnet8-cifar_digits_20261115-210000"
    link.symlink_to("nowhere")
    assert run_folder.claim(loaded().options).name == link.name


def test_workers_that_never_start_leave_no_folder(tmp_path, monkeypatch):
    seen = []

    def launched(workers, **_):
        seen.append(workers.argv[workers.argv.index("--run-dir") + 1])
        assert (tmp_path / seen[0]).is_dir(), "created before they start, which takes seconds"
        return 2

    monkeypatch.setattr("falconet.parallel.launch.launch", launched)
    monkeypatch.setattr("falconet.parallel.world.cores", lambda processes=1: 2)
    options = loaded("--replicas 2 --device cpu")
    assert workers.start("train", [], preparation.prepare(options)) == 2
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("place", ["photos", "photos/train", "photos/train/dark", "./photos/../photos"])
def test_a_run_folder_is_not_made_of_the_photos(falconet, image_folder, place):
    """It would not be read as photos again, not even by `restore`."""
    line = f"train photos {TINY} --data folder --model resnet8-cifar --pretrained none --epoch 1"
    before = sorted(path for path in image_folder.rglob("*") if ".falconet-index" not in path.parts)
    answer = falconet(f"{line} --run-dir {place}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert f"--run-dir: {Path(place)} holds the photos that are trained on; expected another folder" in answer.err
    assert sorted(path for path in image_folder.rglob("*") if ".falconet-index" not in path.parts) == before
    assert falconet(f"{line} --run-dir photos/runs/first").code == 0
    assert falconet("restore photos/runs/first --epoch 2").code == 0


def test_a_second_run_in_a_folder_in_use_is_refused(falconet, monkeypatch):
    """Two would mix their metrics, and remove each other's checkpoints."""
    monkeypatch.setattr(run_folder, "ENDING", 0.1)
    Path("r").mkdir()
    with run_folder.alone(Path("r")):
        answer = falconet(f"train {TINY} --epoch 1 --run-dir r")
        assert (answer.code, answer.err) == (2, f"falconet train: {REFUSED}")
        assert not Path("r/config.yaml").exists()
    assert falconet(f"train {TINY} --epoch 1 --run-dir r").code == 0
    with run_folder.alone(Path("r")):
        answer = falconet("restore --checkpoint-input-path r --epoch 2")
        assert (answer.code, answer.err) == (2, f"falconet restore: {REFUSED}")
    assert falconet("restore --checkpoint-input-path r --epoch 2").code == 0


@pytest.mark.parametrize("content", ["model: [", "\t- a: b: c"])
def test_a_run_with_a_damaged_config_continues_in_its_folder(falconet, content):
    """It was told to expect a --run-dir, and with that, to restore the run."""
    assert falconet(f"train {TINY} --epoch 1 --run-dir r").code == 0
    Path("r/config.yaml").write_text(content)
    answer = falconet("restore r --epoch 2")
    assert answer.code == 0, answer.err
    assert "model: resnet8-cifar" in Path("r/config.yaml").read_text()
    assert [path.name[-1] for path in sorted(Path("r/checkpoints").iterdir())] == ["1", "2"]


def test_a_folder_in_the_place_of_a_file_is_named_in_one_line(falconet):
    assert falconet(f"train {TINY} --epoch 1 --run-dir r").code == 0
    Path("r/metrics.jsonl").unlink()
    Path("r/metrics.jsonl").mkdir()
    answer = falconet("restore r --epoch 2")
    expected = "Is a directory; expected a file or folder that you may read and write"
    assert (answer.code, answer.err) == (2, f"falconet restore: r/metrics.jsonl: {expected}\n")


@pytest.mark.parametrize("line", ["restore r --epoch 3", f"train {TINY} --run-dir r --resume"])
def test_a_run_that_goes_on_is_refused_before_its_checkpoints_are_read(falconet, monkeypatch, line):
    """They were missing by then: a run removes older ones."""
    assert falconet(f"train {TINY} --run-dir r").code == 0

    def read(*_):
        pytest.fail("a checkpoint is read")

    monkeypatch.setattr(run_folder, "ENDING", 0.1)
    with run_folder.alone(Path("r")):
        with monkeypatch.context() as patched:
            patched.setattr("falconet.commands.restore.read_manifest", read)
            patched.setattr("falconet.train.resume.newest", read)
            answer = falconet(line)
        assert (answer.code, answer.err) == (2, f"falconet {line.split()[0]}: {REFUSED}")
        assert falconet(f"{line} --plan").code == 0


def test_resuming_a_run_that_is_still_going_on_is_refused(falconet, monkeypatch):
    monkeypatch.setattr(run_folder, "ENDING", 0.1)
    line = f"train {TINY} --epoch 2 --run-dir r --checkpoints-kept all --resume"
    assert falconet(line).code == 0
    shutil.rmtree(max(Path("r/checkpoints").iterdir()))
    with run_folder.alone(Path("r")):
        answer = falconet(line)
        assert (answer.code, answer.err) == (2, f"falconet train: {REFUSED}")
    assert falconet(line).code == 0


def test_a_run_waits_for_one_that_is_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "ENDING", 300.0)
    with contextlib.ExitStack() as other:
        other.enter_context(run_folder.alone(tmp_path))
        threading.Timer(0.1, other.close).start()
        with run_folder.alone(tmp_path):
            pass


def test_another_attempt_at_the_same_run_is_never_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "ENDING", 0.1)
    with run_folder.alone(tmp_path), run_folder.alone(tmp_path, again=True):
        pass


def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with run_folder.alone(tmp_path), run_folder.alone(tmp_path):
        pass


def test_a_failed_run_releases_the_folder(tmp_path):
    with pytest.raises(ValueError, match="badly"), run_folder.alone(tmp_path):
        raise ValueError("badly")
    with run_folder.alone(tmp_path):
        pass


OTHER = "in use by another run; wait for it to finish, or choose another --checkpoint-output-path\n"


def test_a_folder_of_checkpoints_in_use_is_refused_to_other_runs_and_averages(falconet, monkeypatch):
    """Two would replace each other's checkpoints, and both would exit with 0."""
    monkeypatch.setattr(run_folder, "ENDING", 0.1)
    shared = "--checkpoint-output-path saved"
    Path("saved").mkdir()
    with run_folder.alone(Path("saved")):
        answer = falconet(f"train {TINY} --epoch 1 --run-dir r {shared}")
        assert (answer.code, answer.err) == (2, f"falconet train: saved: {OTHER}")
    assert list(Path("saved").iterdir()) == []
    assert falconet(f"train {TINY} --epoch 1 --run-dir r {shared}").code == 0
    with run_folder.alone(Path("saved")):
        answer = falconet(f"restore --checkpoint-input-path saved --run-dir s --epoch 2 {shared}")
        assert (answer.code, answer.err) == (2, f"falconet restore: saved: {OTHER}")
        answer = falconet("average --checkpoint-input-path saved")
        assert (answer.code, answer.err) == (2, f"falconet average: saved: {OTHER}")
    assert len(list(Path("saved").iterdir())) == 1
    assert falconet("average --checkpoint-input-path saved").code == 0


def test_the_checkpoints_of_a_run_are_locked_where_another_run_would_save(falconet, monkeypatch):
    monkeypatch.setattr(run_folder, "ENDING", 0.1)
    refused, opened = [], run._open_sinks

    def meanwhile(*given, **named):
        if not refused:
            refused.append("")
            refused.append(falconet(f"train {TINY} --run-dir s --checkpoint-output-path r/checkpoints").err)
        return opened(*given, **named)

    monkeypatch.setattr(run, "_open_sinks", meanwhile)
    assert falconet(f"train {TINY} --epoch 1 --run-dir r").code == 0
    assert refused[1] == f"falconet train: r/checkpoints: {OTHER}"
