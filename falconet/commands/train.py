"""`falconet train`: train from scratch."""

from collections.abc import Sequence

from falconet.commands import launching
from falconet.commands.reading import load_options
from falconet.commands.running import Run
from falconet.config.schema import TrainOptions
from falconet.config.settings import Setting


def run(line: Sequence[Setting]) -> int:
    launch = launching.prepare(load_options(TrainOptions, line))
    return launching.start("train", line, launch) if launching.must_start(launch) else Run(launch).go()
