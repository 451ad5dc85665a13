"""Run benchmarks: every variant, repeated, measured and summarised."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from falconet.bench import execution
from falconet.bench.measurements import REGEXP_SECONDS, Measured, measure
from falconet.bench.results import Result, summarise
from falconet.bench.spec import Benchmark
from falconet.config.recipes import values_of
from falconet.report.console import Say

LONGEST = 200  # characters in a folder's name; file systems allow 255
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.S)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One variant of a benchmark, ready to start."""

    benchmark: Benchmark
    parameters: Mapping[str, str]
    command: execution.Command

    @property
    def name(self) -> str:
        values = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.benchmark.name}[{values}]" if values else self.benchmark.name

    @property
    def devices(self) -> int:
        return devices_needed(self.command.argv)


@dataclass(frozen=True, kw_only=True)
class Routine:
    """The settings with which every benchmark is run."""

    repeat: int
    folder: Path  # for logs and run folders
    here: int  # devices in this machine
    timeout: float | None = None  # seconds
    stop_on_error: bool = False
    profiled: bool = False
    echo: Say = lambda _: None


def prepare(benchmarks: Sequence[Benchmark], *, wandb: bool, profile: bool, note: Say) -> list[Job]:
    """Prepare every variant of every benchmark, so that mistakes in commands show before anything runs."""
    notes: dict[str, None] = {}
    jobs = [
        Job(
            benchmark=benchmark,
            parameters=parameters,
            command=execution.build_command(benchmark, parameters, wandb=wandb, profile=profile, note=notes.setdefault),
        )
        for benchmark in benchmarks
        for parameters in benchmark.variants
    ]
    ignored = dict.fromkeys(key for benchmark in benchmarks for key in benchmark.ignored)
    if ignored:
        notes[f"note: ignored {', '.join(ignored)} in the spec; nothing is installed or prepared here"] = None
    notes |= {f"note: {line}": None for benchmark in benchmarks for line in benchmark.notes}
    for line in notes:
        note(line)
    return jobs


def run_all(jobs: Sequence[Job], routine: Routine, say: Say) -> Iterator[Result]:
    """Run the jobs one by one and yield their results; stop after an interruption."""
    for number, (job, place) in enumerate(zip(jobs, _places(jobs), strict=True), start=1):
        say(f"[{number}/{len(jobs)}] {job.name}: {job.command.shown()}")
        if job.devices > routine.here:
            say(f"  needs {job.devices} devices, {routine.here} here: runs folded and is marked as such")
        result = _run(job, replace(routine, folder=routine.folder / place), say)
        if result.status == "failed":
            say(f"  FAILED: {result.reason}")
        yield result
        if result.status == "interrupted" or (result.status == "failed" and routine.stop_on_error):
            return


def _run(job: Job, routine: Routine, say: Say) -> Result:
    measured: list[Measured] = []
    facts: dict[str, Any] = {
        "name": job.name,
        "command": job.command.shown(),
        "devices": job.devices,
        "profiled": routine.profiled and "--profile" in job.command.argv,
        "output": job.benchmark.output,
        "parameters": job.parameters,
    }
    for number in range(1, routine.repeat + 1):
        home = routine.folder / f"run{number}"
        timeout = min(filter(None, (routine.timeout, job.benchmark.timeout)), default=None)
        ended = execution.run(
            job.command, runs=home / "runs", log=home / "output.log", timeout=timeout, echo=routine.echo
        )
        if ended.unlogged:
            say(f"  {home / 'output.log'} is incomplete: {ended.unlogged}")
        found = measure(job.benchmark, job.parameters, ended, home / "runs")
        if ended.stopped == "interrupted":
            return summarise(measured or [found], status="interrupted", reason=f"interrupted in run {number}", **facts)
        reason = _why_failed(job, ended, found, timeout)
        if reason:
            return summarise(measured, status="failed", reason=reason, **facts)
        measured.append(found)
        say(f"  run {number}/{routine.repeat}: {_words(found)}")
    return summarise(measured, status="passed", **facts)


