"""From a command line to loaded options, for every command alike."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from falconet.config import effects
from falconet.config.load import Loaded, Options, load
from falconet.config.named import Use, from_config
from falconet.config.options import options_of
from falconet.config.schema import BenchServeOptions, InferOptions
from falconet.config.settings import LINE, Setting, from_checkpoint, from_environment, from_line
from falconet.errors import ConfigError


def read_line(command: type[Options], argv: Sequence[str]) -> list[Setting]:
    """The settings of a command line, with those of its --config before them."""
    options = options_of(command)
    line = from_line(argv, options)
    named = [setting.values[0] for setting in line if setting.option == "config"]
    use: Use = "bench infer" if command in (InferOptions, BenchServeOptions) else "train"
    return (from_config(named[-1], options, use=use) if named else []) + line


def load_options(
    command: type[Options], line: Sequence[Setting], checkpoint: Mapping[str, Mapping[str, object]] | None = None
) -> Loaded[Options]:
    """Checked options: environment, then the checkpoint's, then the line's."""
    options = options_of(command)
    stored = from_checkpoint(checkpoint, options) if checkpoint else []
    return load(command, [*from_environment(os.environ, options), *stored, *line])


def idle_lines(options: object, line: Sequence[Setting]) -> list[str]:
    """One note for each option of the line that has no effect; `options` are those that came of it."""
    sources = {setting.option.removeprefix("no-"): setting.source for setting in line}
    return [f"note: {note}" for note in effects.notes(options, sources)]


def typed(line: Sequence[Setting]) -> list[str]:
    """What was typed, for another process of the same command; it reads the config itself."""
    return [word for setting in line if setting.source == LINE for word in setting.argv()]


def of_command(command: type[object], line: Sequence[Setting]) -> list[Setting]:
    """The settings of another command's line that this one knows too."""
    known = options_of(command)
    return [setting for setting in line if setting.option.removeprefix("no-") in known]


def input_path(line: Sequence[Setting]) -> Path:
    """--checkpoint-input-path, which is needed before the rest can be read."""
    paths = [setting.values[0] for setting in line if setting.option == "checkpoint-input-path"]
    if not paths:
        raise ConfigError("--checkpoint-input-path: is needed: a checkpoint, a folder of them, or a run folder")
    return Path(paths[-1])
