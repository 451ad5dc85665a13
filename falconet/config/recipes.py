"""Named configs: stored command lines in YAML files by family, each with a line on what it is and reaches."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from falconet.config.fields import Option
from falconet.config.settings import Setting, from_file, from_mapping, read_yaml
from falconet.errors import ConfigError, did_you_mean

PHOTOS = "photos"  # the config of a training that names a folder of photos and no config
ABOUT, DEVIATIONS, EXTENDS = "about", "deviations", "extends"  # the keys of an entry that are not options
Use = Literal["train", "bench infer"]  # the command that a config is for: the originals used some names for both
Entry = Mapping[str, object]


def from_config(name: str, options: Mapping[str, Option], *, use: Use = "train") -> list[Setting]:
    """The settings of a named config, or of the user's YAML file; those of the configs it extends come first."""
    if name.endswith((".yaml", ".yml")):
        return from_file(Path(name), options)
    settings = []
    for each in _chain(name, use):
        stated = {key: value for key, value in all_configs(use)[each].items() if _is_option(key)}
        settings += from_mapping(stated, options, source=source_of(each))
    return settings


def source_of(name: str) -> str:
    """The source of a value that a named config states."""
    return f"config {name}"


def values_of(name: str, *, use: Use = "train") -> dict[str, object]:
    """Every value of a named config, with those it extends, by option name; empty for an unknown name."""
    if name not in all_configs(use):
        return {}
    entries = (all_configs(use)[each] for each in _chain(name, use))
    return {key.replace("_", "-"): value for entry in entries for key, value in entry.items() if _is_option(key)}


def about(name: str, *, use: Use = "train") -> str:
    """One line: what a named config is, on what it ran, and what it reaches."""
    return " ".join(str(all_configs(use)[name].get(ABOUT, "")).split())


def deviations(name: str, *, use: Use = "train") -> list[str]:
    """How a named config differs from the original's, without the differences of those it extends."""
    stated = all_configs(use)[name].get(DEVIATIONS, [])
    assert isinstance(stated, list)
    return [" ".join(str(line).split()) for line in stated]


def all_configs(use: Use = "train") -> dict[str, Entry]:
    """Every named config for a command, by name, in the order of the files."""
    configs: dict[str, Entry] = {}
    for family, entries in families().items():
        if use_of(family) == use:
            assert not configs.keys() & entries.keys(), f"{family}.yaml repeats a name of another file"
            configs |= entries
    return configs


def use_of(family: str) -> Use:
    """The command that the configs of a file are for."""
    return "bench infer" if family == "inference" else "train"


@cache
def families() -> dict[str, dict[str, Entry]]:
    """The files of named configs, by name."""
    found: dict[str, dict[str, Entry]] = {}
    with resources.as_file(resources.files("falconet.configs")) as folder:
        for path in sorted(folder.glob("*.yaml")):
            content = read_yaml(path)
            assert isinstance(content, dict)
            found[path.stem] = content
    return found


def _chain(name: str, use: Use) -> list[str]:
    """A config and those it extends, the most basic first."""
    configs = all_configs(use)
    if name not in configs:
        raise ConfigError(_unknown(name, use))
    parent = configs[name].get(EXTENDS)
    return [*(_chain(str(parent), use) if parent else []), name]


def _is_option(key: str) -> bool:
    return key not in (ABOUT, DEVIATIONS, EXTENDS)


def _unknown(name: str, use: Use) -> str:
    other: Use = "bench infer" if use == "train" else "train"
    if name in all_configs(other):
        return f"--config: '{name}' is a config for `falconet {other}`, not for `falconet {use}`"
    configs = all_configs(use)
    meant = did_you_mean(name, configs) or f"; `falconet configs` lists all {len(configs)}"
    return f"--config: no config is named '{name}'{meant}"
