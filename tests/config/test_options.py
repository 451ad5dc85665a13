"""The options: declared once, complete, in step with the zoo and the docs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falconet.config import options
from falconet.config.commands import COMMANDS, TrainOptions
from falconet.config.docs import options_page
from falconet.config.effects import EFFECTIVE_WHEN
from falconet.config.fields import options_of, value_of
from falconet.config.load import INVOCATION, parse
from falconet.config.settings import from_line, spelled
from falconet.config.values import further_average
from falconet.errors import ConfigError
from falconet.models import zoo

ROOT = Path(__file__).parents[2]
ALL = {
    (option.section.__name__, name): option for kind in COMMANDS.values() for name, option in options_of(kind).items()
}


def test_model_names_are_those_of_the_zoo():
    assert zoo.names() == options.MODELS


def test_every_help_text_is_one_sentence_or_list_of_choices():
    def is_good(option):
        first = option.help.split(":")[0].split(",")[0]
        starts = option.help[0].isupper() or first in option.choices
        return starts and option.help.endswith(".") and len(option.help) <= 120

    assert [key for key, option in ALL.items() if not is_good(option)] == []


# What uses the network, deletes, traces, or starts anything beside the training.
ACTS = (
    *(
        "wandb",
        "wandb-project",
        "allow-wandb",
        "tensorboard",
        "mlflow",
        "aim",
        "weight-histogram",
        "profile",
        "url",
        "host",
        "port",
        "grpc-port",
    ),
    *("weights", "checkpoints-kept", "temporary", "resume", "config", "plan", "photos", "overwrite", "more-models"),
    *("watch", "runs", "allowed-host", "cors-origin", "opentelemetry", "page", "browser"),
)


def test_paths_and_sinks_declare_whether_a_checkpoint_may_supply_them():
    """A new one fails here until it is declared `local(...)`, or `portable(...)` with the reason beside it."""
    paths = {key for key, option in ALL.items() if option.takes_path or option.path[0] == "logging"}
    undeclared = {key for key in paths if ALL[key].origin is None}
    assert undeclared == {("Logging", "logs-per-epoch"), ("Logging", "log-interval")}
    is_local = {key for key, option in ALL.items() if option.is_local}
    named = {(section, name) for section, name in ALL if name in (*ACTS, *INVOCATION)}
    # What a run has says nothing about the devices of its validation.
    named |= {("Copies", "replicas"), ("Inference", "pipeline-splits")}
    read_only = {("Data", "data-dir"), ("Data", "exclude-list")}
    assert is_local == named | {key for key, option in ALL.items() if option.takes_path} - read_only


def test_every_default_is_a_value_of_its_type_and_within_its_range():
    set_by_default = {key: option for key, option in ALL.items() if not option.is_flag and option.default is not None}
    wrong = {k: o.default for k, o in set_by_default.items() if o.value(spelled(o.default)) != o.default}
    assert wrong == {}


def test_effects_name_real_options():
    assert {name for name, _, _ in EFFECTIVE_WHEN} <= options_of(TrainOptions).keys()


def test_options_page_is_up_to_date():
    assert (ROOT / "docs/knowing/options.md").read_text() == options_page(), "run `make docs`"


NUMBERS = {
    name: option
    for name, option in options_of(TrainOptions).items()
    if isinstance(option.default, float) and not option.choices
}


@given(st.sampled_from(sorted(NUMBERS)), st.floats(allow_nan=False, allow_infinity=False))
def test_number_is_taken_exactly_or_refused_by_its_range(name, value):
    option = NUMBERS[name]
    (limits,) = option.type.__metadata__
    try:
        parsed = parse(TrainOptions, from_line([f"--{name}", repr(value)], options_of(TrainOptions))).options
    except ConfigError:
        assert value not in limits
    else:
        assert value in limits
        assert value_of(parsed, option) == value


AVERAGES = {
    "mean:5": ("mean", 5, "mean_5"),
    "mean:all": ("mean", None, "mean_all"),
    "exponential:0.97": ("exponential", None, "exp_0.97"),
    "exponential:1": ("exponential", None, "exp_1"),
}


@pytest.mark.parametrize(("text", "expected"), AVERAGES.items())
def test_further_average_is_read(text, expected):
    found = further_average(text)
    assert (found.strategy, found.last, found.suffix) == expected


@pytest.mark.parametrize("text", ["mean", "mean:0", "mean:-1", "exponential:1.5", "exponential:", "ema:0.9", ""])
def test_invalid_further_average_is_not_read(text):
    assert further_average(text) is None
