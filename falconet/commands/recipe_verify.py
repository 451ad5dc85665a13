"""`falconet recipe verify`: train a named config again, and compare its accuracy with the recorded one."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from falconet import writing
from falconet.bench.execution import terminated_as_interrupted
from falconet.config import recipes
from falconet.config.commands import RecipeVerifyOptions
from falconet.config.evidence import Evidence, TrainedOnce, evidence_of, in_seconds
from falconet.config.load import Loaded
from falconet.config.tool_options import Recipe
from falconet.errors import ConfigError, Interrupted, WorldError, did_you_mean
from falconet.exits import DONE, FAILED, INTERRUPTED, MISTAKE
from falconet.parallel.host import none_left
from falconet.report import folders
from falconet.report.console import Say, Screen, counted
from falconet.report.run_files import SUMMARY

TRAIN = (sys.executable, "-m", "falconet", "train")


def run(loaded: Loaded[RecipeVerifyOptions]) -> int:
    asked, say = loaded.options.recipe, Screen().line
    name = _known(asked.name)
    recorded = None if asked.record else evidence_of(name)
    if asked.record:
        writing.require_replaceable(asked.record, "--record")
    home = asked.runs if isinstance(asked.runs, Path) else folders.numbered(folders.home("runs"), f"recipe_{name}")
    say(f"{name}: {counted(asked.seeds, 'run')} in {home}")
    with none_left(), terminated_as_interrupted():
        runs = tuple(_trained(asked, name, home, say))
    if asked.record:
        found = evidence_in(name, home, runs)
        writing.replace(asked.record.parent, asked.record.name, found.to_json())
        say(f"{name}: {found.reached()} in {in_seconds(found.seconds)} of training, recorded in {asked.record}")
        return DONE
    assert recorded is not None
    least, mean = recorded.least(len(runs)), statistics.mean(run.accuracy for run in runs)
    say(f"recorded: {recorded.reached()} in {counted(len(recorded.runs), 'run')} on {recorded.device}, {recorded.date}")
    here, there = runs[0].images, recorded.runs[0].images
    if here != there:
        say(f"note: {here:,} images were validated, but {there:,} when it was recorded: the data is different")
    say(f"{'holds' if mean >= least else 'DOES NOT HOLD'}: {mean:.2f} %, expected at least {least:.2f} %")
    return DONE if mean >= least else FAILED


def _known(name: str | None) -> str:
    if name is None:
        raise ConfigError("--name: no recipe given, expected one that `falconet configs` lists")
    known = recipes.all_configs()
    if name not in known:
        raise ConfigError(f"--name: '{name}' is not a named config{did_you_mean(name, known)}")
    return name


def _trained(asked: Recipe, name: str, home: Path, say: Say) -> Iterator[TrainedOnce]:
    """Train with each seed, in a process of its own, as a user would."""
    home.mkdir(parents=True, exist_ok=True)
    for seed in range(asked.seeds):
        folder, log = home / f"seed-{seed}", home / f"seed-{seed}.log"
        words = ["--config", name, "--seed", str(seed), "--run-dir", str(folder), "--device", asked.device]
        words += ["--data-dir", str(asked.data_dir)] if asked.data_dir else []
        began = time.monotonic()
        code = _ended([*TRAIN, *words], log, say)
        if code == INTERRUPTED:
            say(f"stopped; finished runs are in {home}, and the output of the interrupted one in {log}")
            raise Interrupted
        if code:
            last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            if code == MISTAKE:
                raise ConfigError(f"{log}: {last}")
            raise WorldError(f"{folder}: the run ended with exit code {code}: {last}")
        trained = trained_in(folder, seed)
        took = f"{in_seconds(trained.seconds)} of training, {time.monotonic() - began:.0f} s in all"
        say(f"seed {seed}: {trained.accuracy:.2f} %, {took}")
        yield trained


def _ended(words: Sequence[str], log: Path, say: Say) -> int:
    """Run a program and return its exit code; Ctrl-C is passed on to it, so that it saves before it ends."""
    with (
        log.open("w") as out,
        # In a session of its own: a signal reaches it once, from here, whether it was sent to this process or to all.
        subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True) as program,
    ):
        is_stopped = False
        while True:
            try:
                code = program.wait()
            except KeyboardInterrupt:
                if not is_stopped:
                    say("stopping once the run has saved (Ctrl-C again: at once)")
                is_stopped = True
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(program.pid, signal.SIGINT)
            else:
                return INTERRUPTED if is_stopped and code == DONE else code


def trained_in(folder: Path, seed: int) -> TrainedOnce:
    """The results of the run in a folder."""
    summary = json.loads((folder / SUMMARY).read_text())
    accuracy = summary["metrics"].get("validation/accuracy")
    if accuracy is None:
        raise ConfigError(f"--name: {folder} was not validated, so there is nothing to compare")
    images = round(summary["metrics"]["validation/images"])
    # "training_seconds" has tenths, too few for a recipe of a second.
    seconds = round(summary["seconds"]["training"], 3)
    return TrainedOnce(seed=seed, accuracy=round(accuracy, 4), seconds=seconds, images=images)


def evidence_in(name: str, home: Path, runs: tuple[TrainedOnce, ...]) -> Evidence:
    """The evidence of runs; `home`: holds their folders, the first of which names the machine."""
    about = json.loads((home / f"seed-{runs[0].seed}" / SUMMARY).read_text())["environment"]
    on_cpu = about["device"] == "CPU"
    return Evidence(
        recipe=name,
        device=about["processor"] if on_cpu else about["device"],
        versions={library: about[library] for library in ("Falconet", "PyTorch")},
        date=about["started"].split()[0],
        command=f"falconet recipe verify {name} --seeds {len(runs)}",
        runs=runs,
    )
