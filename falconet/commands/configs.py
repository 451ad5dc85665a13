"""`falconet configs`: named configs by family, and what each is and reaches."""

from collections.abc import Sequence

from falconet.config.named import about, families, use_of
from falconet.config.settings import Setting
from falconet.report.screen import Screen


def run(line: Sequence[Setting]) -> int:
    del line
    screen = Screen()
    width = max(len(name) for entries in families().values() for name in entries)
    for family, entries in families().items():
        screen.line(f"{family}, for `falconet {use_of(family)} --config NAME`:")
        for name in entries:
            screen.line(f"  {name.ljust(width)}  {about(name, use=use_of(family))}")
    screen.line(
        "What an original reached was stated by its documents, not run here; docs/configs.md says what differs."
    )
    return 0
