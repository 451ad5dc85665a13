"""What a command reads must exist: checked on the loaded options, before torch is imported."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from falconet.bench import triton_server
from falconet.checkpoint import format
from falconet.checkpoint.manifest import require_folder as require_checkpoints
from falconet.config import commands, facts, rules
from falconet.config.fields import PHOTO_SUFFIXES, options_of, require_folder, require_photos
from falconet.config.load import Loaded, OptionsT, load_options, parse
from falconet.config.settings import LINE, Setting
from falconet.config.spaces import spaces_in
from falconet.errors import ConfigError, DataError, named_option
from falconet.report.run_files import EXPORT_RECORD

EXPORT_PACKAGES = {
    **dict.fromkeys(("onnx", "triton"), ("onnx", "onnxscript", "onnxruntime")),
    "openvino": ("openvino",),
}
TRACKERS = ("tensorboard", "wandb", "mlflow", "aim")  # an option, a package and an extra each
SET_BY_SEARCH = ("run-dir", "resume", "temporary", "name-suffix", "plan")
FROM_CHECKPOINT = (commands.RestoreOptions, commands.ValidateOptions, commands.AverageOptions)


def load(command: type[OptionsT], line: Sequence[Setting]) -> Loaded[OptionsT]:
    """The checked options of a line, with the checkpoint that `restore` continues from.

    Of `validate` and `average`, which open several checkpoints, only types and ranges are checked: the commands load
    the line over the options of each checkpoint.
    """
    if command is commands.SearchOptions:
        return _load_search(command, line)
    if command not in FROM_CHECKPOINT:
        loaded = load_options(command, line)
        check(loaded.options)
        return loaded
    stated = parse(command, line)  # wrong names and values are reported before a checkpoint is looked for
    options: Any = stated.options
    path = options.input.checkpoint_input_path
    if isinstance(options, commands.ValidateOptions) and options.pretrained.pretrained != "none":
        if path is not None:
            raise ConfigError("--pretrained: contradicts --checkpoint-input-path; expected one of them")
        return stated
    if path is None:
        raise ConfigError(
            "--checkpoint-input-path: is required; expected a checkpoint, a folder of them or a run folder"
        )
    if not path.is_file():
        require_checkpoints(path)
    problem = rules.unknown_model(options.model) if "model" in stated.sources else None
    if problem:
        raise ConfigError(problem)
    _check_validated(options)
    if command is not commands.RestoreOptions:
        return stated
    if isinstance(options, commands.RestoreOptions):
        _check_logged(options)
    folder = format.newest_whole(path, note=_note)
    return replace(stated.over(format.read_manifest(folder).config), checkpoint=folder)


def _load_search(command: type[OptionsT], line: Sequence[Setting]) -> Loaded[OptionsT]:
    """The options of a search, with the first value of each space; every end of a space has been checked."""
    require_package("optuna", extra="search")
    given = next((setting for setting in line if setting.bare in SET_BY_SEARCH), None)
    if given:
        raise ConfigError(f"{given.where}: a search sets it for each trial; --study names the folder of all trials")
    spaces = spaces_in(line, options_of(command))
    if not spaces:
        raise ConfigError(
            "expected at least one option with a range or with choices, such as --lr log:1e-4:1e-1 or"
            " --model resnet18,resnet50"
        )
    fixed = [setting for setting in line if setting.bare not in spaces]
    loaded = None
    for number in range(max(len(space.ends()) for space in spaces.values())):
        ends = {name: space.ends() for name, space in spaces.items()}
        chosen = [Setting(name, (values[min(number, len(values) - 1)],), LINE) for name, values in ends.items()]
        tried = load_options(command, [*fixed, *chosen])
        check(tried.options)
        loaded = loaded or tried
    assert loaded is not None
    return replace(loaded, line=tuple(line))


def require_package(name: str, *, extra: str) -> None:
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package that should contain it
        is_there = False
    if not is_there:
        raise ConfigError(f"needs {name}, which is not installed: pip install 'falconet[{extra}]'")


def check(options: Any) -> None:
    """Files, folders and packages that the options ask for."""
    if isinstance(options, commands.PackOptions):
        if options.pack.source is None or options.pack.target is None:
            raise ConfigError("expected two folders: one with train/ and val/, and one for the shards")
        require_photos(options.pack.source)
    elif isinstance(options, commands.DataCheckOptions):
        _check_checked(options)
    elif isinstance(options, commands.VerifyOptions):
        if options.verify.source is None:
            raise ConfigError("expected a folder of shards, as in `falconet data verify photos-packed`")
        require_folder(options.verify.source, "one that `falconet data pack` made")
    elif isinstance(options, commands.UploadOptions):
        if options.upload.source is None:
            raise ConfigError("expected a run folder, as in `falconet upload runs/my-run`")
        require_folder(options.upload.source, "a run folder")
    elif isinstance(options, commands.ReportOptions):
        if not options.report.runs:
            raise ConfigError("expected one or more run folders, as in `falconet report runs/my-run`")
        if options.report.save_plots:
            _require_plots()
    elif isinstance(options, commands.WatchOptions):
        if options.watch.port != "auto" and not options.watch.page:
            raise ConfigError("--port: needs --page")
        if options.watch.browser and not options.watch.page:
            raise ConfigError("--browser: needs --page")
    elif isinstance(options, commands.ServeOptions):
        _check_served(options)
    elif isinstance(options, commands.PredictOptions):
        _check_predicted(options)
    elif isinstance(options, commands.ExportOptions):
        _check_exported(options)
    elif isinstance(options, commands.BenchServeOptions):
        _check_measured(options)
    if isinstance(options, commands.InferOptions | commands.ExportOptions):
        path = options.input.checkpoint_input_path
        if path is not None and not path.is_file():
            require_checkpoints(path)
    if hasattr(options, "data") and options.data.data in facts.PHOTO_KINDS and not facts.only_planned(options):
        _require_data(options.data.data_dir)
    if isinstance(options, commands.TrainOptions):
        _check_logged(options)
    _check_validated(options)


def _check_logged(options: commands.TrainOptions) -> None:
    """The packages of trackers and plots."""
    for package in TRACKERS:
        if getattr(options.logging, package):
            with named_option(package):
                require_package(package, extra=package)
    if options.logging.report and options.logging.save_plots:
        _require_plots()


def _require_plots() -> None:
    with named_option("save_plots"):
        require_package("matplotlib", extra="plots")


def _check_checked(options: commands.DataCheckOptions) -> None:
    check = options.check
    if check.source is None:
        raise ConfigError("expected a folder of photos, as in `falconet data check photos`")
    require_photos(check.source)
    if check.exclude_duplicates != "none" and check.exclude_list is None:
        raise ConfigError("--exclude-duplicates: needs --exclude-list, the file to write")
    written = {name: getattr(check, name) for name in ("output", "json", "html", "exclude_list")}
    places = {name: place for name, place in written.items() if isinstance(place, Path)}
    for name, place in places.items():
        option = f"--{name.replace('_', '-')}"
        if place.suffix.lower() in PHOTO_SUFFIXES or place.is_dir():
            what = "is a folder" if place.is_dir() else "would replace a photo"
            raise ConfigError(f"{option}: {place} {what}; expected the name of another file")
        same = next((other for other, path in places.items() if path == place and other != name), None)
        if same:
            raise ConfigError(f"{option}: {place} is also --{same.replace('_', '-')}; expected another file")
        if place.is_file() and place.samefile(check.source):
            raise ConfigError(f"{option}: {place} would replace the table; expected another file")


def _check_predicted(options: commands.PredictOptions) -> None:
    path, weights = options.input.checkpoint_input_path, options.pretrained.pretrained
    if path is None and weights == "none":
        raise ConfigError("expected a run and photos, as in `falconet predict runs/my-run photo.jpg`")
    if path is not None and weights != "none":
        raise ConfigError(f"--pretrained: contradicts {path}, which also gives the weights; expected one of them")
    for option, given in (("", path), ("--pretrained: ", weights)):
        if isinstance(given, Path) and given.suffix.lower() in PHOTO_SUFFIXES:
            raise ConfigError(
                f"{option}{given} is a photo; expected a run, a checkpoint or a weights file before it, or --model NAME"
                " --pretrained published"
            )
    if path is not None and not path.is_file():
        require_checkpoints(path)
    for option, place in (("output", options.predict.output), ("embeddings", options.predict.embeddings)):
        if place is not None and (place.suffix.lower() in PHOTO_SUFFIXES or _is_one_of(place, options.predict.photos)):
            raise ConfigError(f"--{option}: {place} would replace a photo; expected the name of another file")
    if not options.predict.photos:
        raise ConfigError("expected photos after the run: files, folders, or - for stdin")


def _is_one_of(place: Path, words: Sequence[str]) -> bool:
    # Path's raises where it may not look.
    return any(os.path.exists(place) and os.path.exists(word) and place.samefile(word) for word in words)  # noqa: PTH110


def _require_data(folder: Path) -> None:
    """Photos must exist; their folder may be the first word, where another kind of data was meant."""
    try:
        require_photos(folder)
    except DataError as error:
        kinds = options_of(commands.TrainOptions)["data"].choices
        raise DataError(f"{error}; did you mean --data {folder}?" if str(folder) in kinds else str(error)) from None


def _check_exported(options: commands.ExportOptions) -> None:
    """The packages that write and run a format, and the photos to check it on."""
    export, path = options.export, options.input.checkpoint_input_path
    if path is not None and options.pretrained.pretrained != "none":
        raise ConfigError(f"--pretrained: contradicts {path}, which also gives the weights; expected one of them")
    for package in EXPORT_PACKAGES.get(export.format, ()):
        if importlib.util.find_spec(package) is None:
            extra = "openvino" if package == "openvino" else "'falconet[export]'"
            raise ConfigError(f"--format {export.format}: needs {package}, which is not installed: pip install {extra}")
    if export.photos is not None:
        require_folder(export.photos, "a folder of photos for --photos")


def _check_served(options: commands.ServeOptions) -> None:
    """The packages of a server, and the runs, exports and files that it serves."""
    for package in ("aiohttp", "prometheus_client"):
        require_package(package, extra="serve")
    if options.telemetry.opentelemetry:
        require_package("opentelemetry.exporter.otlp.proto.http", extra="telemetry")
    first = options.input.checkpoint_input_path
    for path in (*([first] if first else []), *options.models.more_models):
        if not path.is_file() and not (path / EXPORT_RECORD).is_file():
            require_checkpoints(path)
    if options.models.repository:
        require_folder(options.models.repository, "a folder of runs for --repository")


def _check_measured(options: commands.BenchServeOptions) -> None:
    """The packages that clients and an exported model need, and Triton's server."""
    if options.load.protocol == "grpc":
        require_package("grpc", extra="serve")
    if options.load.server != "falconet":
        for package in EXPORT_PACKAGES["triton"]:
            require_package(package, extra="export")
        with named_option("server"):
            triton_server.find()


def _check_validated(options: Any) -> None:
    """Checkpoints to measure after training must exist before it, except the run's own."""
    path: Path | None = options.validation.validate_checkpoints if hasattr(options, "validation") else None
    run_dir = options.run.run_dir if path else None
    own = () if run_dir in (None, "auto") else (run_dir, run_dir / "checkpoints")
    if path and path not in (*own, options.checkpoints.checkpoint_output_path):
        require_checkpoints(path)


def _note(text: str) -> None:
    from falconet.report.console import spoken  # imports torch, and only a damaged checkpoint needs it

    spoken()(text)
