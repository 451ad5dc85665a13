"""`falconet search`: train with several values of some options, and keep the best.

Each trial is a `falconet train` in its own process and run folder, so that one that fails, or runs out of memory, costs
only itself. Optuna chooses the values and decides after each epoch which trials are worth their time; its study is an
SQLite file, so a search continues where it stopped, and several may work on one study.
"""

import contextlib
import csv
import datetime
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from falconet import writing
from falconet.bench.execution import terminated_as_interrupted
from falconet.config.commands import SearchOptions
from falconet.config.fields import options_of
from falconet.config.load import Loaded, typed
from falconet.config.spaces import Choices, Space, spaces_in
from falconet.errors import ConfigError, Interrupted
from falconet.parallel.host import none_left
from falconet.report import folders
from falconet.report.console import Say, Screen, counted
from falconet.report.epochs import ACCURACY, MEAN_AVERAGE_PRECISION
from falconet.report.run_files import CONFIG, METRICS, SUMMARY

TRAIN = (sys.executable, "-m", "falconet", "train")
DATABASE, BEST, TABLE = "study.db", "best.yaml", "trials.csv"
SPACE = "space"  # the study's attribute
SCORES = {metric.key: metric for metric in (ACCURACY, MEAN_AVERAGE_PRECISION)}  # a run has one of them
BEGINNING = 60  # seconds within which a new trial has opened its log
POLLED = 0.2  # seconds between looks at a trial's metrics
STARTUP = 4  # trials to compare with before the first is pruned
DONE = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


def run(loaded: Loaded[SearchOptions]) -> int:
    options, say = loaded.options, Screen().line
    spaces = spaces_in(loaded.line, options_of(SearchOptions))
    folder = options.search.study
    if folder == "auto":
        folder = folders.numbered(folders.home("runs"), f"search_{options.data.data}_{folders.now()}")
    study = _opened(folder, spaces, prune=options.search.prune)
    for name, space in spaces.items():
        say(f"{name:<24}{space}")
    say(f"study {folder}: {counted(len(_finished(study)), 'trial')} of {options.search.budget} done")
    search = Search(study, folder, spaces, tuple(_fixed(loaded, spaces)), options.run.seed, say)
    try:
        with none_left(), terminated_as_interrupted():
            while len(_finished(study)) + _running(study, folder) < options.search.budget:
                search.try_next()
                _require_success(_finished(study), folder)
    except KeyboardInterrupt:
        say(f"stopped; the same command with --study {folder} continues")
        raise Interrupted from None
    return _conclude(study, folder, spaces, say)


@dataclass(frozen=True)
class Search:
    """A study, and the settings that all its trials share."""

    study: optuna.Study
    folder: Path
    spaces: Mapping[str, Space]
    fixed: tuple[str, ...]  # the words of the line that are the same in every trial
    seed: int
    say: Say

    def try_next(self) -> None:
        """Train once, with values that the study chooses."""
        trial = self.study.ask()
        # By number, so that workers draw different values, and a study that continues does not repeat its first ones.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # Optuna before 5 calls constant_liar experimental
            self.study.sampler = optuna.samplers.TPESampler(seed=self.seed + trial.number, constant_liar=True)
        chosen = {name: _chosen(trial, name, space) for name, space in self.spaces.items()}
        home = self.folder / f"trial-{trial.number}"
        words = [word for name, value in chosen.items() for word in (f"--{name}", value)]
        began = time.monotonic()
        state, scores, why = self._train(trial, home, words)
        trial.set_user_attr("epochs", len(scores))
        trial.set_user_attr("seconds", round(time.monotonic() - began, 1))
        trial.set_user_attr("why", why)
        self.study.tell(trial, max(scores) if state == TrialState.COMPLETE else None, state=state)
        score = f"{max(scores):.2f} %" if scores else why
        mark = "" if state == TrialState.COMPLETE else f" ({state.name.lower()})" if scores else ""
        self.say(f"trial {trial.number:<4}{score}{mark}  " + "  ".join(f"{name} {chosen[name]}" for name in chosen))

    def _train(self, trial: Trial, home: Path, words: list[str]) -> tuple[TrialState, list[float], str]:
        home.mkdir(parents=True)
        log = _log(self.folder, trial.number)
        command = [*TRAIN, *self.fixed, *words, "--run-dir", str(home)]
        scores: list[float] = []
        with log.open("wb") as out:
            fcntl.flock(out, fcntl.LOCK_EX)  # the training inherits it: held while one of the two lives
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                pruned = self._watch(trial, process, home, scores)
            finally:
                _end(process)
        scores += _scores(home)[len(scores) :]
        if pruned:
            return TrialState.PRUNED, scores, "pruned"
        if process.returncode == 0 and scores:
            return TrialState.COMPLETE, scores, ""
        lines = log.read_text(errors="replace").strip().splitlines()
        return TrialState.FAIL, scores, lines[-1] if lines else f"exit code {process.returncode}"

    def _watch(self, trial: Trial, process: "subprocess.Popen[bytes]", home: Path, scores: list[float]) -> bool:
        """Report each epoch's score until the trial ends or is pruned; returns whether it was pruned."""
        while process.poll() is None:
            time.sleep(POLLED)
            for score in _scores(home)[len(scores) :]:
                scores.append(score)
                trial.report(score, len(scores))
                if trial.should_prune():
                    return True
        return False


