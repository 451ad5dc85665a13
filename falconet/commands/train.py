"""`falconet train`: train from scratch."""

import os
from dataclasses import replace

from falconet.config.load import LoadedTraining
from falconet.parallel import environment
from falconet.report.styles import FALCONET, Conventions
from falconet.train import defaults, preparation, resume, run_folder, workers
from falconet.train.run import carry_out


def run(loaded: LoadedTraining, conventions: Conventions = FALCONET) -> int:
    # Restarted workers resume their run in the same way, perhaps in fewer processes than before.
    resumes = loaded.options.run.resume or environment.attempt(os.environ) > 0
    loaded, notes = defaults.with_origin(loaded)  # before the options are compared with those of a run to resume
    if loaded.options.run.resume and not loaded.options.run.plan:
        run_folder.require_ended(run_folder.choose(loaded.options, conventions))
    restored = resume.earlier(loaded, conventions) if resumes else None
    if restored:
        loaded = loaded.over(restored.manifest.config)
    launch = preparation.prepare(loaded, restored, conventions=conventions)
    launch = replace(launch, notes=(*notes, *launch.notes))
    return workers.start("train", loaded.line, launch) if workers.must_start(launch) else carry_out(launch)
