"""Check the files, folders and packages that a command needs, by its options, before torch is imported."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from falconet.bench import triton_server
from falconet.checkpoint import format
from falconet.checkpoint.manifest import require_folder as require_checkpoints
from falconet.config import facts, rules
from falconet.config.commands import (
    AverageOptions,
    Command,
    ExportOptions,
    InferOptions,
    PredictOptions,
    RestoreOptions,
    SearchOptions,
    ServeOptions,
    TrainOptions,
    ValidateOptions,
)
from falconet.config.fields import PHOTO_SUFFIXES, options_of, require_folder, require_photos
from falconet.config.load import Loaded, OptionsT, load_options, parse
from falconet.config.options import Checkpoints, Data, Input, Logging, Run, Validation
from falconet.config.settings import LINE, Setting
from falconet.config.spaces import spaces_in
from falconet.config.tool_options import DataCheck, Load, Pack, Report, Upload, Verify, Watch
from falconet.errors import ConfigError, named_option, path_near
from falconet.report import folders
from falconet.report.run_files import CHECKPOINTS, CONFIG, EXPORT_RECORD

EXPORT_PACKAGES = {
    **dict.fromkeys(("onnx", "triton"), ("onnx", "onnxscript", "onnxruntime")),
    "openvino": ("openvino",),
}
TRACKERS = ("tensorboard", "wandb", "mlflow", "aim")  # an option, a package and an extra each
SET_BY_SEARCH = ("run-dir", "resume", "temporary", "name-suffix", "plan")
FROM_CHECKPOINT = (RestoreOptions, ValidateOptions, AverageOptions)


def load(command: type[OptionsT], line: Sequence[Setting]) -> Loaded[OptionsT]:
    """The checked options of a line; for `restore`, over those of the checkpoint that it continues from."""
    if command is SearchOptions:
        return _load_search(command, line)
    if command in FROM_CHECKPOINT:
        return _load_over_checkpoint(command, line)
    loaded = load_options(command, line)
    check(loaded.options)
    return loaded


def _load_over_checkpoint(command: type[OptionsT], line: Sequence[Setting]) -> Loaded[OptionsT]:
    """The options of a line that names a checkpoint or several.

    For `validate` and `average`, only types and ranges are checked: these commands load the line over the options of
    each checkpoint.
    """
    stated = parse(command, line)  # wrong names and values are reported before a checkpoint is looked for
    options = stated.options
    assert isinstance(options, FROM_CHECKPOINT)
    path = options.input.checkpoint_input_path
    if isinstance(options, ValidateOptions) and options.pretrained.pretrained != "none":
        if path is not None:
            raise ConfigError("--pretrained: contradicts --checkpoint-input-path; expected one of them")
        return stated
    if path is None:
        raise ConfigError(
            "expected a run, such as runs/my-run, a checkpoint or a folder of them (--checkpoint-input-path)"
        )
    _require_checkpoint(options.input, or_weights=isinstance(options, ValidateOptions))
    if not isinstance(options, AverageOptions) and "model" in stated.sources:
        problem = rules.unknown_model(options.model)
        if problem:
            raise ConfigError(problem)
    if not isinstance(options, RestoreOptions):
        return stated
    _check_validated(options.run, options.validation, options.checkpoints)
    _check_logging(options.logging)
    folder = format.newest_whole(path, note=_note)
    return replace(stated.over(format.read_manifest(folder).config), checkpoint=folder)


def _load_search(command: type[OptionsT], line: Sequence[Setting]) -> Loaded[OptionsT]:
    """The options of a search, with the first value of each space; the ends of all spaces are checked."""
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
    except ModuleNotFoundError:  # the package that would contain it is missing
        is_there = False
    if not is_there:
        raise ConfigError(f"needs {name}, which is not installed: pip install 'falconet[{extra}]'")


def check(options: object) -> None:
    """Refuse options that name no input, or whose files, folders or packages are missing."""
    for one in CHECKS:
        read = rules.read_by(one, options)
        if read is not None:
            one(**read)


def _check_pack(pack: Pack) -> None:
    if pack.source is None or pack.target is None:
        raise ConfigError("expected two folders: one with train/ and val/, and one for the shards")
    require_photos(pack.source)


def _check_data_check(check: DataCheck) -> None:
    if check.source is None:
        raise ConfigError("expected a folder of photos, as in `falconet data check photos`")
    require_photos(check.source)
    if check.exclude_duplicates != "none" and check.exclude_list is None:
        raise ConfigError("--exclude-duplicates: needs --exclude-list, the file to write")
    written = {
        "--output": check.output,
        "--json": check.json,
        "--html": check.html,
        "--exclude-list": check.exclude_list,
    }
    places = {option: place for option, place in written.items() if isinstance(place, Path)}
    for option, place in places.items():
        if place.suffix.lower() in PHOTO_SUFFIXES or place.is_dir():
            what = "is a folder" if place.is_dir() else "would replace a photo"
            raise ConfigError(f"{option}: {place} {what}; expected the name of another file")
        same = next((other for other, path in places.items() if path == place and other != option), None)
        if same:
            raise ConfigError(f"{option}: {place} is also {same}; expected another file")
        if place.is_file() and place.samefile(check.source):
            raise ConfigError(f"{option}: {place} would replace the table; expected another file")


def _check_verify(verify: Verify) -> None:
    if verify.source is None:
        raise ConfigError("expected a folder of shards, as in `falconet data verify photos-packed`")
    require_folder(verify.source, "one that `falconet data pack` made")


def _check_upload(upload: Upload) -> None:
    if upload.source is None:
        raise ConfigError("expected a run folder, as in `falconet upload runs/my-run`")
    require_folder(upload.source, "a run folder", meant=path_near(upload.source, folders.home("runs")))


def _check_report(report: Report) -> None:
    if not report.runs:
        raise ConfigError("expected one or more run folders, as in `falconet report runs/my-run`")
    if report.save_plots:
        _require_plots()


def _check_watch(watch: Watch) -> None:
    if watch.port != "auto" and not watch.page:
        raise ConfigError("--port: needs --page")
    if watch.browser and not watch.page:
        raise ConfigError("--browser: needs --page")


def _check_serve(options: ServeOptions) -> None:
    """Check the packages of a server, and the runs, exports and files that it serves."""
    for package in ("aiohttp", "prometheus_client"):
        require_package(package, extra="serve")
    if options.telemetry.opentelemetry:
        require_package("opentelemetry.exporter.otlp.proto.http", extra="telemetry")
    first = options.input.checkpoint_input_path
    for path in (*([first] if first else []), *options.models.more_models):
        if not path.is_file() and not (path / EXPORT_RECORD).is_file():
            require_checkpoints(path, or_weights=True)
    if options.models.repository:
        _require_repository(options.models.repository)


def _require_repository(folder: Path) -> None:
    require_folder(folder, "a folder of runs for --repository")
    if _is_run(folder):
        raise ConfigError(
            f"--repository: {folder} is a run; expected the folder that holds it, or `falconet serve {folder}`"
        )


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / CHECKPOINTS).is_dir()


def _check_predict(options: PredictOptions) -> None:
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
    _require_checkpoint(options.input)
    for option, place in (("output", options.predict.output), ("embeddings", options.predict.embeddings)):
        if place is not None and (place.suffix.lower() in PHOTO_SUFFIXES or _is_one_of(place, options.predict.photos)):
            raise ConfigError(f"--{option}: {place} would replace a photo; expected the name of another file")
    if not options.predict.photos:
        raise ConfigError("expected photos after the run: files, folders, or - for stdin")


def _is_one_of(place: Path, words: Sequence[str]) -> bool:
    # Path's methods raise an error where they may not look.
    return any(os.path.exists(place) and os.path.exists(word) and place.samefile(word) for word in words)  # noqa: PTH110


def _check_export(options: ExportOptions) -> None:
    """Check the packages that write and run a format, the photos for comparing, and the checkpoint."""
    export, path = options.export, options.input.checkpoint_input_path
    if path is not None and options.pretrained.pretrained != "none":
        raise ConfigError(f"--pretrained: contradicts {path}, which also gives the weights; expected one of them")
    for package in EXPORT_PACKAGES.get(export.format, ()):
        if importlib.util.find_spec(package) is None:
            extra = "openvino" if package == "openvino" else "'falconet[export]'"
            raise ConfigError(f"--format {export.format}: needs {package}, which is not installed: pip install {extra}")
    if export.photos is not None:
        require_folder(export.photos, "a folder of photos for --photos")
    _require_checkpoint(options.input)


def _check_bench_infer(options: InferOptions) -> None:
    _require_checkpoint(options.input)


def _require_checkpoint(input: Input, *, or_weights: bool = True) -> None:
    path = input.checkpoint_input_path
    if path is not None and not path.is_file():
        require_checkpoints(path, or_weights=or_weights)


def _check_bench_serve(load: Load) -> None:
    """Check the packages that clients and an exported model need, and Triton's server."""
    if load.protocol == "grpc":
        require_package("grpc", extra="serve")
    if load.server != "falconet":
        for package in EXPORT_PACKAGES["triton"]:
            require_package(package, extra="export")
        with named_option("server"):
            triton_server.find()


