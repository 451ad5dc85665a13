"""The schema: declared once, complete, and in step with what it names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falconet import cli
from falconet.config import commands, options
from falconet.config.effects import EFFECTIVE_WHEN
from falconet.config.fields import options_of
from falconet.config.load import INVOCATION
from falconet.config.settings import from_line
from falconet.models import zoo

ALL = sorted({option for command in commands.COMMANDS.values() for option in options_of(command).items()}, key=str)


def test_every_command_has_options_and_words_about_it_in_the_same_order():
    assert list(cli.COMMANDS) == list(commands.COMMANDS)


def test_the_names_of_the_models_are_those_of_the_zoo():
    assert zoo.names() == options.MODELS


@pytest.mark.parametrize(("name", "option"), ALL, ids=[f"{o.path[0]}-{n}" for n, o in ALL])
def test_every_option_has_help_of_a_sentence(name, option):
    assert option.help.endswith(".")
    assert option.help[0].isupper() or option.help.split(":")[0].split(",")[0] in (*option.choices(), "timm")
    assert len(option.help) <= 120


# What reaches the network, deletes, traces, or starts anything beside the training.
ACTS = (
    *("wandb", "wandb-project", "allow-wandb", "tensorboard", "weight-histogram", "profile", "url", "host", "port"),
    *("weights", "checkpoints-kept", "temporary", "resume", "config", "plan"),
)


@pytest.mark.parametrize(("name", "option"), ALL, ids=[f"{o.path[0]}-{n}" for n, o in ALL])
def test_whether_a_checkpoint_may_supply_a_path_or_a_sink_is_decided_at_the_option(name, option):
    """A new one is refused here until it is declared `local(...)`, or `portable(...)` with the reason beside it."""
    if option.takes_path or option.path[0] == "logging":
        assert option.origin is not None or name == "logs-per-epoch"
    assert option.is_local == (name in (*ACTS, *INVOCATION) or (option.takes_path and name != "data-dir"))


def test_every_default_is_within_its_own_range():
    for command in commands.COMMANDS.values():
        for option in options_of(command).values():
            assert option.out_of_range(option.default) is None, option.name


def test_rules_about_effects_name_real_options():
    assert {name for name, _, _ in EFFECTIVE_WHEN} <= options_of(commands.TrainOptions).keys()


NUMBERS = {
    name: option
    for name, option in options_of(commands.TrainOptions).items()
    if isinstance(option.default, float) and not option.choices()
}


@settings(deadline=None)  # how long parsing takes is the machine's affair
@given(st.sampled_from(sorted(NUMBERS)), st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_taken_exactly_or_refused_by_its_range(name, value):
    from falconet.config.load import parse, value_of
    from falconet.errors import ConfigError

    option = options_of(commands.TrainOptions)[name]
    try:
        options = parse(commands.TrainOptions, from_line([f"--{name}", repr(value)], options_of(commands.TrainOptions)))
    except ConfigError:
        assert option.out_of_range(value)
    else:
        assert value_of(options.options, option) == value
