"""`falconet train --resume`: what an interrupted run of the same options left in the run folder."""

from typing import Any

from falconet.config.load import INVOCATION
from falconet.config.options import options_of
from falconet.config.settings import is_asked_for
from falconet.errors import ConfigError
from falconet.wiring import launching
from falconet.wiring.launching import Options, Restored

# Settled anew by every start, from what the launcher says: the checkpoint's are kept unless the line names others.
SETTLED = ("replicas", "gradient-accumulation")


def earlier(loaded: Options) -> Restored:
    """The newest whole checkpoint of the run folder, if it has one; refused where it was trained with other options."""
    found = launching.newest(loaded.options, None)
    if found is None:
        return None
    folder, manifest = found
    asked, stored = _values(loaded.table()), _values(manifest.config)
    for name in options_of(type(loaded.options)):
        open_here = not is_asked_for(loaded.sources.get(name)) and (name in SETTLED or name not in stored)
        if name not in INVOCATION and not open_here and asked.get(name) != stored.get(name):
            raise ConfigError(
                f"--resume: {folder} was trained with --{name} {_shown(stored.get(name))}, this line has"
                f" {_shown(asked.get(name))}; wanted the same options, another --run-dir, or `falconet restore`"
            )
    return found


def _values(table: Any) -> dict[str, object]:
    return {name: entry["value"] for name, entry in table.items()}


def _shown(value: object) -> str:
    return "unset" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
