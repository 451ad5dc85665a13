"""`falconet configs`: list the named configs by family, with a description and the results of each."""

from collections.abc import Iterator

from falconet.config import evidence
from falconet.config.commands import ConfigsOptions
from falconet.config.help import wrapped
from falconet.config.load import Loaded
from falconet.config.recipes import about, families, use_of
from falconet.report.console import Screen

REACHED = "Results of an original come from its documents, not from runs here; docs/knowing/configs.md has details."


def run(loaded: Loaded[ConfigsOptions]) -> int:
    screen = Screen()
    if loaded.options.configs.evidence:
        for line in with_evidence():
            screen.line(line)
        return 0
    for text in for_people() if screen.console.is_terminal else for_programs():
        screen.line(text)
    return 0


def with_evidence() -> Iterator[str]:
    """The results of recipes that were trained here, in columns."""
    rows = [*evidence.table(evidence.all_evidence())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield "`falconet recipe verify NAME` trains one again and compares; with --record FILE it writes such evidence."


def for_programs() -> Iterator[str]:
    """One line per config, in columns."""
    width = max(len(name) for entries in families().values() for name in entries)
    for family, entries in families().items():
        yield f"{family}, for `falconet {use_of(family)} --config NAME`:"
        for name in entries:
            yield f"  {name.ljust(width)}  {about(name, use=use_of(family))}"
    yield REACHED


def for_people() -> Iterator[str]:
    """Each config's text below its name, because two columns are wider than most terminals."""
    for family, entries in families().items():
        yield f"{family}, for `falconet {use_of(family)} --config NAME`:"
        for name in entries:
            yield f"  {name}"
            yield from wrapped(f"      {about(name, use=use_of(family))}", indent="      ")
    yield from wrapped(REACHED)
