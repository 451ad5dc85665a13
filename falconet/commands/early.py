"""Mistakes that names and the file system show: answered before torch is imported, which takes two seconds."""

from collections.abc import Sequence
from typing import Any

from falconet.checkpoint import places
from falconet.commands.reading import input_path, load_options
from falconet.config import data_rules, model
from falconet.config.load import parse
from falconet.config.schema import AverageOptions, InferOptions, RestoreOptions, ValidateOptions
from falconet.config.settings import Setting
from falconet.data import roots
from falconet.errors import ConfigError

FROM_CHECKPOINT = (RestoreOptions, ValidateOptions, AverageOptions)  # most of their options are the checkpoint's


def check(command: type[object], line: Sequence[Setting]) -> None:
    """Refuse a line that its command would refuse for the same reason, with the same words, but later."""
    given = {setting.option for setting in line}
    if command in FROM_CHECKPOINT or (command is InferOptions and "checkpoint-input-path" in given):
        path = input_path(line)
        if not path.is_file():
            places.require_folder(path)
    if command in FROM_CHECKPOINT:
        problem = model.unknown(parse(command, line).options) if "model" in given else None
        if problem:
            raise ConfigError(problem)
    else:
        _check_data(load_options(command, line).options)


def _check_data(options: Any) -> None:
    """Photos that are trained on must be there; a plan may do without ImageNet."""
    if hasattr(options, "data") and options.data.data in data_rules.PHOTOS and not data_rules.only_planned(options):
        roots.require_folder(options.data.data_dir)