def _check_data(data: Data, options: Command) -> None:
    """Check the photos; the name of their folder may have been meant as another kind of data."""
    if data.data not in facts.PHOTO_KINDS or facts.only_planned(options):
        return
    assert data.data_dir is not None, "a rule requires it"
    kinds = options_of(TrainOptions)["data"].choices
    meant = f"; did you mean --data {data.data_dir}?" if str(data.data_dir) in kinds else ""
    require_photos(data.data_dir, meant=meant)


def _check_run_dir(run: Run, data: Data) -> None:
    """Refuse to make a run folder of a folder of the data: it would not be read as photos again."""
    folder = run.run_dir
    if folder == "auto" or data.data not in facts.PHOTO_KINDS or data.data_dir is None or not data.data_dir.is_dir():
        return
    own, whole = folder.resolve(), data.data_dir.resolve()
    if _is_run(own) or not (own == whole or (whole in own.parents and _holds_photos(own))):
        return
    raise ConfigError(
        f"--run-dir: {folder} holds the photos that are trained on; expected another folder, such as runs/NAME"
    )


def _holds_photos(folder: Path) -> bool:
    """Whether photos are in a folder, or in one of its own, as in photos/train/."""
    within = (each for pattern in ("*", "*/*") for each in folder.glob(pattern))
    return any(each.suffix.lower() in PHOTO_SUFFIXES for each in within)


