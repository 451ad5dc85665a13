"""Our benchmark specs ask for what the originals' do: theirs translated, ours by named configs, option by option."""

import shlex
from pathlib import Path

import pytest

from falconet.bench.spec import find_spec, read_spec
from falconet.config.commands import COMMANDS
from falconet.config.fields import options_of, value_of
from falconet.config.load import parse
from falconet.config.recipes import from_config
from falconet.config.settings import from_line
from falconet.legacy.poprun import read_poprun
from falconet.legacy.table import Place
from falconet.legacy.translate import translate

ROOT = Path(__file__).parents[2]
PROGRAMS = {"train": "pytorch:train.py", "inference": "pytorch:inference/run_benchmark.py"}
# Where lines and files go and how many are measured; weights are not fetched to measure speed; tuned for an IPU.
OURS = {"data-dir", "logs-per-epoch", "checkpoints-kept", "iterations", "weights", "wandb-project"}
OURS |= {"available-memory-proportion", "checkpoint-output-path", "weight-avg-N", "weight-avg-exp-decay"}


def words(entry):
    """The command of the first variant."""
    command = entry.command
    for name, value in entry.variants[0].items():
        command = command.replace(f"{{{name}}}", value)
    return shlex.split(command)


def values(command, line):
    """Every option of a canonical line, by name."""
    schema = COMMANDS[command]
    settings = from_line(line, options_of(schema))
    named = [setting.values[0] for setting in settings if setting.option == "config"]
    stored = from_config(named[-1], options_of(schema), use=command) if named else []
    options = parse(schema, [*stored, *(one for one in settings if one.option != "config")]).options
    return {name: value_of(options, option) for name, option in options_of(schema).items() if name not in OURS}


def ours(entry):
    line = words(entry)[1:]
    count = 2 if line[0] == "bench" else 1
    return values(" ".join(line[:count]), line[count:])


def theirs(kind, entry):
    line = words(entry)
    launched = read_poprun([word.replace("$HOSTS", "host") for word in line[line.index("poprun") + 1 :]])
    folder = ROOT / "compat/pytorch" / kind
    place = Place(folder=folder, configs=folder / "configs.yml", replicas=launched.replicas)
    translation = translate(PROGRAMS[kind], launched.program[2:], place=place)
    return values(translation.command, translation.argv()[len(translation.command.split()) :])


@pytest.mark.parametrize("kind", PROGRAMS)
def test_our_specs_ask_for_what_the_originals_do(kind):
    mine = {entry.name: entry for entry in read_spec(find_spec(f"pytorch_{kind}"))}
    for original in read_spec(ROOT / f"tests/data/bench/{kind}_benchmarks.yml"):
        if "tritonserver" not in original.name:
            assert ours(mine[original.name]) == theirs(kind, original), original.name


@pytest.mark.parametrize("folder", ["pytorch/train", "pytorch/inference", "tensorflow"])
def test_the_originals_folders_link_to_our_specs(folder):
    spec = ROOT / "compat" / folder / "benchmarks.yml"
    assert spec.is_symlink()
    assert spec.resolve() == ROOT / f"falconet/bench/specs/{folder.replace('/', '_')}.yml"
