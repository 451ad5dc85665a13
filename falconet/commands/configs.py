"""`falconet configs`: named configs, and what each reaches."""

from collections.abc import Sequence

from falconet.config.named import about, all_configs
from falconet.config.settings import Setting
from falconet.report.screen import Screen


def run(line: Sequence[Setting]) -> int:
    del line
    screen = Screen()
    width = max(map(len, all_configs()))
    for name in all_configs():
        screen.line(f"{name.ljust(width)}  {about(name)}")
    return 0
