"""Settings: options with their values as text, and the source of each."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from falconet.config import synonyms
from falconet.config.fields import Option
from falconet.errors import ConfigError, did_you_mean

LINE = "command line"
ENVIRONMENT = "environment variable DATA_DIR"
CHECKPOINT = "checkpoint"
WEIGHTS = "pretrained weights"  # values that they were trained with
DEFAULT = "default"
RETIRED = ("log-style",)  # options that a config.yaml of an earlier version may hold; ignored
ALIASES = {"imagenet-data-path": "data-dir", "wandb-weight-histogram": "weight-histogram"}
_NUMBER = re.compile(r"-\.?\d")
_OFF = "no-"  # before the name of a switch


class Setting(NamedTuple):
    """An option with its value as text: a switch has none, a list has any number."""

    option: str  # as typed, so a switch may start with no-
    values: tuple[str, ...]
    source: str

    @property
    def bare(self) -> str:
        """The option's own name, without no-; no option's name starts with that."""
        return self.option.removeprefix(_OFF)

    @property
    def where(self) -> str:
        """What an error calls the setting."""
        return f"--{self.option}" if self.source == LINE else f"{self.source}: {self.option}"

    def argv(self) -> list[str]:
        return [f"--{self.option}", *self.values]


def from_line(argv: Iterable[str], options: Mapping[str, Option]) -> list[Setting]:
    """Split a command line into settings; every name must be one of `options`."""
    settings: list[Setting] = []
    for token in argv:
        if is_option(token):
            typed, equals, value = token.partition("=")
            name = _named(typed, options)
            settings.append(Setting(name, (value,) if equals else (), LINE))
        elif settings:
            last = settings.pop()
            settings.append(last._replace(values=(*last.values, token)))
        else:
            refuse_assignment(token, options)
            expected = f"an option, such as --{next(iter(options))}" if options else "no arguments"
            raise ConfigError(f"got '{token}', expected {expected}")
    settings = [_with_value(setting, options) for setting in settings]
    for setting in settings:
        _check_count(setting, options)
    return settings


def is_option(token: str) -> bool:
    """Whether a word of a command line names an option, unlike a number and `-`, which is stdin."""
    return token.startswith("-") and token != "-" and not _NUMBER.match(token)


def apart(argv: Iterable[str], options: Mapping[str, Option]) -> tuple[list[str], list[str]]:
    """The words of a line that no option takes as its value, and the rest."""
    words, rest, takes = list[str](), list[str](), 0
    for token in argv:
        if is_option(token):
            takes = _takes(token, options)
        elif takes == 0:
            words.append(token)
            continue
        else:
            takes -= 1
        rest.append(token)
    return words, rest


def _takes(token: str, options: Mapping[str, Option]) -> int:
    """How many of the words after this option are its values; -1: all."""
    typed, equals, _ = token.partition("=")
    try:
        known = _named(typed, options)
    except ConfigError:
        return 1  # it is refused later
    option = options[known if known in options else known.removeprefix(_OFF)]
    return 0 if equals or option.is_flag else -1 if option.takes_many else 1


def refuse_assignment(word: str, options: Mapping[str, Option]) -> None:
    """Refuse epochs=5, which is how some programs spell an option."""
    name, equals, value = word.partition("=")
    if equals:
        meant = synonyms.option_meant(name, options) or f"--{name}"
        raise ConfigError(f"got '{word}', expected options with dashes; did you mean '{meant} {value}'?")


def from_mapping(mapping: Mapping[str, object], options: Mapping[str, Option], *, source: str) -> list[Setting]:
    """Read options from YAML or JSON: text, numbers, booleans, and lists of them."""
    settings, keys = [], dict[str, object]()
    for key, value in mapping.items():
        name = str(key).replace("_", "-")
        known = _known(name, options)
        if known is None:
            raise ConfigError(f"{source}: unknown option {name}{did_you_mean(name, _spellings(options))}")
        settings.append(_from_value(known, value, options, source=source))
        first = keys.setdefault(settings[-1].bare, key)
        if first != key:
            raise ConfigError(f"{source}: '{key}' is the same option as '{first}'; expected one of them")
    for setting in settings:
        _check_count(setting, options)
    return settings


def read_options(path: Path) -> dict[str, object]:
    """The options in a YAML file, by key as written."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: got {_kind(content)}, expected options, such as `epoch: 10`")
    return {key: value for key, value in content.items() if key not in RETIRED}


class Unrepeated(yaml.constructor.BaseConstructor):
    """Refuses a key that a mapping has twice: YAML forbids it, but its reader silently takes the last."""

    def construct_document(self, node: yaml.Node) -> Any:
        left, seen = [node], set()
        while left:
            each = left.pop()
            if id(each) in seen:  # an alias may lead back to it
                continue
            seen.add(id(each))
            if isinstance(each, yaml.SequenceNode):
                left += each.value
            if isinstance(each, yaml.MappingNode):
                _refuse_repeated(each)
                left += [part for pair in each.value for part in pair]
        return super().construct_document(node)


