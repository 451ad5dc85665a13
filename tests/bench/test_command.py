"""From a spec's command to the process that is started."""

import os
import sys
from pathlib import Path

import pytest

from falconet.bench.execution import build_command, child_environment
from falconet.bench.spec import Benchmark
from falconet.errors import ConfigError


def built(command, parameters=None, *, wandb=False, profile=False, environment=None, printed=None):
    benchmark = Benchmark(name="b", where="s.yml", folder=Path(), command=command, environment=environment or {})
    note = (printed if printed is not None else []).append
    return build_command(benchmark, parameters or {}, wandb=wandb, profile=profile, note=note)


def test_parameters_and_variables_are_filled_in(monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/a b")
    found = built("falconet train --data-dir $DATASETS_DIR/x --n {n} ${OWN}", {"n": "4"}, environment={"OWN": "o"})
    assert found.argv == (sys.executable, "-m", "falconet", "train", "--data-dir", "/a b/x", "--n", "4", "o")
    assert found.shown() == "OWN=o falconet train --data-dir '/a b/x' --n 4 o"
    assert found.environment == {"OWN": "o"}


def test_an_unset_variable_is_empty_with_a_note(monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    printed = []
    assert built("prog a$NOT_THERE", printed=printed).argv == ("prog", "a")
    assert printed == ["note: $NOT_THERE is not set; using an empty string"]


def test_an_empty_variable_is_noted(monkeypatch):
    monkeypatch.setenv("NOTHING", "")
    printed = []
    assert built("prog --data-dir $NOTHING", printed=printed).argv == ("prog", "--data-dir", "")
    assert printed == ["note: $NOTHING is empty"]


def test_an_unknown_parameter_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown parameter \{batchsise\}; did you mean 'batchsize'"):
        built("falconet {batchsise}", {"batchsize": "1"})


def test_json_in_a_command_is_left_alone():
    line = """X='{"a.b": "c"}' prog"""
    assert built(line).environment == {"X": '{"a.b": "c"}'}
    assert built(line).shown() == line


@pytest.mark.parametrize(("command", "message"), [("a 'b", "no closing quotation"), ("X=1", "names no program")])
def test_a_malformed_command_is_refused(command, message):
    with pytest.raises(ConfigError, match=f"s.yml: b: cmd: {message}"):
        built(command)


WANDB = "falconet train --wandb --wandb-project p --epoch 2 --wandb-name=n --seed 1"


def test_wandb_options_are_removed_unless_allowed():
    assert built(WANDB).shown() == "falconet train --epoch 2 --seed 1"
    assert built(WANDB, wandb=True).shown() == WANDB


@pytest.mark.parametrize(
    ("command", "profiled"),
    [("falconet train", True), ("python3 train.py --config x", True), ("falconet bench infer", False)],
)
def test_only_training_commands_are_profiled(command, profiled):
    assert ("--profile" in built(command, profile=True).argv) == profiled


def test_commands_use_this_python_and_the_programs_beside_it(tmp_path):
    found = built("python3 train.py", environment={"A": "b"})
    assert found.argv == (sys.executable, "train.py")
    environment = child_environment(found, tmp_path)
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert environment["FALCONET_RUNS"] == str(tmp_path)
    assert environment["A"] == "b"
