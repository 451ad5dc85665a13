"""Mistakes that names and the file system show: answered before torch is imported, which takes two seconds."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from falconet.checkpoint import places
from falconet.config import data_rules, model
from falconet.config.load import parse
from falconet.config.schema import (
    AverageOptions,
    InferOptions,
    PackOptions,
    RestoreOptions,
    ServeOptions,
    UploadOptions,
    ValidateOptions,
    VerifyOptions,
)
from falconet.config.settings import Setting
from falconet.data import roots
from falconet.errors import ConfigError, DataError
from falconet.parallel.environment import is_first
from falconet.wiring.reading import input_path, load_options

FROM_CHECKPOINT = (RestoreOptions, ValidateOptions, AverageOptions)  # most of their options are the checkpoint's
OF_ONE_PROCESS = (ValidateOptions, AverageOptions)  # of several, the others do nothing


def check(command: type[object], line: Sequence[Setting]) -> None:
    """Refuse a line that its command would refuse for the same reason, with the same words, but later."""
    if command in OF_ONE_PROCESS and not is_first(os.environ):
        return
    given = {setting.option for setting in line}
    if command in FROM_CHECKPOINT or (command is InferOptions and "checkpoint-input-path" in given):
        path = input_path(line)
        if not path.is_file():
            places.require_folder(path)
    if command in FROM_CHECKPOINT:
        problem = model.unknown(parse(command, line).options) if "model" in given else None
        if problem:
            raise ConfigError(problem)
        _check_validated(parse(command, line).options)
    else:
        options = load_options(command, line).options
        _check_words(options)
        _check_data(options)
        _check_validated(options)


def _check_words(options: object) -> None:
    """The folders that the first words of a command name must be there, and what it cannot do without."""
    if isinstance(options, PackOptions):
        if options.pack.source is None or options.pack.target is None:
            raise ConfigError("needs two folders: the one with train/ and val/, and the one for the shards")
        roots.require_folder(options.pack.source)
    elif isinstance(options, VerifyOptions):
        if options.verify.source is None:
            raise ConfigError("needs the folder with the shards")
        if not options.verify.source.is_dir():
            raise DataError(f"{options.verify.source}: no such folder, wanted one that `falconet data pack` has made")
    elif isinstance(options, UploadOptions):
        if options.upload.source is None:
            raise ConfigError("needs a run folder, as in `falconet upload runs/my-run`")
        if not options.upload.source.is_dir():
            raise ConfigError(f"{options.upload.source}: no such folder, wanted a run folder")
    elif isinstance(options, ServeOptions) and importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("needs aiohttp, which is not installed: pip install 'falconet[serve]'")


def _check_data(options: Any) -> None:
    """Photos that are trained on must be there; a plan may do without ImageNet."""
    if hasattr(options, "data") and options.data.data in data_rules.PHOTOS and not data_rules.only_planned(options):
        roots.require_folder(options.data.data_dir)


def _check_validated(options: Any) -> None:
    """Checkpoints to measure after training must be there before it, unless they are the run's own."""
    path = options.validation.validate_checkpoints if hasattr(options, "validation") else None
    run_dir = options.run.run_dir if path else None
    own = () if run_dir in (None, "auto") else (run_dir, run_dir / "checkpoints")
    if path and path not in (*own, options.checkpoints.checkpoint_output_path):
        places.require_folder(path)
