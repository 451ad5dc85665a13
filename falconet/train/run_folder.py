"""The run folder: which one, its files and sinks, and the lock on it."""

import contextlib
import csv
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from falconet import writing
from falconet.checkpoint.format import checkpoints_in, whole_after
from falconet.checkpoint.manifest import Checkpoint
from falconet.config import commands
from falconet.config.fields import options_of
from falconet.config.load import LoadedTraining, left_out
from falconet.config.settings import CHECKPOINT, DEFAULT, is_asked_for, read_yaml
from falconet.errors import (
    ConfigError,
    LinkError,
    named_option,
)
from falconet.models import zoo
from falconet.parallel import environment
from falconet.report import plots
from falconet.report.console import Say
from falconet.report.folders import RunShape
from falconet.report.profile import trace
from falconet.report.run_files import (
    ANSWERS,
    CHECKPOINTS,
    CONFIG,
    MEMORY,
    METRICS,
    PLAN,
    RECORDS,
    REPORT,
    RESULTS,
    SEEN,
    SUMMARY,
    TIMES,
    updates_in_summary,
)
from falconet.report.sinks import JsonLines, Several, Sink, UpdateTimes
from falconet.report.styles import FALCONET, Conventions, Table
from falconet.report.trackers.tracker import Guarded, Tracker
from falconet.train.interruption import restore_line
from falconet.train.validation import AVERAGED

# Checked for links before the first update, so that none is found after the last one.
WRITTEN = (
    *(CONFIG, PLAN, METRICS, TIMES, SUMMARY, "validation.csv", "training.csv", "log.txt"),
    *(CHECKPOINTS, "tensorboard", "wandb", *trace.FILES),
    *(REPORT, RESULTS, RECORDS, plots.FOLDER),
)
OURS = frozenset({"model", "data", "optimizer", "micro-batch-size"})  # options that identify a config.yaml as ours
KEPT = 3  # newest checkpoints, by default
ENDING = 5.0  # seconds that a killed run may take to leave its folder


def choose(options: commands.TrainOptions, conventions: Conventions = FALCONET) -> Path:
    """The folder of this run; only a temporary one is created here, so that its name is unique."""
    if options.run.temporary:
        return Path(tempfile.mkdtemp(prefix=f"{_fresh(options, conventions).name}_"))
    return _fresh(options, conventions) if options.run.run_dir == "auto" else options.run.run_dir


def is_named_anew(options: commands.TrainOptions, conventions: Conventions = FALCONET) -> bool:
    """Whether `choose` invents a name."""
    run = options.run
    return run.run_dir == "auto" and not run.temporary and not _logs_where_it_saves(options, conventions)


def claim(options: commands.TrainOptions, conventions: Conventions = FALCONET) -> Path:
    """`choose`; an invented name is created at once, so that another run in the same second takes another one."""
    folder = choose(options, conventions)
    if not is_named_anew(options, conventions):
        return folder
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            taken, folder = folder, choose(options, conventions)
            if folder == taken:  # by a dangling link
                return folder
        except OSError:
            return folder  # writing into it will fail with a better message


def open_folder(
    loaded: LoadedTraining,
    *,
    restored: Checkpoint | None,
    again: bool = False,
    conventions: Conventions = FALCONET,
) -> Path:
    """The folder of this run, created and writable; a restored run, or another attempt, continues in its own."""
    options = loaded.options
    folder = claim(options, conventions)
    known = again or options.run.run_dir == "auto" or (restored and _belongs(restored, folder))
    saved = checkpoints(folder, options)
    if (folder / CONFIG).exists() and saved.is_dir() and checkpoints_in(saved) and not known:
        raise ConfigError(
            f"--run-dir: {folder} already holds a run; `{restore_line(folder, saved)}` continues it, another folder"
            " starts a new one"
        )
    _require_writable(folder, "--run-dir")
    elsewhere = options.checkpoints.checkpoint_output_path is not None
    writing.refuse_links(folder, (name for name in WRITTEN if not (elsewhere and name == CHECKPOINTS)))
    _require_writable(saved, "--checkpoint-output-path")
    check_saved(saved, loaded, restored=restored)
    return folder


