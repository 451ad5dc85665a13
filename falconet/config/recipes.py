"""Named configs: command lines stored in YAML files by family, each with a line on what it is and reaches."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from falconet.config.fields import Option
from falconet.config.settings import Setting, from_mapping, read_options, read_yaml
from falconet.errors import ConfigError, did_you_mean

PHOTOS_CONFIG = "photos"  # the config used if a line names a folder of photos and no config
ABOUT, DEVIATIONS, EXTENDS = "about", "deviations", "extends"  # the keys of an entry that are not options
Use = Literal["train", "bench infer"]  # the command that a config is for: the originals used some names for both
Entry = Mapping[str, object]


def from_config(name: str, options: Mapping[str, Option], *, use: Use = "train") -> list[Setting]:
    """The settings in a named config or the user's YAML file; those of the configs that it extends come first."""
    settings = []
    for source, stated in _chain(name, use):
        settings += from_mapping(stated, options, source=source)
    return settings


def is_file(name: str) -> bool:
    """Whether the name of a config, or of a value's source, is that of a YAML file."""
    return name.endswith((".yaml", ".yml"))


def source_of(name: str) -> str:
    """What a config is called as the source of a value."""
    return name if is_file(name) else f"config {name}"


def values_of(name: str, *, use: Use = "train") -> dict[str, object]:
    """Every value of a named config and of those it extends, by option name; empty for an unknown name."""
    if name not in all_configs(use):
        return {}
    return {key.replace("_", "-"): value for _, stated in _chain(name, use) for key, value in stated.items()}


def about(name: str, *, use: Use = "train") -> str:
    """One line on a named config: what it is, on what it ran, and what it reaches."""
    return " ".join(str(all_configs(use)[name].get(ABOUT, "")).split())


def deviations(name: str, *, use: Use = "train") -> list[str]:
    """How a named config differs from the original's; the differences of those it extends are not repeated."""
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
    """The entries of each file of named configs, by the file's name."""
    found: dict[str, dict[str, Entry]] = {}
    with resources.as_file(resources.files("falconet.configs")) as folder:
        for path in sorted(folder.glob("*.yaml")):
            content = read_yaml(path)
            assert isinstance(content, dict)
            found[path.stem] = content
    return found


def _chain(name: str, use: Use, *, extending: tuple[str, ...] = ()) -> list[tuple[str, Entry]]:
    """The sources and options of a config and those it extends, basic ones first; `extending`: those that led here."""
    where = f"{extending[-1]}: {EXTENDS}" if extending else "--config"
    if is_file(name):
        if Path(name).resolve() in [Path(each).resolve() for each in extending]:
            raise ConfigError(f"{where}: '{name}' extends this file in turn, expected a config that does not")
        if extending and not Path(name).exists():
            raise ConfigError(f"{where}: {name}: no such file")
        content: Entry = read_options(Path(name))
    elif name in all_configs(use):
        content = all_configs(use)[name]
    else:
        raise ConfigError(f"{where}: {_unknown(name, use)}")
    own = source_of(name), {key: value for key, value in content.items() if key not in (ABOUT, DEVIATIONS, EXTENDS)}
    if EXTENDS not in content:
        return [own]
    parent = content[EXTENDS]
    if not isinstance(parent, str) or not parent:
        raise ConfigError(f"{name}: {EXTENDS}: expected the name of one config, or one file")
    beside = str(Path(name).parent / parent) if is_file(parent) else parent
    return [*_chain(beside, use, extending=(*extending, name)), own]


def _unknown(name: str, use: Use) -> str:
    other: Use = "bench infer" if use == "train" else "train"
    if name in all_configs(other):
        return f"'{name}' is a config for `falconet {other}`, not for `falconet {use}`"
    configs = all_configs(use)
    meant = did_you_mean(name, configs) or f"; `falconet configs` lists all {len(configs)}"
    return f"no config is named '{name}'{meant}"
