"""docs/options.md, generated from the schema: `python -m falconet.config.document > docs/options.md`."""

import re
import sys
from collections.abc import Iterator

from falconet.config.options import Option, options_of, sections_of
from falconet.config.schema import COMMANDS
from falconet.config.settings import spelled


def page() -> str:
    """The whole page; a section shared by several commands is shown once."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Options"
    yield ""
    yield "Generated from `falconet/config/` by `make docs`; a test fails when it is stale. A switch `--x`"
    yield "has a counterpart `--no-x`. In a YAML config the same names are keys, with `-` or `_`."
    shown: set[type[object]] = set()
    for name, command in COMMANDS.items():
        sections = sections_of(command)
        if not sections:
            continue
        again = [_title(section) for section in sections.values() if section in shown]
        yield ""
        yield f"## falconet {name}"
        yield ""
        yield (command.__doc__ or "").strip()
        if again:
            yield f"Takes the options of {', '.join(again)} as above, and these:"
        for field, section in sections.items():
            if section not in shown:
                shown.add(section)
                options = [option for option in options_of(command).values() if option.path[0] == field]
                yield from _section(section, options)


def _section(section: type[object], options: list[Option]) -> Iterator[str]:
    yield ""
    yield f"### {_title(section)}"
    yield ""
    yield (section.__doc__ or "").strip()
    yield ""
    yield "| option | value | default | meaning |"
    yield "|---|---|---|---|"
    for option in options:
        value = "switch" if option.is_flag else option.wanted()
        yield f"| `--{option.name}` | {value} | {_default(option)} | {option.help} |".replace("<", "&lt;")


def _title(section: type[object]) -> str:
    """`LearningRate` as `Learning rate`."""
    first, *others = re.findall("[A-Z][a-z]*", section.__name__)
    return " ".join([first, *map(str.lower, others)])


def _default(option: Option) -> str:
    if option.default is None or option.default == ():
        return "none"
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return f"`{' '.join(spelled(option.default))}`"


if __name__ == "__main__":
    sys.stdout.write(page())
