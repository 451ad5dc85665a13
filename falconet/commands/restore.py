"""`falconet restore`: continue a run exactly where a checkpoint left it."""

from collections.abc import Sequence

from falconet.checkpoint import format
from falconet.config.commands import RestoreOptions
from falconet.config.load import input_path, load_options
from falconet.config.settings import Setting
from falconet.errors import ConfigError
from falconet.report import console
from falconet.report.styles import FALCONET, Conventions
from falconet.train import processes, run_folder
from falconet.train.run import carry_out


def run(line: Sequence[Setting], conventions: Conventions = FALCONET) -> int:
    folder = format.newest_whole(input_path(line), note=console.spoken())
    manifest = format.read_manifest(folder)
    if any(setting.option == "init-path" for setting in line):
        raise ConfigError(f"--init-path: {folder} has the weights to go on with; wanted `falconet train` to begin anew")
    restored = format.Checkpoint(folder, manifest)
    loaded = run_folder.placed(load_options(RestoreOptions, line, manifest.config), restored)
    launch = processes.prepare(loaded, restored, conventions=conventions)
    return processes.start("restore", line, launch) if processes.must_start(launch) else carry_out(launch)
