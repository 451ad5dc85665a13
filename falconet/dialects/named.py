"""The named configs of the originals, in files as they had them: configs.yml beside a program."""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from falconet.config.settings import read_yaml
from falconet.errors import ConfigError

MOST_NEAR = 3  # names that an unknown one is answered with


class _Texts(yaml.SafeLoader):
    """Every scalar as it is spelled, so that 16.16 stays text; `<<` still merges, which the originals' files use."""

    yaml_implicit_resolvers = {  # noqa: RUF012, PyYAML's own way
        "<": [("tag:yaml.org,2002:merge", re.compile("<<"))]
    }


def entry(name: str, path: Path) -> Mapping[str, object]:
    """One config of a file."""
    configs = read(path)
    found = configs.get(name)
    if name in configs and not isinstance(found, Mapping):
        raise ConfigError(f"--config: {path}: {name}: options were wanted below it, such as `epochs: 10`")
    if not isinstance(found, Mapping):
        meant = _meant(name, [str(key) for key in configs]) or "; `falconet configs` lists the originals'"
        raise ConfigError(f"--config: no config is named '{name}' in {path}{meant}")
    return found


def _meant(name: str, known: Sequence[str]) -> str:
    """The nearest names, those that go on as this one before those that are spelled alike."""
    longer = [one for one in known if name and one.startswith(name)]
    near = list(dict.fromkeys([*longer, *difflib.get_close_matches(name, known, n=MOST_NEAR, cutoff=0.5)]))
    *others, last = [f"'{one}'" for one in near[:MOST_NEAR]] or [""]
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


def read(path: Path) -> Mapping[str, object]:
    """A file of named configs."""
    try:
        content = read_yaml(path, loader=_Texts)
    except ConfigError as error:
        raise ConfigError(f"--config: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config: {path}: named configs were wanted, such as `my_config:` with options below it")
    return content