def check_saved(saved: Path, loaded: LoadedTraining, *, restored: Checkpoint | None) -> None:
    """Refuse a folder whose checkpoints this run would mix with its own."""
    newer = whole_after(saved, restored.manifest.progress) if restored else None
    if restored and newer:  # pruning would remove this run's checkpoints first, and restoring find them last
        option = "checkpoint-output-path" if is_asked_for(loaded.sources.get("checkpoint-output-path")) else "run-dir"
        renewed = f", or no --{option}: a run that continues from an older one gets a new folder"
        new = renewed if home(restored.folder) else ""
        raise ConfigError(
            f"--{option}: {saved} holds checkpoints newer than {restored.folder.name}, such as {newer.name};"
            f" expected another folder{new}"
        )
    if not restored and checkpoints_in(saved):
        raise ConfigError(
            f"--checkpoint-output-path: {saved} holds checkpoints of another run; expected a folder without any"
        )


@contextlib.contextmanager
def alone(folder: Path, *, option: str = "--run-dir", again: bool = False) -> Iterator[None]:
    """Lock a folder: two runs would mix their metrics and checkpoints. The lock ends with its process."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not _locked(handle) and not again:  # another attempt must not fail because of the one before it
            raise ConfigError(f"{folder}: in use by another run; wait for it to finish, or choose another {option}")
        yield
    finally:
        os.close(handle)


def require_ended(folder: Path) -> None:
    """Refuse a run that goes on before its checkpoints are read: it removes older ones meanwhile."""
    if folder.is_dir() and environment.attempt(os.environ) == 0:
        with alone(folder):
            pass


def _locked(handle: int) -> bool:
    """Whether the lock on an open folder was taken; a killed process may take a moment to release it."""
    end = time.monotonic() + ENDING
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return True
        else:
            return True


def checkpoints(folder: Path, options: commands.TrainOptions) -> Path:
    return options.checkpoints.checkpoint_output_path or folder / CHECKPOINTS


def kept(options: commands.TrainOptions) -> int | None:
    """Newest checkpoints to keep; None: all."""
    asked, last = options.checkpoints.checkpoints_kept, options.averaging.weight_avg_N
    if asked == "all":
        return None
    if asked != "auto":
        return asked
    if options.averaging.weight_avg_strategy == "none":
        return KEPT
    if last in ("all", -1) or options.averaging.weight_avg_also or options.averaging.weight_avg_epochs is not None:
        return None
    return max(KEPT, int(last))


def lacks_its_end(options: commands.TrainOptions, restored: Checkpoint, conventions: Conventions = FALCONET) -> bool:
    """Whether a run stopped after the last update but before its summary, which it writes after everything else."""
    if options.run.temporary or is_named_anew(options, conventions):
        return False
    return _is_unended(restored, choose(options, conventions))


def _is_unended(restored: Checkpoint, folder: Path) -> bool:
    """Whether this folder's run, continued from its checkpoint, has no summary of that update."""
    return _belongs(restored, folder) and updates_in_summary(folder) < restored.manifest.progress.update


def check_resumed(folder: Path, saved: Path) -> None:
    """Refuse to start anew, with --resume, a run that has saved its checkpoints elsewhere."""
    stated = (_config(folder) or {}).get("checkpoint-output-path")
    if stated and Path(stated).absolute() != saved.absolute() and checkpoints_in(Path(stated)):
        raise ConfigError(
            f"--resume: the checkpoints of {folder} are in {stated}; expected --checkpoint-output-path {stated}"
        )


