"""No option of the originals is missing from the dialects, nor from docs/originals/migration.md."""

import csv
import re
from pathlib import Path

import pytest

from falconet.config.commands import COMMANDS
from falconet.config.fields import options_of
from falconet.legacy import migration
from falconet.legacy.migration import OUTSIDE
from falconet.legacy.translate import PROGRAMS

ROOT = Path(__file__).parents[2]
ROWS = list(
    csv.DictReader((ROOT / "tests/data/options.tsv").read_text().splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
)
ANY_OF_PYTEST = "(any pytest option)"  # the originals' Triton benchmark handed them on; -k, -s and -v are read here


def programs_of(row):
    """The programs a row speaks of; documented options without code are marked so."""
    dialect, _, names = row["program"].removesuffix("(doc-only)").partition(":")
    return (
        [f"{dialect}:{name}" for name in names.split("/") if name.endswith(".py")]
        if "doc-only" in row["program"]
        else [row["program"]]
    )


def spellings(row):
    """An option with those aliases that its program really had."""
    written = re.findall(r"(?:^|[ (])(-{1,2}[A-Za-z][\w-]*)", f"{row['option']} ")
    also = [] if row["aliases"].startswith(("documented", "code", "no counterpart")) else row["aliases"].split(";")
    return [*written, *(name for text in also for name in re.findall(r"^\s*(--?[A-Za-z][\w-]*)", text))]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['program']} {row['option']}" for row in ROWS])
def test_an_option_of_the_originals_is_in_its_dialect(row):
    if row["option"] == ANY_OF_PYTEST:
        return
    for program in programs_of(row):
        if program in OUTSIDE:
            assert row["option"] in OUTSIDE[program], f"{program} {row['option']}"
            continue
        options = {name: option for option in PROGRAMS[program].options for name in option.names}
        for name in spellings(row):
            prefixed = [option.name for option in PROGRAMS[program].options if option.name.startswith(name)]
            assert name in options or len(prefixed) == 1, f"{program} has no {name}"


@pytest.mark.parametrize("row", [row for row in ROWS if row["choices"] and "," in row["choices"]], ids=str)
def test_the_choices_of_an_option_are_taken(row):
    for program in programs_of(row):
        if program in PROGRAMS:
            options = {name: option for option in PROGRAMS[program].options for name in option.names}
            option = options[row["option"]]
            assert not option.choices or set(row["choices"].split(",")) <= set(option.choices)


def test_all_488_rows_were_walked():
    assert len(ROWS) == 488


def test_what_an_option_becomes_is_an_option_here():
    """Every canonical name in the tables is one that a command has."""
    known = {name for schema in COMMANDS.values() for name in options_of(schema)}
    known |= {"help", "config", "TRITON_CACHE_DIR", "FALCONET_RUNS", "CUDA_VISIBLE_DEVICES"}
    for program in PROGRAMS.values():
        for option in program.options:
            assert set(option.new) <= known, f"{program.name} {option.name}: {set(option.new) - known}"


BECOMES = {  # commands of the programs whose line decides which one
    "tf1:train.py": ("train", "restore", "data bench"),
    "tf1:validation.py": ("bench infer", "validate", "data bench"),
    "tf1:inference_embedded.py": ("bench infer", "bench serve"),
    "popart:resnet_synthetic_benchmark.py": ("train", "bench infer"),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=lambda program: program.name)
def test_what_an_option_becomes_is_an_option_of_the_command_that_runs(program):
    """Else its row promises what `falconet` then says to have no effect."""
    commands = BECOMES.get(program.name) or (program.command,)
    known = {name for command in commands for name in options_of(COMMANDS[command])}
    known |= {"help", "config", "TRITON_CACHE_DIR", "FALCONET_RUNS", "CUDA_VISIBLE_DEVICES"}
    promised = {option.name: set(option.new) - known for option in program.options}
    assert not {name: missing for name, missing in promised.items() if missing}


def test_every_option_says_in_one_line_what_becomes_of_it():
    for program in PROGRAMS.values():
        names = [name for option in program.options for name in option.names]
        assert len(names) == len(set(names)), f"{program.name}: twice the same name"
        for option in program.options:
            assert option.effect, f"{program.name} {option.name}"
            assert "\n" not in option.effect


def test_the_page_of_the_migration_is_not_stale():
    assert (ROOT / "docs/originals/migration.md").read_text(encoding="utf-8") == migration.page()
