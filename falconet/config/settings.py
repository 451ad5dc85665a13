"""Settings: options with values as they were spelled, and where each came from."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from falconet.config.fields import Option
from falconet.errors import ConfigError, did_you_mean

LINE = "command line"
ENVIRONMENT = "environment variable DATA_DIR"
CHECKPOINT = "checkpoint"
SAME = {
    "imagenet-data-path": "data-dir",
    "wandb-weight-histogram": "weight-histogram",
}  # other spellings of one option, all alike: the last one given holds
RETIRED = ("log-style",)  # options that a config.yaml of an earlier version may hold; ignored
_NUMBER = re.compile(r"-\.?\d")


class Setting(NamedTuple):
    """One option with its value as text: a flag has none, a list has any number."""

    option: str
    values: tuple[str, ...]
    source: str

    def argv(self) -> list[str]:
        return [f"--{self.option}", *self.values]


def from_line(argv: Iterable[str], options: Mapping[str, Option]) -> list[Setting]:
    """A command line, split into settings; every name is one of `options`."""
    settings: list[Setting] = []
    for token in argv:
        if token.startswith("-") and not _NUMBER.match(token):
            name, equals, value = token.lstrip("-").partition("=")
            name = _known(name.replace("_", "-"), options, dashes="--", where="")
            settings.append(Setting(name, (value,) if equals else (), LINE))
        elif settings:
            last = settings.pop()
            settings.append(last._replace(values=(*last.values, token)))
        else:
            wanted = f"an option was wanted, such as --{next(iter(options))}" if options else "no option was wanted"
            raise ConfigError(f"'{token}': {wanted}")
    for setting in settings:
        _check_count(setting, options, spelled=f"--{setting.option}")
    return settings


def from_mapping(mapping: object, options: Mapping[str, Option], *, source: str) -> list[Setting]:
    """Options written as YAML or JSON: text, numbers, booleans, and lists of them."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source}: a mapping of options was wanted, such as `epoch: 10`, not {_kind(mapping)}")
    settings = []
    for key, value in mapping.items():
        name = _known(str(key).replace("_", "-"), options, dashes="", where=f"{source}: ")
        settings.append(_from_value(name, value, options, source=source))
    for setting in settings:
        _check_count(setting, options, spelled=f"{source}: {setting.option}")
    return settings


def from_file(path: Path, options: Mapping[str, Option]) -> list[Setting]:
    """A YAML file of options."""
    content = read_yaml(path)
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in RETIRED}
    return from_mapping(content, options, source=str(path))


def read_yaml(path: Path, *, loader: type[yaml.BaseLoader] | type[yaml.SafeLoader] = yaml.BaseLoader) -> object:
    """A YAML document with every scalar as it is spelled, so that `16.16` stays text and 1e-5 is not mistaken."""
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
    """A parsed value as it would be typed; the inverse of parsing."""
    if isinstance(value, tuple):
        return tuple(str(item) for item in value)
    return (str(value),)


def from_environment(environment: Mapping[str, str], options: Mapping[str, Option]) -> list[Setting]:
    """DATA_DIR, which the originals read too."""
    place = environment.get("DATA_DIR")
    return [Setting("data-dir", (place,), ENVIRONMENT)] if place and "data-dir" in options else []


def from_checkpoint(table: Mapping[str, Mapping[str, object]], options: Mapping[str, Option]) -> list[Setting]:
    """What a checkpoint's run was trained with, as far as this command has the options and none of them is local."""
    mapping = {name: entry["value"] for name, entry in table.items() if name in options and not options[name].is_local}
    return from_mapping(mapping, options, source=CHECKPOINT)


def is_asked_for(source: str | None) -> bool:
    """Whether somebody chose this value now, on the line or in a config."""
    return source not in (None, "default", ENVIRONMENT, CHECKPOINT)


def _from_value(name: str, value: object, options: Mapping[str, Option], *, source: str) -> Setting:
    if options[name].is_flag:
        switch = str(value).lower()
        if switch not in ("true", "false"):
            raise ConfigError(f"{source}: {name}: got {value!r}, wanted true or false")
        return Setting(name if switch == "true" else f"no-{name}", (), source)
    if isinstance(value, Mapping) or value is None:
        raise ConfigError(f"{source}: {name}: got {_kind(value)}, wanted {options[name].wanted()}")
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, list | Mapping) for item in items):
        raise ConfigError(f"{source}: {name}: got a list within a list, wanted {options[name].wanted()}")
    return Setting(name, tuple(str(item) for item in items), source)


def _known(name: str, options: Mapping[str, Option], *, dashes: str, where: str) -> str:
    if name in options or (name.startswith("no-") and name[3:] in options and options[name[3:]].is_flag):
        return name
    for option in options:
        if option.lower() == name.lower():
            return option
    if SAME.get(name) in options:
        return SAME[name]
    raise ConfigError(f"{where}unknown option {dashes}{name}{_meant(name, options, dashes)}")


def _meant(name: str, options: Mapping[str, Option], dashes: str) -> str:
    spellings = [*options, *(other for other, option in SAME.items() if option in options)]
    return did_you_mean(dashes + name, [dashes + option for option in spellings])


def _check_count(setting: Setting, options: Mapping[str, Option], *, spelled: str) -> None:
    option = options.get(setting.option)
    count = len(setting.values)
    if option is None or option.is_flag:
        if count:
            raise ConfigError(f"{spelled}: is a switch and takes no value, got '{' '.join(setting.values)}'")
    elif count == 0 and not option.takes_many:
        raise ConfigError(f"{spelled}: needs a value, {option.wanted()}")
    elif count > 1 and not option.takes_many:
        raise ConfigError(f"{spelled}: takes one value, got '{' '.join(setting.values)}'")


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, Mapping) else f"'{value}'"
