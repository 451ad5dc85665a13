"""`falconet train`: train from scratch."""

import os
from collections.abc import Sequence

from falconet.config.commands import TrainOptions
from falconet.config.load import load_options
from falconet.config.settings import Setting
from falconet.parallel import environment
from falconet.report.styles import FALCONET, Conventions
from falconet.train import processes, restore
from falconet.train.run import carry_out


def run(line: Sequence[Setting], conventions: Conventions = FALCONET) -> int:
    loaded = load_options(TrainOptions, line)
    # Workers that are started again take up their run in the same way, maybe in fewer processes than before.
    goes_on = loaded.options.run.resume or environment.attempt(os.environ) > 0
    restored = restore.earlier(loaded, conventions) if goes_on else None
    if restored:
        loaded = load_options(TrainOptions, line, restored.manifest.config)
    launch = processes.prepare(loaded, restored, conventions=conventions)
    return processes.start("train", line, launch) if processes.must_start(launch) else carry_out(launch)