def _why_failed(job: Job, ended: execution.Ended, found: Measured, timeout: float | None) -> str:
    """The reason, or an empty string if it passed."""
    if ended.stopped == "timeout":
        return f"timed out after {timeout:g} s; its last line: {ended.last_line}"
    if ended.code:
        return f"exit code {ended.code}: {ended.last_line}"
    if found.given_up:
        names = ", ".join(found.given_up)
        return f"gave up on the regexp of {names} after {REGEXP_SECONDS:g} s; expected one without nested repetition"
    missing = [name for name in job.benchmark.metrics if name not in found.metrics]
    if missing:
        return f"no line matches the regexp of {', '.join(missing)}"
    for name, value in found.metrics.items():
        if not math.isfinite(value) or (name == "throughput" and value <= 0):
            return f"{name} is {value:g}"
    missing = [name for name in job.benchmark.derived if name not in found.metrics]
    if missing:
        return f"cannot compute {', '.join(missing)}"
    return "" if found.metrics else "finished, but measured nothing"


def _words(found: Measured) -> str:
    if found.throughput is None:
        return ", ".join(f"{name} {value:g}" for name, value in found.metrics.items())
    dropped = f"{found.steady.first} of {found.steady.first + len(found.samples)} measurements dropped as warm-up"
    return f"{found.throughput:,.1f} images/s ({dropped}, {found.steady.verdict})"


def _places(jobs: Sequence[Job]) -> list[str]:
    """A unique folder name for each job."""
    taken: dict[str, int] = {}
    places = []
    for job in jobs:
        plain = re.sub(r"[^A-Za-z0-9_.=-]+", "_", job.name).strip("_.")[:LONGEST] or "benchmark"
        taken[plain] = taken.get(plain, 0) + 1
        places.append(plain if taken[plain] == 1 else f"{plain}~{taken[plain]}")
    return places


def devices_needed(argv: Sequence[str]) -> int:
    """Replicas times stages (or shards) that a command line, its launcher or its named config asks for."""
    options = _options(argv)
    predicts = {"infer", "serve"} & set(argv) or any(word.endswith("run_benchmark.py") for word in argv)
    config = values_of((options.get("config") or [""])[0], use="bench infer" if predicts else "train")
    if "num-replicas" in options:  # poprun
        return _number(options, "num-replicas") * _number(options, "ipus-per-replica")
    for processes in ("nproc-per-node", "np", "n"):  # torchrun, mpirun
        if processes in options and argv[0] in ("torchrun", "mpirun", "mpiexec", "srun"):
            return _number(options, processes)
    replicas = _number(options, "replicas") if "replicas" in options else _stored(config, "replicas")
    return replicas * _stages(options, config)


def _options(argv: Sequence[str]) -> dict[str, list[str]]:
    """Every option with its values; the last one wins."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv:
        match = _OPTION.fullmatch(word)
        if match:
            values = found[match[1].replace("_", "-")] = [] if match[2] is None else [match[2]]
        else:
            values.append(word)
    return found


def _stages(options: Mapping[str, list[str]], config: Mapping[str, object]) -> int:
    if "shards" in options:  # the TensorFlow program's name
        return _number(options, "shards")
    splits: object = options.get("pipeline-splits", options.get("pipeline-split", config.get("pipeline-splits", [])))
    names = splits if isinstance(splits, list) else [splits]
    if names and str(names[0]).startswith("auto:"):
        return max(1, _whole(str(names[0]).removeprefix("auto:")))
    return len(names) + 1


def _number(options: Mapping[str, list[str]], name: str) -> int:
    return _whole((options.get(name) or ["1"])[0])


def _stored(config: Mapping[str, object], name: str) -> int:
    return _whole(str(config.get(name, "1")))


def _whole(text: str) -> int:
    """The text as a whole number; 1 for anything else, which the command itself will report."""
    return int(text) if text.isascii() and text.isdecimal() else 1
