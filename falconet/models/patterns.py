"""Regular expressions of weights: which ones they match, and what was probably meant where they match none."""

import difflib
import re
from collections.abc import Collection, Sequence

from falconet.errors import ConfigError


def matching(names: Collection[str], patterns: Sequence[str], *, option: str) -> frozenset[str]:
    """Those of the weights `names` that a pattern matches, each pattern at least one.

    A pattern is for a whole name, with slashes for dots (layer1/0/conv1/weight), or for that of a layer that the weight
    is in (layer1, layer1/0): a layer's name means all of its weights.
    """
    paths = {name: _paths(name) for name in names}
    found: set[str] = set()
    for pattern in patterns:
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{option}: '{pattern}' is not a regular expression: {error}") from error
        own = {name for name, each in paths.items() if any(map(wanted.fullmatch, each))}
        if not own:
            raise ConfigError(
                f"{option}: '{pattern}' matches no layer and no weight{_nearest(pattern, paths.values())}"
            )
        found |= own
    return frozenset(found)


def _paths(name: str) -> list[str]:
    """The names of the layers around a weight, the outermost first, and its own."""
    parts = name.split(".")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _nearest(pattern: str, paths: Collection[list[str]]) -> str:
    known = list(dict.fromkeys(path for each in paths for path in each))
    near = difflib.get_close_matches(re.sub(r"\.\*|[\\^$()|]", "", pattern), known, n=3, cutoff=0.0)
    return f"; the nearest are {', '.join(map(repr, near))}" if near else ""
