"""`falconet restore`: continue a run exactly where a checkpoint left it."""

from collections.abc import Sequence

from falconet.checkpoint import files
from falconet.config.schema import RestoreOptions
from falconet.config.settings import Setting
from falconet.errors import ConfigError
from falconet.wiring import launching, phasing, run_folder, speaking
from falconet.wiring.reading import input_path, load_options


def run(line: Sequence[Setting]) -> int:
    folder = files.newest_whole(input_path(line), note=speaking.spoken())
    manifest = files.read_manifest(folder)
    if any(setting.option == "init-path" for setting in line):
        raise ConfigError(f"--init-path: {folder} has the weights to go on with; wanted `falconet train` to begin anew")
    restored = files.Checkpoint(folder, manifest)
    launch = launching.prepare(
        run_folder.placed(load_options(RestoreOptions, line, manifest.config), restored), restored
    )
    return launching.start("restore", line, launch) if launching.must_start(launch) else phasing.go(launch)