def _check_logging(logging: Logging) -> None:
    """Check the packages of trackers and plots."""
    for package in TRACKERS:
        if getattr(logging, package):
            with named_option(package):
                require_package(package, extra=package)
    if logging.report and logging.save_plots:
        _require_plots()


def _require_plots() -> None:
    with named_option("save_plots"):
        require_package("matplotlib", extra="plots")


def _check_validated(run: Run, validation: Validation, checkpoints: Checkpoints) -> None:
    """Check that checkpoints to measure after training exist before it, unless the run writes them."""
    path = validation.validate_checkpoints
    own = () if run.run_dir == "auto" else (run.run_dir, run.run_dir / "checkpoints")
    if path and path not in (*own, checkpoints.checkpoint_output_path):
        require_checkpoints(path)


Check = Callable[..., None]
CHECKS: tuple[Check, ...] = (  # in this order, each if the options have the parts that it reads
    _check_pack,
    _check_data_check,
    _check_verify,
    _check_upload,
    _check_report,
    _check_watch,
    _check_serve,
    _check_predict,
    _check_export,
    _check_bench_infer,
    _check_bench_serve,
    _check_data,
    _check_run_dir,
    _check_logging,
    _check_validated,
)


def _note(text: str) -> None:
    from falconet.report.console import spoken  # imports torch, and only a damaged checkpoint needs it

    spoken()(text)
