"""A run that ends early prints a command that continues it."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from falconet.checkpoint import weight_average
from falconet.train import interruption, run
from falconet.train.validation import Validation
from half_resolution import HALF, NAME, tensors
from tiny import TINY

PLACES = {
    "in the run folder": "",
    "elsewhere": "--checkpoint-output-path other/place",
    "the run folder": "--checkpoint-output-path r",
}


@pytest.mark.parametrize("more", PLACES.values(), ids=PLACES)
def test_the_printed_command_finds_the_checkpoints_and_the_run_folder(falconet, more):
    assert falconet(f"train {TINY} --epoch 1 --run-dir r {more}").code == 0
    refused = falconet(f"train {TINY} --epoch 1 --run-dir r {more}").err
    line = refused.partition("`falconet ")[2].partition("`")[0]
    answer = falconet(f"{line} --epoch 2")
    assert answer.code == 0, answer.err
    assert "run folder           r\n" in answer.out
    first, second = (list(Path().rglob(f"resnet8-cifar_generated_{epoch}")) for epoch in (1, 2))
    assert [path.parent for path in first] == [path.parent for path in second], "beside the others"


def test_the_printed_command_is_quoted_for_any_folder_name():
    folder = Path("mein Lauf; 'zwei'")
    line = interruption.restore_line(folder, folder / "checkpoints")
    assert shlex.split(line) == ["falconet", "restore", str(folder)]


def test_without_a_checkpoint_the_command_is_not_printed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    said = "there is no checkpoint to continue from; the same command starts over"
    assert interruption.how_to_continue(tmp_path, tmp_path / "checkpoints") == said
    assert interruption.how_to_continue(tmp_path, tmp_path / "never/made") == said


BEFORE = "stopped before the first update: nothing was saved"
AFTER = "stopped; there is no checkpoint to continue from; the same command starts over"


@pytest.mark.parametrize(("at", "words"), [("begin", BEFORE), ("train_phase", AFTER)], ids=["begin", "train"])
def test_ctrl_c_before_the_first_update_prints_what_was_saved(falconet, monkeypatch, at, words):
    monkeypatch.setattr(run, at, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    answer = falconet(f"train {TINY} --run-dir r")
    assert (answer.code, answer.err) == (130, "")
    assert answer.out.splitlines()[-1] == words
    assert Path("r").exists() == (at == "train_phase")


def test_ctrl_c_between_two_phases_prints_how_to_continue(falconet, monkeypatch):
    plain = run.begin

    def second_interrupted(built, *handed):
        return signal.raise_signal(signal.SIGINT) if handed else plain(built)

    monkeypatch.setattr(run, "begin", second_interrupted)
    answer = falconet(f"train {HALF} --run-dir r")
    assert (answer.code, answer.err) == (130, "")
    assert answer.out.splitlines()[-1] == "stopped; to continue: falconet restore r"


def interrupted_once(monkeypatch, owner, name):
    """Send Ctrl-C when something is called first."""
    plain, calls = getattr(owner, name), []

    def interrupted(*given, **named):
        if not calls:
            calls.append(signal.raise_signal(signal.SIGINT))
        return plain(*given, **named)

    monkeypatch.setattr(owner, name, interrupted)


TO_CONTINUE = "to continue: falconet restore r"


def test_ctrl_c_while_checkpoints_are_averaged_ends_the_run_before_the_next_phase(falconet, monkeypatch):
    line = f"train {HALF} --run-dir r"
    assert falconet(line.replace("-dir r", "-dir straight")).code == 0
    with monkeypatch.context() as patched:
        interrupted_once(patched, weight_average, "write")
        answer = falconet(line)
    assert (answer.code, answer.err) == (130, "")
    assert answer.out.splitlines()[-2:] == [f"saved r/checkpoints/{NAME}_2", TO_CONTINUE]
    assert "phase 2 of 2 starts" not in answer.out
    again = falconet("restore r")
    assert again.code == 0, again.err
    one, other = (tensors(f"{run}/checkpoints/{NAME}_4") for run in ("straight", "r"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_ctrl_c_while_checkpoints_are_validated_prints_how_to_continue(falconet, monkeypatch):
    line = f"train {TINY} --weight-avg-strategy mean --validate-checkpoints r/checkpoints --run-dir r"
    with monkeypatch.context() as patched:
        interrupted_once(patched, Validation, "other")
        answer = falconet(line)
    assert (answer.code, answer.err) == (130, "")
    assert answer.out.splitlines()[-2:] == [f"saved r/checkpoints/{NAME}_2", TO_CONTINUE]
    assert not Path("r/summary.json").exists()
    again = falconet("restore r --validate-checkpoints r/checkpoints")
    assert again.code == 0, again.err
    assert "written to r/validation.csv\n" in again.out
    assert Path("r/summary.json").exists()


@pytest.mark.run
def test_a_file_size_limit_is_found_before_the_first_update(tmp_path):
    limit = 40_000  # bytes that one file may have; the weights have 300 kB
    line = [sys.executable, "-m", "falconet", "train", *TINY.split(), "--run-dir", "r"]
    small = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    small += "os.execv(sys.argv[1], sys.argv[1:])"
    variables = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # cut short by the limit, it breaks every later import
    ended = subprocess.run(
        [sys.executable, "-c", small, *line], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert ended.returncode == 2, ended.stderr
    assert "r/checkpoints: no room for a checkpoint of 0.7 MB (File too large); raise the limit, which" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "1/2" not in ended.stdout