def continue_log(
    folder: Path, restored: Checkpoint | None, *, conventions: Conventions = FALCONET, again: bool = False
) -> None:
    """Let the files that grow end where the run continues: what a killed start logged beyond it comes again.

    In another folder than the checkpoint's, they start with what its run had logged. `again`: the folder is this run's,
    even if nothing was saved yet.
    """
    if restored and not again and not _belongs(restored, folder):
        source = home(restored.folder)
        if source is None or (folder / METRICS).exists():
            return  # nothing is known of this folder's log
        written = [table.name for table in conventions.tables]
        for name in (METRICS, TIMES, *written, *([conventions.options_file] if conventions.options_file else [])):
            if (source / name).is_file() and not (source / name).is_symlink():
                writing.replace(folder, name, (source / name).read_bytes())
        _continue_records(folder, source, update=restored.manifest.progress.update)
    update = restored.manifest.progress.update if restored else 0
    validated = not (restored and restored.manifest.meter.get("unvalidated"))
    comes_again = restored is not None and _is_unended(restored, folder)  # what follows the last update

    def is_kept(line: bytes) -> bool:
        done, names = _read_line(line)
        if done == update and comes_again and any(name.startswith(AVERAGED) for name in names):
            return False
        return done < update or (done == update and (validated or "train/loss" in names))

    writing.keep_lines(folder, METRICS, is_kept)
    writing.keep_lines(folder, TIMES, lambda line: _read_line(line)[0] <= update)
    for table in conventions.tables:
        last = update if validated or not table.is_of_validations else update - 1
        writing.keep_lines(folder, table.name, _until(last, table, ends=comes_again and table.is_of_validations))


def _continue_records(folder: Path, source: Path, *, update: int) -> None:
    """Copy what the other folder's report shows: the first batch, memory, and answers of no later update."""
    if (source / RECORDS).is_symlink():
        return
    for name in (SEEN, MEMORY, ANSWERS):
        if (source / name).is_file() and not (source / name).is_symlink():
            content = (source / name).read_bytes()
            if name != ANSWERS or _read_line(content)[0] <= update:
                writing.replace(folder, name, content)


def _read_line(line: bytes) -> tuple[int, Collection[str]]:
    """The update of a line of JSON, and the names of its numbers; update 0 if it is not a line of ours."""
    try:
        content = json.loads(line)
    except ValueError:
        return 0, ()
    done = content.get("update") if isinstance(content, dict) else None
    return (done, content) if isinstance(done, int) else (0, ())


def _until(last: int, table: Table, *, ends: bool) -> Callable[[bytes], bool]:
    """Whether a line of a CSV file is its header, or a row of an update up to the `last`.

    `ends`: the first row of that one is the last that is kept; averages and other checkpoints may follow it.
    """
    header: list[str] = []
    ended = False

    def is_kept(line: bytes) -> bool:
        nonlocal ended
        cells = next(csv.reader([line.decode(errors="replace")]), [])
        if not header:
            header.extend(cells)
            return True
        if ended:
            return False
        done = dict(zip(header, cells, strict=False)).get(table.update, "")
        ended = ends and done == str(last)
        return not done.isdecimal() or int(done) <= last

    return is_kept


def write_config(folder: Path, config: str, plan: str) -> None:
    writing.replace(folder, CONFIG, config)
    writing.replace(folder, PLAN, plan)


@dataclass(frozen=True, kw_only=True)
class Sinks:
    """Where a run's measurements go; nowhere in processes other than the first."""

    metrics: Sink = field(default_factory=lambda: Several([]))
    trackers: Sequence[Tracker] = ()  # those of `metrics` that show more, and get a style's numbers under its names
    times: UpdateTimes | None = None

    def write_times(self, update: int, seconds: Sequence[float]) -> None:
        if self.times:
            self.times.write(update, seconds)

    def close(self) -> None:
        try:
            self.metrics.close()
        finally:
            if self.times:
                self.times.close()


def open_sinks(
    folder: Path, loaded: LoadedTraining, *more: Sink, say: Say, mark: str, restored: Checkpoint | None
) -> Sinks:
    """metrics.jsonl and updates.jsonl always, others when asked for. `mark`: of the run."""
    with contextlib.ExitStack() as opened:  # what is open is closed if the next one is refused
        found: list[Guarded] = []
        for name, opens in _asked_for(folder, loaded, say=say, mark=mark, restored=restored).items():
            found.append(Guarded(name, opens, say=say))
            opened.callback(found[-1].close)
        metrics = Several([JsonLines(folder / METRICS), *found, *more])
        sinks = Sinks(metrics=metrics, trackers=found, times=UpdateTimes(folder / TIMES))
        opened.pop_all()
    return sinks