def _opened(folder: Path, spaces: Mapping[str, Space], *, prune: bool) -> optuna.Study:
    """Open the study in a folder, new or with the same search space as before."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(
            study_name="falconet",
            storage=_storage(folder / DATABASE),
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP) if prune else optuna.pruners.NopPruner(),
        )
    except OSError as error:
        raise ConfigError(f"--study: {folder}: {error.strerror}; expected a folder that you may write") from None
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(f"--study: {folder / DATABASE}: is not a study ({why}); expected another folder") from None
    stated = {name: str(space) for name, space in spaces.items()}
    stored = study.user_attrs.get(SPACE, stated)
    if stored != stated:
        before = "; ".join(f"--{name} {values}" for name, values in stored.items())
        raise ConfigError(f"--study: {folder} searches {before}; expected the same, or another folder")
    study.set_user_attr(SPACE, stated)
    return study


def _storage(database: Path) -> RDBStorage:
    address = sqlalchemy.URL.create("sqlite", database=str(database))  # which escapes what a path may hold
    waits = {"connect_args": {"timeout": 60}}  # seconds for another worker's write
    return RDBStorage(address.render_as_string(hide_password=False), engine_kwargs=waits)


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _fixed(loaded: Loaded[SearchOptions], spaces: Mapping[str, Space]) -> Iterator[str]:
    own = {"budget", "study", "prune", *spaces}
    yield from typed([setting for setting in loaded.line if setting.bare not in own])


def _chosen(trial: Trial, name: str, space: Space) -> str:
    if isinstance(space, Choices):
        return str(trial.suggest_categorical(name, space.values))
    if space.whole:
        return str(trial.suggest_int(name, int(space.low), int(space.high), log=space.by_logarithm))
    return f"{trial.suggest_float(name, space.low, space.high, log=space.by_logarithm):.6g}"


def _scores(home: Path) -> list[float]:
    """The scores of a run's validations so far, of its weights or their average, whichever is better."""
    found = [(row, metric) for row in _rows(home) for key, metric in SCORES.items() if key in row]
    return [max(float(row[metric.key]), float(row.get(metric.average_key, 0.0))) for row, metric in found]


def _metric(home: Path) -> str:
    """The name of the metric of a run's scores."""
    return next((metric.name for row in _rows(home) for key, metric in SCORES.items() if key in row), ACCURACY.name)


def _rows(home: Path) -> list[dict[str, Any]]:
    """The rows that a run has logged so far; an unfinished last line is left for the next look."""
    try:
        lines = (home / METRICS).read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop a running trial as Ctrl-C would; it gets time to save, and then is killed."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _require_success(finished: list[FrozenTrial], folder: Path) -> None:
    """Stop the search if every trial fails: the mistake is in the options that all trials share."""
    if len(finished) >= STARTUP and all(trial.state == TrialState.FAIL for trial in finished):
        why = finished[-1].user_attrs.get("why", "")
        raise ConfigError(f"the first {len(finished)} trials failed, the last with: {why}; their logs are in {folder}")


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=DONE)


def _running(study: optuna.Study, folder: Path) -> int:
    """The number of trials that run in other workers; those of dead workers are entered, as complete if they ended."""
    count = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _is_held(_log(folder, trial.number)) or _is_new(trial):
            count += 1
            continue
        home = folder / f"trial-{trial.number}"
        score = max(_scores(home), default=None) if (home / SUMMARY).exists() else None
        with contextlib.suppress(ValueError):  # another worker has just done so
            study.tell(trial.number, score, state=TrialState.FAIL if score is None else TrialState.COMPLETE)
    return count


def _is_held(log: Path) -> bool:
    """Whether a living worker or its training writes the log."""
    try:
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _is_new(trial: FrozenTrial) -> bool:
    begin = trial.datetime_start
    return begin is not None and (datetime.datetime.now(begin.tzinfo) - begin).total_seconds() < BEGINNING


def _log(folder: Path, number: int) -> Path:
    return folder / f"trial-{number}.log.txt"


def _conclude(study: optuna.Study, folder: Path, spaces: Mapping[str, Space], say: Say) -> int:
    """Show the table of all trials, write it as CSV, and write the config of the best one."""
    trials = sorted(_finished(study), key=lambda trial: -(trial.value if trial.value is not None else -1))
    metric = next(
        (_metric(folder / f"trial-{trial.number}") for trial in trials if trial.value is not None), ACCURACY.name
    )
    header = ["trial", metric, "state", "epochs", "seconds", *spaces]
    rows = [
        [
            str(trial.number),
            "" if trial.value is None else f"{trial.value:.2f}",
            trial.state.name.lower(),
            str(trial.user_attrs.get("epochs", "")),
            str(trial.user_attrs.get("seconds", "")),
            *(_shown(trial.params.get(name, "")) for name in spaces),
        ]
        for trial in trials
    ]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([header, *rows])
    writing.replace(folder, TABLE, table.getvalue())
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    say("")
    for row in [header, *rows]:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if not complete:
        say(f"no trial was completed; the logs are in {folder}")
        return 1
    home = folder / f"trial-{complete[0].number}"
    shutil.copyfile(home / CONFIG, folder / BEST)
    say(f"\nbest: trial {complete[0].number}, {complete[0].value:.2f} %, in {home}")
    say(f"train with its options again: falconet train --config {folder / BEST}")
    return 0
