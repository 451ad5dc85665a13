"""`falconet restore`: continue a run exactly where a checkpoint left it."""

from collections.abc import Sequence

from falconet.checkpoint import files
from falconet.commands.reading import input_path, load_options
from falconet.commands.running import Run
from falconet.config.schema import RestoreOptions
from falconet.config.settings import Setting
from falconet.report.screen import Screen


def run(line: Sequence[Setting]) -> int:
    folder = files.newest_whole(input_path(line), note=Screen().line)
    manifest = files.read_manifest(folder)
    return Run(load_options(RestoreOptions, line, manifest.config), restored=(folder, manifest)).go()
