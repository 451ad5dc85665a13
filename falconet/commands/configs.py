"""`falconet configs`: named configs by family, and what each is and reaches."""

from collections.abc import Iterator, Sequence

from falconet.config.help import wrapped
from falconet.config.load import about, families, use_of
from falconet.config.settings import Setting
from falconet.report.console import Screen

REACHED = "What an original reached was stated by its documents, not run here; docs/configs.md says what differs."


def run(line: Sequence[Setting]) -> int:
    del line
    screen = Screen()
    for text in for_people() if screen.console.is_terminal else for_programs():
        screen.line(text)
    return 0


def for_programs() -> Iterator[str]:
    """A line for each config, in columns."""
    width = max(len(name) for entries in families().values() for name in entries)
    for family, entries in families().items():
        yield f"{family}, for `falconet {use_of(family)} --config NAME`:"
        for name in entries:
            yield f"  {name.ljust(width)}  {about(name, use=use_of(family))}"
    yield REACHED


def for_people() -> Iterator[str]:
    """The same below their names, because two columns are wider than most terminals."""
    for family, entries in families().items():
        yield f"{family}, for `falconet {use_of(family)} --config NAME`:"
        for name in entries:
            yield f"  {name}"
            yield from wrapped(f"      {about(name, use=use_of(family))}", indent="      ")
    yield from wrapped(REACHED)
