"""The command line: commands, help, typos, interruptions."""

import errno
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from falconet import cli
from falconet.cli import GROUPS, main
from falconet.config import load, rules
from falconet.config.commands import COMMANDS
from falconet.config.fields import options_of

ANSWERS = {
    "data": (0, "usage: falconet data COMMAND [options]"),
    "data --help": (0, "data pack"),
    "data pakc": (2, "falconet: 'data pakc' is not a command; did you mean 'data pack'?"),
    "dada": (2, "falconet: 'dada' is not a command; did you mean 'data'?"),
    "data pack": (2, "falconet data pack: expected two folders: one with train/ and val/, and one for the shards"),
    "data pack here": (2, "falconet data pack: expected two folders"),
    "data pack nowhere there": (2, "falconet data pack: nowhere: no such folder; expected photos"),
    "data pack a b c": (2, "falconet data pack: --target: got 'b c', expected one value"),
    "data pack a b --resize x": (2, "falconet data pack: --resize: got 'x', expected a whole number, at least 1"),
    "data pack a b --shard-sise 3": (2, "unknown option --shard-sise; did you mean '--shard-size'?"),
    "data pack --help": (0, "falconet data pack photos photos-packed"),
    "data verify": (2, "falconet data verify: expected a folder of shards"),
    "help train": (0, "usage: falconet train [DATA-DIR] [options]"),
    "help data pack": (0, "usage: falconet data pack SOURCE TARGET [options]"),
    "help": (0, "usage: falconet COMMAND [options]"),
    "help trian": (2, "falconet: 'trian' is not a command; did you mean 'train'?"),
    "train help": (0, "usage: falconet train [DATA-DIR] [options]"),
    "bench --help": (0, "falconet bench infer --help"),
    "--plan": (2, "falconet: --plan: expected a command before it, such as `falconet train --plan`"),
    "models resnet50": (2, "falconet models: got 'resnet50', expected no arguments"),
    "train --device gpu": (2, "--device: got 'gpu', expected auto, cpu or cuda; did you mean 'cuda'?"),
    "train --precision FP16": (2, "; did you mean '16.16'?"),
    "train --precision bf16.61": (2, "; did you mean 'bf16.bf16'?"),
    "bench --spec 21": (2, "there is no spec '21'; expected a YAML file or one of"),
    "data verify nowhere": (2, "nowhere: no such folder; expected one that `falconet data pack` made"),
}


@pytest.mark.parametrize(("line", "expected"), ANSWERS.items())
def test_a_line_gets_its_exit_code_and_answer(falconet, line, expected):
    answer = falconet(line)
    assert answer.code == expected[0]
    assert expected[1] in answer.out + answer.err


def test_every_file_of_commands_is_a_command():
    files = {path.stem for path in Path(cli.__file__).with_name("commands").glob("*.py")} - {"__init__"}
    assert files == {name.replace(" ", "_") for name in COMMANDS}


def test_overview_lists_every_command(falconet):
    shown = falconet("--help").out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_overview_of_a_group_lists_only_its_commands(falconet):
    shown = falconet("data").out
    assert "data" in GROUPS
    assert "data verify" in shown
    assert "restore" not in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_starts_with_an_example_and_offers_only_values_that_can_be_typed(falconet, command):
    shown = falconet(f"{command} --help-all").out
    assert "Example" in shown
    assert "{None}" not in shown
    assert "(default: )" not in " ".join(shown.split())


def test_help_shows_common_options_and_headings_and_help_all_shows_everything(falconet):
    short, whole = falconet("train --help").out, falconet("train --help-all").out
    common = [line.split()[0] for line in short.splitlines() if line.startswith("  --")]
    assert common == [f"--{name}" for name in COMMANDS["train"].common]
    assert len(common) == 20
    assert "  Learning rate  " in short
    assert "--proxy-norm" not in short
    names = options_of(COMMANDS["train"])
    assert [name for name in names if f"--{name} " not in whole and f"--[no-]{name} " not in whole] == []
    assert "\nLearning rate:\n" in whole
    assert whole.index("--data ") < whole.index("--proxy-norm")


