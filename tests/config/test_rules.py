"""Rules hold for the commands that have what their parameters name; refusals are tested with their subjects."""

import ast
from functools import wraps
from pathlib import Path

import pytest

from falconet.config import rules
from falconet.config.commands import COMMANDS, Command, RestoreOptions, TrainOptions
from falconet.config.options import Optimizer, Parallel
from falconet.config.tool_options import Choice, Choices, Export
from falconet.errors import ConfigError


def commands_of(rule, monkeypatch):
    """The commands that a rule can refuse."""
    monkeypatch.setattr(rules, "RULES", (wraps(rule)(lambda **_: "broken"),))
    return {name for name, command in COMMANDS.items() if is_refused(command())}


def is_refused(options):
    try:
        rules.check(options)
    except ConfigError:
        return True
    return False


def on_two_sections(parallel: Parallel, optimizer: Optimizer): ...
def on_sections_that_no_command_has(parallel: Parallel, export: Export): ...
def on_one_checkpoint(choice: Choice): ...
def on_several_checkpoints(choice: Choices): ...
def on_training(options: TrainOptions): ...
def on_restore(options: RestoreOptions): ...
def on_any_command(options: Command): ...


TRAINING = {"train", "restore", "search", "doctor"}
HOLDS_FOR = {
    on_two_sections: TRAINING,
    on_sections_that_no_command_has: set(),
    on_one_checkpoint: {"predict", "export", "serve", "bench infer", "bench serve"},
    on_several_checkpoints: {"validate"},
    on_training: TRAINING,
    on_restore: {"restore"},
    on_any_command: set(COMMANDS),
}


@pytest.mark.parametrize("rule", HOLDS_FOR)
def test_rule_holds_for_the_commands_that_have_what_it_names(rule, monkeypatch):
    assert commands_of(rule, monkeypatch) == HOLDS_FOR[rule]


@pytest.mark.parametrize("rule", rules.RULES)
def test_every_rule_holds_for_a_command(rule, monkeypatch):
    """A wrong type would silently switch it off."""
    assert commands_of(rule, monkeypatch)


def test_every_rule_is_in_force():
    tree = ast.parse(Path(rules.__file__).read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("_")}
    assert own - used == set()
