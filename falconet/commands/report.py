"""`falconet report`: write a page about one run, or about several side by side."""

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from falconet import writing
from falconet.config.commands import ReportOptions
from falconet.config.load import Loaded
from falconet.errors import ConfigError, DataError, LinkError, printable
from falconet.report import plots
from falconet.report.console import Screen
from falconet.report.curves import csv_lines
from falconet.report.pages import run_page
from falconet.report.run_files import METRICS, REPORT, RESULTS, RunFiles, read_run


def run(loaded: Loaded[ReportOptions]) -> int:
    options, say = loaded.options.report, Screen().line
    runs = _read(options.runs, say)
    is_own = len(options.runs) == 1 and options.output is None
    target = options.output or (options.runs[0] / REPORT if is_own else Path(REPORT))
    try:
        if options.output is not None:  # named by the user, so it may be a link
            target.write_text(run_page.page(runs), encoding="utf-8")
        else:
            writing.replace(target.parent, target.name, run_page.page(runs))
        table = _table_beside(target, is_own=is_own, runs=runs)
        if table is not None:
            writing.replace(table.parent, table.name, "".join(f"{line}\n" for line in csv_lines(*runs)))
        drawn = plots.save(runs, target.parent) if options.save_plots else []
    except LinkError as error:
        raise LinkError(error.path, "--output") from None
    except OSError as error:
        raise ConfigError(f"--output: cannot write {error.filename or target}: {error.strerror or error}") from error
    for each in runs:
        for problem in each.problems:
            say(f"note: {problem}")
    say(f"written to {target}" + (f" and {table}" if table else ""))
    if drawn:
        say(f"{len(drawn)} plots written to {target.parent / plots.FOLDER}")
    return 0


def _table_beside(target: Path, *, is_own: bool, runs: Sequence[RunFiles]) -> Path | None:
    """The path of the table of all epochs: the run's own, or that of several runs, named after their page.

    None: no table. A page elsewhere does not replace a run's table, and a page that is not a file has none.
    """
    if is_own:
        return target.parent / RESULTS
    table = target.with_suffix(".csv")
    is_a_runs = (target.parent / METRICS).exists()
    return table if len(runs) > 1 and target.is_file() and table != target and not is_a_runs else None


def _read(folders: Sequence[Path], say: Callable[[str], None]) -> list[RunFiles]:
    """Read the runs; if there are several, folders that are not runs are noted and left out."""
    found = dict[Path, RunFiles]()
    for folder in folders:
        try:
            found[folder.resolve()] = read_run(folder)
        except DataError as error:
            told = f"{error}{_such(folder)}"
            if len(folders) == 1:
                raise DataError(told) from None
            say(f"left out: {told}")
    if not found:
        raise DataError("none of these is a run folder; expected those that `falconet train` makes")
    return [replace(run, name=_name_among(found, folder)) for folder, run in found.items()]


def _such(folder: Path) -> str:
    """`, such as runs/first` for a folder of runs; it looks at few entries, because there may be a million photos."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        inside = sorted(each.name for each in itertools.islice(found, 1000))
        return next((f", such as {folder / each}" for each in inside if (folder / each / METRICS).is_file()), "")
    return ""


def _name_among(folders: Collection[Path], folder: Path) -> str:
    """The shortest end of a folder's path that no other has: `run`, or `monday/run` beside `tuesday/run`."""
    lengths = range(1, len(folder.parts) + 1)
    ends = (folder.parts[-length:] for length in lengths)
    own = next(end for end in ends if sum(each.parts[-len(end) :] == end for each in folders) == 1)
    return printable(str(Path(*own)))
