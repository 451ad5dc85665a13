"""Named configs: stored command lines, in files by family, each with a line on what it reaches."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from falconet.config.options import Option
from falconet.config.settings import Setting, from_file, from_mapping, read_yaml
from falconet.errors import ConfigError, did_you_mean

ABOUT, EXTENDS = "about", "extends"  # the two keys of an entry that are not options


def from_config(name: str, options: Mapping[str, Option]) -> list[Setting]:
    """The settings of a named config, or of a YAML file of the user's."""
    if name.endswith((".yaml", ".yml")):
        return from_file(Path(name), options)
    configs = all_configs()
    if name not in configs:
        raise ConfigError(f"--config: no config is named '{name}'{did_you_mean(name, configs) or _listing(configs)}")
    entry = configs[name]
    inherited = from_config(str(entry[EXTENDS]), options) if EXTENDS in entry else []
    own = {key: value for key, value in entry.items() if key not in (ABOUT, EXTENDS)}
    return inherited + from_mapping(own, options, source=f"config {name}")


def about(name: str) -> str:
    """The line that says what a named config reaches, on what, in how long."""
    return " ".join(str(all_configs()[name].get(ABOUT, "")).split())


@cache
def all_configs() -> dict[str, Mapping[str, object]]:
    """Every named config, by name, in the order of the files."""
    configs: dict[str, Mapping[str, object]] = {}
    with resources.as_file(resources.files("falconet.configs")) as folder:
        for path in sorted(folder.glob("*.yaml")):
            family = read_yaml(path)
            assert isinstance(family, Mapping)
            for name, entry in family.items():
                assert name not in configs, f"two configs are named {name}"
                configs[name] = entry
    return configs


def _listing(configs: Mapping[str, object]) -> str:
    return f"; `falconet configs` lists all {len(configs)}"
