"""No option of the originals is missing from the tables, nor from docs/originals/migration.md."""

import csv
import re
from pathlib import Path

from falconet.config.commands import COMMANDS
from falconet.config.fields import options_of
from falconet.legacy import migration
from falconet.legacy.migration import OUTSIDE
from falconet.legacy.translate import PROGRAMS

ROOT = Path(__file__).parents[2]
ROWS = list(
    csv.DictReader((ROOT / "tests/data/options.tsv").read_text().splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
)
ANY_OF_PYTEST = "(any pytest option)"  # the originals' Triton benchmark passed them on; -k, -s and -v are read here
BESIDES = {"help", "config", "TRITON_CACHE_DIR", "FALCONET_RUNS", "CUDA_VISIBLE_DEVICES"}  # what is not in a schema


def programs_of(row):
    """The programs of a row; documented options without code are marked so."""
    dialect, _, names = row["program"].removesuffix("(doc-only)").partition(":")
    if "doc-only" not in row["program"]:
        return [row["program"]]
    return [f"{dialect}:{name}" for name in names.split("/") if name.endswith(".py")]


def spellings(row):
    """An option with those aliases that its program really had."""
    written = re.findall(r"(?:^|[ (])(-{1,2}[A-Za-z][\w-]*)", f"{row['option']} ")
    also = [] if row["aliases"].startswith(("documented", "code", "no counterpart")) else row["aliases"].split(";")
    return [*written, *(name for text in also for name in re.findall(r"^\s*(--?[A-Za-z][\w-]*)", text))]


def named(program):
    return {name: option for option in PROGRAMS[program].options for name in option.names}


def is_known(program, name):
    """By its name, or by the start of exactly one."""
    longer = [option.name for option in PROGRAMS[program].options if option.name.startswith(name)]
    return name in named(program) or len(longer) == 1


def test_every_option_of_the_originals_is_in_a_table():
    assert len(ROWS) == 488
    rows = [(program, row) for row in ROWS if row["option"] != ANY_OF_PYTEST for program in programs_of(row)]
    inside = {(program, name) for program, row in rows if program in PROGRAMS for name in spellings(row)}
    outside = {(program, row["option"]) for program, row in rows if program not in PROGRAMS}
    assert inside
    assert {pair for pair in inside if not is_known(*pair)} == set()
    assert outside - {(program, option) for program, options in OUTSIDE.items() for option in options} == set()


def test_every_choice_of_an_option_is_accepted():
    missing = {
        (program, row["option"], choice)
        for row in ROWS
        if "," in row["choices"]
        for program in programs_of(row)
        if program in PROGRAMS and named(program)[row["option"]].choices
        for choice in row["choices"].split(",")
        if choice not in named(program)[row["option"]].choices
    }
    assert missing == set()


COMMANDS_OF = {  # of programs whose line decides
    "tf1:train.py": ("train", "restore", "data bench"),
    "tf1:validation.py": ("bench infer", "validate", "data bench"),
    "tf1:inference_embedded.py": ("bench infer", "bench serve"),
    "popart:resnet_synthetic_benchmark.py": ("train", "bench infer"),
}


def test_every_option_becomes_options_of_the_command_that_runs():
    """Otherwise its row promises what `falconet` then reports as having no effect."""
    promised = {
        (program.name, option.name, new)
        for program in PROGRAMS.values()
        for option in program.options
        for new in option.new
    }
    known = {
        program.name: BESIDES.union(*(options_of(COMMANDS[command]) for command in commands))
        for program in PROGRAMS.values()
        for commands in [COMMANDS_OF.get(program.name) or (program.command,)]
    }
    assert {row for row in promised if row[2] not in known[row[0]]} == set()


def test_every_name_is_given_once_and_explained_in_one_line():
    names = [(program.name, name) for program in PROGRAMS.values() for o in program.options for name in o.names]
    assert {name for name in names if names.count(name) > 1} == set()
    options = [(program.name, option) for program in PROGRAMS.values() for option in program.options]
    assert {(name, one.name) for name, one in options if not one.effect or "\n" in one.effect} == set()


def test_the_migration_page_is_not_stale():
    assert (ROOT / "docs/originals/migration.md").read_text(encoding="utf-8") == migration.page()