def test_help_shows_types_and_defaults(falconet):
    shown = " ".join(falconet("train --help-all").out.split())
    assert "--lr-decay X ... Factor of each drop" in shown
    assert "--config TEXT A named config" in shown
    assert (
        "--momentum X Momentum of sgd, rmsprop and lars, and of what muon does not orthogonalise (default: 0.9)."
        in shown
    )


def test_help_of_a_training_shows_the_defaults_for_photos_beside_its_own(falconet):
    shown = {name: " ".join(falconet(f"{name} --help-all").out.split()) for name in ("train", "search", "restore")}
    for name in ("train", "search"):
        assert "(default: resnet8-cifar, for photos efficientnet-b0)." in shown[name]
        assert "(default: 0.1, for photos 5e-4)." in shown[name]
    assert "for photos efficientnet-b0" not in shown["restore"]  # which continues with what the run had
    assert "(default: cosine)." in shown["train"]  # the same for photos


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["", *COMMANDS, "data"])
def test_help_fits_the_terminal(falconet, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    wide = [line for line in falconet(f"{command} --help").out.splitlines() if len(line) > columns]
    assert not [line for line in wide if not line.startswith("usage: ")]


def test_wrapped_example_is_still_a_command_line(falconet, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = falconet("average --help").out.partition("Example:\n")[2].partition("\n\n")[0]
    assert shlex.split(shown.replace("\\\n", "")) == COMMANDS["average"].example.split()
    assert "\n" in shown


def test_help_shows_a_switch_by_the_name_that_changes_something(falconet):
    shown = " ".join(falconet("serve --help-all").out.split())
    assert "--half-partial Let matrix products" in shown
    assert "--[no-]capture On CUDA" in shown
    assert "less CPU work (default: on)." in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_common_options_and_arguments_exist(command):
    schema = COMMANDS[command]
    assert {*schema.common, *schema.arguments} <= options_of(schema).keys()


def test_a_train_line_is_parsed_once_and_checked_once(falconet, monkeypatch):
    counts = {"parse": 0, "check": 0}

    def counted(module, name):
        function = getattr(module, name)

        def call(*arguments, **named):
            counts[name] += 1
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, call)

    counted(load, "parse")
    counted(rules, "check")
    answer = falconet("train --config digits --epoch 1 --device cpu --plan")
    assert (answer.code, counts) == (0, {"parse": 1, "check": 1}), answer.err


def test_commands_of_one_process_do_nothing_in_the_others(falconet, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "import_module", lambda name: pytest.fail(f"{name} would be imported"))
    assert falconet("average --checkpoint-input-path none") == (0, "", "")


def test_name_that_is_not_utf8_is_printed_escaped(monkeypatch):
    """Such as a photo's in a note: stdout would refuse it, and end the run."""
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
@pytest.mark.parametrize("library", ["yaml", "torch"])
@pytest.mark.parametrize("line", ["train --plan", "bench infer --plan"])
def test_ctrl_c_during_imports_exits_silently(tmp_path, start, library, line):
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


@pytest.mark.run
def test_train_imports_no_library_that_it_does_not_need():
    """timm takes two seconds and torch's pipelines one: of every launcher, of every worker, of every mistake."""
    code = (
        "import sys, falconet.commands.train, falconet.commands.restore, falconet.models.zoo\n"
        "falconet.models.zoo.build('resnet8-cifar', classes=2, seed=0)\n"
        "print(sorted({'timm', 'torchvision', 'torch._dynamo', 'torch.distributed.pipelining'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("command", ["train", "validate", "report", "data check", "serve", "export"])
def test_a_name_that_is_too_long_is_named_in_one_line(falconet, command):
    answer = falconet(f"{command} {'x' * 300}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "xxx: File name too long" in answer.err


@pytest.mark.parametrize(
    "line", ["restore --checkpoint-input-path theirs/r", "train --data folder --data-dir theirs/p"]
)
def test_folder_without_permission_is_named_in_one_line(falconet, monkeypatch, line):
    def refuse(path):
        if "theirs" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return True

    monkeypatch.setattr(Path, "is_dir", refuse)
    monkeypatch.setattr(Path, "is_file", refuse)
    answer = falconet(line)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert (
        f": {line.split()[-1]}: Permission denied; expected a file or folder that you may read and write" in answer.err
    )
