"""`falconet train`: train from scratch."""

from collections.abc import Sequence

from falconet.commands.reading import load_options
from falconet.commands.running import Run
from falconet.config.schema import TrainOptions
from falconet.config.settings import Setting


def run(line: Sequence[Setting]) -> int:
    return Run(load_options(TrainOptions, line)).go()
