"""`falconet train`: train from scratch."""

import os
from collections.abc import Sequence

from falconet.config.schema import TrainOptions
from falconet.config.settings import Setting
from falconet.parallel import environment
from falconet.wiring import launching, phasing, resuming
from falconet.wiring.reading import load_options


def run(line: Sequence[Setting]) -> int:
    loaded = load_options(TrainOptions, line)
    # Workers that are started again take up their run in the same way, maybe in fewer processes than before.
    goes_on = loaded.options.run.resume or environment.attempt(os.environ) > 0
    restored = resuming.earlier(loaded) if goes_on else None
    if restored:
        loaded = load_options(TrainOptions, line, restored.manifest.config)
    launch = launching.prepare(loaded, restored)
    return launching.start("train", line, launch) if launching.must_start(launch) else phasing.go(launch)