def _refuse_repeated(mapping: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in lines:
            problem = f"'{key.value}' is given twice, first in line {lines[key.value]}"
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        lines[key.value] = key.start_mark.line + 1


class Texts(Unrepeated, yaml.BaseLoader):
    """Loads every scalar as it is spelled."""


def read_yaml(path: Path, *, loader: type[yaml.BaseLoader] | type[yaml.SafeLoader] = Texts) -> object:
    """Read a YAML document with every scalar as text, so that `16.16` and `1e-5` keep their spelling."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file") from error
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
        raise ConfigError(f"{path}{line}: is not YAML: {problem}") from error


def spelled(value: object) -> tuple[str, ...]:
    """A value as it would be typed; the inverse of parsing."""
    if isinstance(value, tuple):
        return tuple(str(item) for item in value)
    return (str(value),)


def from_environment(environment: Mapping[str, str], options: Mapping[str, Option]) -> list[Setting]:
    """The setting from DATA_DIR, which the originals read too."""
    folder = environment.get("DATA_DIR")
    return [Setting("data-dir", (folder,), ENVIRONMENT)] if folder and "data-dir" in options else []


def from_checkpoint(table: Mapping[str, Mapping[str, object]], options: Mapping[str, Option]) -> list[Setting]:
    """The options of a checkpoint's run, except local ones and those that this command does not have."""
    mapping = {
        name: _as_typed(entry) for name, entry in table.items() if name in options and not options[name].is_local
    }
    settings = from_mapping(mapping, options, source=CHECKPOINT)
    return [
        setting._replace(source=WEIGHTS) if table[setting.bare].get("source") == WEIGHTS else setting
        for setting in settings
    ]


def _as_typed(entry: Mapping[str, object]) -> object:
    """An option's stored value; a path that was typed as relative stays so if it still means the same place."""
    match entry:
        case {"value": str() as path, "typed": str() as typed} if Path(typed).absolute() == Path(path):
            return typed
        case _:
            return entry["value"]


def is_asked_for(source: str | None) -> bool:
    """Whether the user chose this value for this run, on the line or in a config."""
    return source not in (None, DEFAULT, ENVIRONMENT, CHECKPOINT, WEIGHTS)


def _from_value(name: str, value: object, options: Mapping[str, Option], *, source: str) -> Setting:
    bare = name if name in options else name.removeprefix(_OFF)
    if options[bare].is_flag:
        switch = str(value).lower()
        if switch not in ("true", "false"):
            raise ConfigError(f"{source}: {name}: got {value!r}, expected true or false")
        return Setting(bare if (switch == "true") == (name == bare) else f"{_OFF}{bare}", (), source)
    if isinstance(value, Mapping) or value is None:
        raise ConfigError(f"{source}: {name}: got {_kind(value)}, expected {options[name].expected()}")
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, list | Mapping) for item in items):
        raise ConfigError(f"{source}: {name}: got a nested list, expected {options[name].expected()}")
    return Setting(name, tuple(str(item) for item in items), source)


def _named(typed: str, options: Mapping[str, Option]) -> str:
    """The option that a word names; an unknown one is refused in the spelling that was typed."""
    name = typed.lstrip("-").replace("_", "-")
    known = _known(name, options)
    if known is not None:
        return known
    advice = synonyms.advice(name.removeprefix(_OFF), options)
    meant = f"; {advice}" if advice else did_you_mean(name, [f"--{each}" for each in _spellings(options)])
    raise ConfigError(f"unknown option {typed}{meant}")


def _known(name: str, options: Mapping[str, Option]) -> str | None:
    """An option's name from any spelling of it; a switch keeps its no-."""
    bare = name.removeprefix(_OFF)
    if name in options or (bare in options and options[bare].is_flag):
        return name
    for option in options:
        if option.lower() == name.lower():
            return option
    return ALIASES[name] if ALIASES.get(name) in options else None


def _spellings(options: Mapping[str, Option]) -> list[str]:
    switched_off = [f"{_OFF}{name}" for name, option in options.items() if option.is_flag]
    return [*options, *switched_off, *(alias for alias, option in ALIASES.items() if option in options)]


def _with_value(setting: Setting, options: Mapping[str, Option]) -> Setting:
    """Fill in what an option that was typed without a value stands for."""
    origin = options[setting.bare].origin
    return setting._replace(values=(origin.bare,)) if origin and origin.bare and not setting.values else setting


def _check_count(setting: Setting, options: Mapping[str, Option]) -> None:
    option, count = options[setting.bare], len(setting.values)
    if option.is_flag:
        problem = "no value: it is a switch" if count else ""
    elif option.takes_many:
        return
    else:
        problem = option.expected() if count == 0 else "one value" if count > 1 else ""
    if problem:
        got = f"'{' '.join(setting.values)}'" if count else "no value"
        raise ConfigError(f"{setting.where}: got {got}, expected {problem}")


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, Mapping) else f"'{value}'"
