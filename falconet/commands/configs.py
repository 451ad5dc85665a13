"""`falconet configs`: list the named configs by family, with a description and the results of each."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from falconet.config import evidence
from falconet.config.commands import ConfigsOptions
from falconet.config.help import wrapped
from falconet.config.load import Loaded
from falconet.config.recipes import about, families, use_of
from falconet.report.console import Screen

REACHED = "Results of an original come from its documents, not from runs here; docs/knowing/configs.md has details."
COUNTED = "accuracy: mean and standard deviation; training: median; counted: as speed records do, with validation."
VERIFY = "`falconet recipe verify NAME` trains one again and compares; with --record FILE it writes such evidence."


def run(loaded: Loaded[ConfigsOptions]) -> int:
    screen = Screen()
    people = screen.console.is_terminal
    if loaded.options.configs.evidence:
        shown = evidence_for_people() if people else evidence_for_programs()
    else:
        shown = for_people() if people else for_programs()
    for line in shown:
        screen.line(line)
    return 0


def evidence_for_programs() -> Iterator[str]:
    """The results of recipes that were trained here, a line each."""
    yield from _aligned([*evidence.table(evidence.all_evidence())])
    yield VERIFY


def evidence_for_people() -> Iterator[str]:
    """The results by where and when they were reached, because one line for all is wider than most terminals."""
    heading, *rows = evidence.table(evidence.all_evidence())
    rows.sort(key=lambda row: row[4:])  # device, date and libraries; keeps the order of their recipes
    first, *lines = _aligned([row[:4] for row in (heading, *rows)], indent="  ")
    yield first
    for place, group in groupby(zip(rows, lines, strict=True), key=lambda pair: pair[0][4:]):
        yield from wrapped(f"{', '.join(place)}:", indent="  ")
        yield from (line for _, line in group)
    yield from wrapped(COUNTED)
    yield from wrapped(VERIFY)


def _aligned(rows: Sequence[tuple[str, ...]], *, indent: str = "") -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


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