def _asked_for(
    folder: Path, loaded: LoadedTraining, *, say: Say, mark: str, restored: Checkpoint | None
) -> dict[str, Callable[[], Tracker]]:
    """How to open each tracker of the options, by name; called by threads of their own."""
    logging, table = loaded.options.logging, loaded.table()
    every = {name: entry["value"] for name, entry in table.items()}
    known = options_of(type(loaded.options))
    chosen = {
        name: value for name, value in every.items() if table[name]["source"] != DEFAULT and not known[name].is_local
    }

    def tensorboard() -> Tracker:
        from falconet.report.trackers.tensorboard import TensorBoard

        after = restored.manifest.progress.update if restored else None
        return TensorBoard(folder / "tensorboard", options=chosen, after=after)

    def wandb() -> Tracker:
        from falconet.report.trackers.weights_and_biases import WeightsAndBiases

        offline = lambda why: say(f"note: --wandb: {why}")  # noqa: E731
        return WeightsAndBiases(folder, project=logging.wandb_project, name=folder.name, config=every, offline=offline)

    def mlflow() -> Tracker:
        from falconet.report.trackers.mlflow import MLflow

        files = (CONFIG, PLAN, METRICS, SUMMARY, REPORT, RESULTS)
        return MLflow(folder, mark=mark, options=every, files=files, continues=restored is not None)

    def aim() -> Tracker:
        from falconet.report.trackers.aim import Aim

        return Aim(folder, options=every)

    kinds = {
        "TensorBoard": (logging.tensorboard, tensorboard),
        "Weights & Biases": (logging.wandb, wandb),
        "MLflow": (logging.mlflow, mlflow),
        "Aim": (logging.aim, aim),
    }
    return {name: opens for name, (is_asked, opens) in kinds.items() if is_asked}


def temporary_line(folder: Path) -> str:
    return f"the run folder is temporary and removed after a clean end: {folder}"


def remove_temporary(folder: Path, say: Say) -> None:
    """Remove a temporary run folder, or print why it cannot be removed."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        say(f"warning: cannot remove the temporary run folder {folder}: {error.strerror or error}")
    else:
        say(f"removed the temporary run folder {folder}")


def placed(loaded: LoadedTraining, restored: Checkpoint) -> LoadedTraining:
    """The options of a restored run with its folders: the command line's, or else where the checkpoint lies.

    Where that run has newer checkpoints, which this one must not mix with its own, the folder stays `auto`: a new one.
    Folders named in the checkpoint are ignored: it may come from another person, and would choose which of the user's
    files are overwritten or removed.
    """
    options, sources = loaded.options, dict(loaded.sources)
    folder, kept = options.run.run_dir, options.checkpoints.checkpoints_kept
    if folder == "auto":
        found = home(restored.folder)
        if found is None and not options.run.plan:
            raise ConfigError(
                f"--run-dir: required, because {restored.folder} is not in a run folder, and folders are not"
                " taken from a checkpoint"
            )
        is_newest = whole_after(restored.folder.parent, restored.manifest.progress) is None
        folder = found if found and is_newest else folder
    saved = options.checkpoints.checkpoint_output_path
    if saved is None and folder != "auto" and _belongs(restored, folder) and not _is_default(restored, folder):
        saved = restored.folder.parent
        if saved.is_symlink() and saved.parent.resolve() == folder.resolve():
            raise LinkError(saved)
        sources["checkpoint-output-path"] = CHECKPOINT
    if "checkpoints-kept" in left_out(loaded, restored.manifest.config):
        kept = "all"  # the stored number may not remove any, nor may our default remove what that one kept
        sources["checkpoints-kept"] = CHECKPOINT
    options = replace(
        options,
        run=replace(options.run, run_dir=folder),
        checkpoints=replace(options.checkpoints, checkpoint_output_path=saved, checkpoints_kept=kept),
    )
    return replace(loaded, options=options, sources=sources)


def beside(restored: Checkpoint, conventions: Conventions) -> Conventions:
    """The conventions of a restored run: a new run folder goes beside that of the checkpoint."""
    lies, fresh = home(restored.folder), conventions.run_folder
    if lies is None:
        return conventions
    return replace(conventions, run_folder=lambda shape: fresh(replace(shape, parent=lies.parent)))


def home(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, directly or in its folder of checkpoints; None: in none."""
    # As spelled: a checkpoint that is a link must not lead to another run.
    saved = Path(os.path.abspath(checkpoint)).parent  # noqa: PTH100, resolve follows links
    for folder in (saved, saved.parent):
        config = _config(folder) or ({} if _is_damaged(folder) else None)
        elsewhere = config.get("checkpoint-output-path") if config else None
        inside = elsewhere is not None if folder == saved else Path(elsewhere or CHECKPOINTS).name == saved.name
        if config is not None and inside:
            here = Path.cwd()
            shorter = not checkpoint.is_absolute() and folder != here and folder.is_relative_to(here)
            return folder.relative_to(here) if shorter else folder
    return None


