"""The named configs of the originals, in files as they had them: configs.yml beside a program."""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from falconet.config.settings import read_yaml
from falconet.errors import ConfigError, did_you_mean


class _Texts(yaml.SafeLoader):
    """Every scalar as it is spelled, so that 16.16 stays text; `<<` still merges, which the originals' files use."""

    yaml_implicit_resolvers = {  # noqa: RUF012, PyYAML's own way
        "<": [("tag:yaml.org,2002:merge", re.compile("<<"))]
    }


def entry(name: str, path: Path) -> Mapping[str, object]:
    """One config of a file."""
    configs = read(path)
    found = configs.get(name)
    if not isinstance(found, Mapping):
        meant = did_you_mean(name, map(str, configs)) or f"; {path} has {', '.join(map(str, configs))}"
        raise ConfigError(f"--config: no config is named '{name}'{meant}")
    return found


def read(path: Path) -> Mapping[str, object]:
    """A file of named configs."""
    try:
        content = read_yaml(path, loader=_Texts)
    except ConfigError as error:
        raise ConfigError(f"--config: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config: {path}: named configs were wanted, such as `my_config:` with options below it")
    return content
