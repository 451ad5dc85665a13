"""`falconet bench`: run benchmark specs, and compare with an earlier run."""

import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import falconet
from falconet import writing
from falconet.bench import results, runner
from falconet.bench.spec import builtin_specs, find_spec, read_spec, select
from falconet.config.commands import BenchOptions
from falconet.config.load import Loaded
from falconet.config.tool_options import Bench
from falconet.errors import ConfigError, named_option
from falconet.exits import DONE, FAILED, INTERRUPTED, SLOWER
from falconet.parallel import host
from falconet.report.console import Screen, counted

# torch is imported where it is used, so that an unknown spec is reported without it.
DEFAULT = "./benchmarks.yml"
RESULTS = ("results.json", "results.csv", "results.md", "comparison.md")


def run(loaded: Loaded[BenchOptions]) -> int:
    options, screen = loaded.options.bench, Screen()
    with named_option("compare"):
        old = results.read(options.compare) if options.compare else None
    with named_option("spec"):
        paths = [find_spec(name) for name in _specs(options)]
    every = [benchmark for path in paths for benchmark in read_spec(path)]
    with named_option("benchmark"):
        chosen = select(every, options.benchmark, convergence=options.include_convergence)
    if not chosen:
        raise ConfigError("--spec: all benchmarks train to an accuracy; add --include-convergence to run them")
    jobs = runner.prepare(chosen, wandb=options.allow_wandb, profile=options.profile, note=screen.line)
    if options.plan:
        _show_plan(jobs, screen)
        return DONE
    folder = _open_folder(options)
    measured = _measure(jobs, options, folder, screen)
    _show(measured, len(jobs) - len(measured), options, folder, screen)
    slower = _compare(old, measured, options, folder, screen) if old else False
    if any(result.status == "interrupted" for result in measured):
        return INTERRUPTED
    return FAILED if any(result.status == "failed" for result in measured) else SLOWER if slower else DONE


def machine() -> dict[str, object]:
    """The hardware and the versions that results depend on."""
    import torch

    from falconet.parallel import world

    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] if cuda else []
    return {
        "devices": ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)),
        "processor": host.processor(),
        "cores": world.cores(),
        "falconet": falconet.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def devices_here() -> int:
    """Processes that can run at the same time: one per CUDA device, or as many as the trainer allows on a CPU."""
    import torch

    from falconet.parallel import world
    from falconet.parallel.division import PROCESSES_PER_CORE

    return torch.cuda.device_count() if torch.cuda.is_available() else PROCESSES_PER_CORE * world.cores()


def _specs(options: Bench) -> tuple[str, ...]:
    if options.spec:
        return options.spec
    if not Path(DEFAULT).exists():
        raise ConfigError(f"required, because there is no {DEFAULT}: a file, or one of {', '.join(builtin_specs())}")
    return (DEFAULT,)


def _open_folder(options: Bench) -> Path:
    """The folder for the results, created and writable, as an absolute path: commands run in other folders."""
    asked = options.log_dir
    folder = Path("bench-results", time.strftime("%Y%m%d-%H%M%S")) if asked == "auto" else asked
    if (folder / "results.json").exists():
        raise ConfigError(f"--log-dir: {folder} already holds results; expected another folder")
    with writing.explained(f"to {folder}", option="--log-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        writing.probe(folder)
        writing.refuse_links(folder, RESULTS)
    return folder.resolve()


def _measure(jobs: Sequence[runner.Job], options: Bench, folder: Path, screen: Screen) -> list[results.Result]:
    """Run all jobs; the results are written after each of them."""
    routine = runner.Routine(
        repeat=options.repeat,
        folder=folder,
        here=devices_here(),
        timeout=options.timeout,
        stop_on_error=options.stop_on_error,
        profiled=options.profile,
        echo=screen.line if options.show_output else lambda _: None,
    )
    measured: list[results.Result] = []
    about = machine()
    for result in runner.run_all(jobs, routine, screen.line):
        measured.append(result)
        _write(measured, about, options, folder)
    return measured


def _write(measured: Sequence[results.Result], about: dict[str, object], options: Bench, folder: Path) -> None:
    every = results.metric_names(measured) if options.additional_metrics else []
    names = list(dict.fromkeys([*every, *options.csv_metrics]))
    with writing.explained(f"to {folder}", option="--log-dir"):
        results.write(folder / "results.json", measured, about)
        results.write_csv(folder / "results.csv", measured, metrics=names)
        writing.replace(folder, "results.md", results.markdown(measured, about))


def _show(measured: Sequence[results.Result], left: int, options: Bench, folder: Path, screen: Screen) -> None:
    """Print the tables; `left`: benchmarks that were not run."""
    screen.line("")
    unknown = [name for name in options.csv_metrics if name not in results.metric_names(measured)]
    if unknown:
        screen.line(f"note: --csv-metrics: nothing measured {', '.join(unknown)}; the columns are empty")
    text = (folder / "results.md").read_text(encoding="utf-8")
    for line in results.plain_table(text):
        screen.line(line)
    for line in text.splitlines():
        if line.startswith("- "):
            screen.line(line)
    passed = sum(result.status == "passed" for result in measured)
    summary = f"{passed} of {len(measured) + left} passed" + (f", {left} not run" if left else "")
    screen.line(f"{summary}; written to {folder}: results.json, results.csv, results.md")


def _compare(
    old: tuple[Mapping[str, results.Result], Mapping[str, object]],
    measured: Sequence[results.Result],
    options: Bench,
    folder: Path,
    screen: Screen,
) -> bool:
    """Print the changes; returns whether any benchmark lost more than the margin."""
    earlier, there = old
    comparisons = list(results.compare(earlier, measured))
    text = results.comparison_markdown(comparisons, margin=options.margin)
    writing.replace(folder, "comparison.md", text)
    screen.line("")
    here = machine()
    other = [name for name in ("devices", "processor", "cores") if there.get(name) != here[name]]
    if other:
        screen.line(f"note: {options.compare} was measured on another machine ({', '.join(other)} differ)")
    for line in results.plain_table(text):
        screen.line(line)
    lost = [one.name for one in comparisons if one.loses_more_than(options.margin)]
    if lost:
        screen.line(f"slower by more than {options.margin:g} %: {', '.join(lost)}")
    return bool(lost)


def _show_plan(jobs: Sequence[runner.Job], screen: Screen) -> None:
    here = devices_here()
    for job in jobs:
        folded = f"; {here} here, so it would be folded" if job.devices > here else ""
        screen.line(f"{job.name}: {counted(job.devices, 'device')}{folded}")
        screen.line(f"  {job.command.shown()}")