def _belongs(restored: Checkpoint, folder: Path) -> bool:
    """Whether a checkpoint is one of the run in this folder: it lies there, or where that run saves."""
    lies = home(restored.folder)
    if lies is not None and lies.resolve() == folder.resolve():
        return True
    elsewhere = (_config(folder) or {}).get("checkpoint-output-path")
    return elsewhere is not None and Path(elsewhere).resolve() == restored.folder.parent.resolve()


def elsewhere_line(restored: Checkpoint, folder: Path) -> str | None:
    """What to print if a restored run continues in another folder than the checkpoint's."""
    lies = home(restored.folder)
    if lies is None or _belongs(restored, folder):
        return None
    return f"continuing {restored.folder.name} in another run folder, {folder}; {lies} stays as it is"


def _is_default(restored: Checkpoint, folder: Path) -> bool:
    return restored.folder.parent.resolve() == (folder / CHECKPOINTS).resolve()


def _config(folder: Path) -> dict[str, str] | None:
    """The config.yaml of a run folder; None: there is none, or it is another program's."""
    try:
        content = read_yaml(folder / CONFIG) if (folder / CONFIG).is_file() else None
    except ConfigError:
        return None
    if not isinstance(content, dict) or not content.keys() >= OURS:
        return None
    return {name: value for name, value in content.items() if isinstance(value, str)}


def _is_damaged(folder: Path) -> bool:
    """Whether a run folder's config.yaml is no YAML, perhaps after an edit; a restored run writes it again."""
    if not (folder / CONFIG).is_file() or not (folder / METRICS).is_file():
        return False
    try:
        read_yaml(folder / CONFIG)
    except ConfigError:
        return True
    return False


def _logs_where_it_saves(options: commands.TrainOptions, conventions: Conventions) -> bool:
    return conventions.logs_where_it_saves and options.checkpoints.checkpoint_output_path is not None


def _fresh(options: commands.TrainOptions, conventions: Conventions) -> Path:
    saved = options.checkpoints.checkpoint_output_path
    if saved and conventions.logs_where_it_saves:
        return saved
    size, replicas = options.data.image_size, options.parallel.replicas
    with named_option("model"):
        side = zoo.image_size(options.model.model) if size == "auto" else size
    shape = RunShape(
        model=options.model.model,
        data=options.data.data,
        micro_batch=options.data.micro_batch,
        accumulation=options.training.gradient_accumulation,
        replicas=1 if replicas == "auto" else replicas,
        pipelined=bool(options.parallel.pipeline_splits) or options.numerics.recompute_mode == "manual",
        norm=options.model.norm_type,
        groups=options.model.norm_num_groups,
        precision=options.machine.precision,
        rounds_stochastically=options.numerics.enable_stochastic_rounding,
        image_size=side,
        in_a_row=options.training.device_iterations,
        suffix=options.run.name_suffix,
    )
    return conventions.run_folder(shape)


def _require_writable(folder: Path, option: str) -> None:
    with writing.explained(f"to {folder}", option=option):
        folder.mkdir(parents=True, exist_ok=True)
        writing.probe(folder)
