"""Commands of two words: found, listed, and a typo answered with the nearest."""

import errno
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from falconet.cli import COMMANDS, GROUPS, main
from falconet.config import commands
from falconet.config.fields import options_of

ANSWERS = {
    "data": (0, "usage: falconet data COMMAND [options]"),
    "data --help": (0, "data pack"),
    "data pakc": (2, "falconet: 'data pakc' is not a command; did you mean 'data pack'?"),
    "dada": (2, "falconet: 'dada' is not a command; did you mean 'data'?"),
    "data pack": (2, "falconet data pack: needs two folders: the one with train/ and val/, and the one for the shards"),
    "data pack here": (2, "falconet data pack: needs two folders"),
    "data pack nowhere there": (2, "falconet data pack: nowhere: no such folder, expected one with train/ and val/"),
    "data pack a b c": (2, "falconet data pack: --target: takes one value, got 'b c'"),
    "data pack a b --resize x": (2, "falconet data pack: --resize: got 'x', wanted a whole number, at least 1"),
    "data pack a b --shard-sise 3": (2, "unknown option --shard-sise; did you mean '--shard-size'?"),
    "data pack --help": (0, "falconet data pack photos photos-packed"),
    "data verify": (2, "falconet data verify: needs the folder with the shards"),
    "help train": (0, "usage: falconet train [-h] [OPTIONS]"),
    "help data pack": (0, "usage: falconet data pack SOURCE TARGET"),
    "help": (0, "usage: falconet COMMAND [options]"),
    "help trian": (2, "falconet: 'trian' is not a command; did you mean 'train'?"),
    "train help": (0, "usage: falconet train [-h] [OPTIONS]"),
    "bench --help": (0, "falconet bench infer --help"),
    "--plan": (2, "falconet: --plan: a command was wanted before it, such as `falconet train --plan`"),
    "models resnet50": (2, "falconet models: 'resnet50': no option was wanted"),
    "train --device gpu": (2, "--device: got 'gpu', wanted auto, cpu, cuda; did you mean 'cuda'?"),
    "train --precision FP16": (2, "; did you mean '16.16'?"),
    "train --precision bf16.61": (2, "; did you mean 'bf16.bf16'?"),
    "bench --spec 21": (2, "no spec is named '21'; wanted a YAML file or one of"),
    "data verify nowhere": (2, "nowhere: no such folder, wanted one that `falconet data pack` has made"),
}


@pytest.mark.parametrize(("line", "expected"), ANSWERS.items())
def test_a_line_has_its_answer(falconet, line, expected):
    answer = falconet(line)
    assert answer.code == expected[0]
    assert expected[1] in answer.out + answer.err


def test_the_overview_names_every_command(falconet):
    shown = falconet("--help").out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_a_groups_overview_names_its_own(falconet):
    shown = falconet("data").out
    assert "data" in GROUPS
    assert "data verify" in shown
    assert "restore" not in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_offers_no_value_that_cannot_be_typed(falconet, command):
    """What may stay unset, or empty, is shown by what it takes."""
    shown = falconet(f"{command} --help").out
    assert "Example" in shown
    assert "{None}" not in shown
    assert "(default: )" not in " ".join(shown.split())


def test_a_list_shows_the_values_that_it_has_by_default(falconet):
    shown = " ".join(falconet("train --help").out.replace("\u2502", " ").split())
    assert "--lr-decay FLOAT ..." in shown
    assert "--config STR A named config" in shown
    assert "(default: none)" in shown


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["", *COMMANDS, "data"])
def test_help_fits_the_terminal(falconet, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    wide = [line for line in falconet(f"{command} --help").out.splitlines() if len(line) > columns]
    assert not [line for line in wide if not line.startswith("usage: ")]


def test_an_example_that_is_broken_is_still_a_command_line(falconet, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = falconet("train --help").out.partition("Example:\n")[2].partition("\n\n")[0]
    assert shlex.split(shown.replace("\\\n", "")) == COMMANDS["train"].example.split()
    assert "\n" in shown


def test_a_switch_is_shown_by_the_name_that_changes_something(falconet):
    shown = falconet("serve --help").out
    assert "--half-partial " in shown
    assert "--no-half-partial" not in shown.partition("serving options")[2]
    assert "--capture, --no-capture" in shown
    assert "(default: on)" in " ".join(shown.replace("\u2502", " ").split())
    assert "True)" not in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_to_begin_with_exist(command):
    assert set(COMMANDS[command].first) <= options_of(commands.COMMANDS[command]).keys()


def test_a_name_that_is_no_utf8_is_shown_escaped(monkeypatch):
    """A photo's, in a note: standard output would refuse it, and end the run."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["--version"]) == 0
    print(os.fsdecode(b"caf\xe9.jpg"), flush=True)
    assert shown.buffer.getvalue().splitlines()[-1] == b"caf\\udce9.jpg"


STARTS = {
    "a script": ["-c", "import sys; from falconet.__main__ import main; sys.exit(main())"],
    "-m": ["-m", "falconet"],
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("library", ["tyro", "torch"])
@pytest.mark.parametrize("line", ["train --plan", "bench infer --plan"])
def test_ctrl_c_while_libraries_are_imported_ends_it_without_a_word(tmp_path, start, library, line):
    """A library that swallows the interruption half-imported would break later, with a traceback."""
    (tmp_path / f"{library}.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(20)\n"
        "except BaseException:\n    pass\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, *start, *line.split()],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_run_imports_no_library_that_it_does_not_need():
    """timm takes two seconds and torch's pipelines one: of every launcher, of every worker, of every mistake."""
    code = (
        "import sys, falconet.commands.train, falconet.commands.restore, falconet.models.zoo\n"
        "falconet.models.zoo.build('resnet8-cifar', classes=2, seed=0)\n"
        "print(sorted({'timm', 'torchvision', 'torch._dynamo', 'torch.distributed.pipelining'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    "line", ["restore --checkpoint-input-path theirs/r", "train --data folder --data-dir theirs/p"]
)
def test_somebody_elses_folder_is_named_in_one_line(falconet, monkeypatch, line):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    monkeypatch.setattr(Path, "is_file", refuse)
    answer = falconet(line)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert f": {line.split()[-1]}: Permission denied; wanted one that you may read and write" in answer.err
