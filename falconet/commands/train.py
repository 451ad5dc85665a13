"""`falconet train`: train from scratch."""

from collections.abc import Sequence

from falconet.commands import launching, phasing, resuming
from falconet.commands.reading import load_options
from falconet.config.schema import TrainOptions
from falconet.config.settings import Setting


def run(line: Sequence[Setting]) -> int:
    loaded = load_options(TrainOptions, line)
    restored = resuming.earlier(loaded) if loaded.options.run.resume else None
    if restored:
        loaded = load_options(TrainOptions, line, restored[1].config)
    launch = launching.prepare(loaded, restored)
    return launching.start("train", line, launch) if launching.must_start(launch) else phasing.go(launch)
