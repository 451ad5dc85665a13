"""`falconet restore`: continue a run exactly where a checkpoint left it."""

from falconet.checkpoint.manifest import Checkpoint, read_manifest
from falconet.config.commands import RestoreOptions
from falconet.config.load import Loaded
from falconet.report.styles import FALCONET, Conventions
from falconet.train import preparation, run_folder, workers
from falconet.train.run import carry_out


def run(loaded: Loaded[RestoreOptions], conventions: Conventions = FALCONET) -> int:
    assert loaded.checkpoint is not None
    run_dir, named = loaded.options.run.run_dir, loaded.options.input.checkpoint_input_path
    # In another folder, or from a checkpoint that was named itself, it may continue beside the run.
    lies = run_folder.home(loaded.checkpoint) if named != loaded.checkpoint else None
    if lies and run_dir in ("auto", lies) and not loaded.options.run.plan:
        run_folder.require_ended(lies)
    restored = Checkpoint(loaded.checkpoint, read_manifest(loaded.checkpoint))
    conventions = run_folder.beside(restored, conventions)
    launch = preparation.prepare(run_folder.placed(loaded, restored), restored, conventions=conventions)
    return workers.start("restore", loaded.line, launch) if workers.must_start(launch) else carry_out(launch)
