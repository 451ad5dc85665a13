"""Runs that are looked at again and again, in this process or another's: of their files only what is new is read."""

import os
from collections.abc import Callable
from pathlib import Path

from falconet.errors import DataError
from falconet.report.foreign_folder import ForeignFolder, Known, Mark
from falconet.report.run_files import (
    ANSWERS,
    CHECKPOINTS,
    CONFIG,
    ENDED,
    ENVIRONMENT,
    LAYERS,
    MEMORY,
    METRICS,
    PLAN,
    PROFILE,
    SEEN,
    SUMMARY,
    TIMES,
    VALIDATED,
    RunFiles,
    is_run,
    opened,
    read_progress,
)

FOLLOWED = (
    *(METRICS, TIMES, SUMMARY, CONFIG, PLAN, VALIDATED, CHECKPOINTS),
    *(ANSWERS, SEEN, LAYERS, ENVIRONMENT, MEMORY, ENDED, PROFILE),
)
MOST_RUNS = 500  # of a folder, the newest


class FollowedRun:
    """One run; `run`: what was last read of it."""

    def __init__(self, folder: Path, read: Callable[[ForeignFolder], RunFiles] = read_progress) -> None:
        self.folder = folder
        self.run: RunFiles | None = None
        self._read, self._known = read, dict[str, Known]()
        self._marks: tuple[Mark | bool | None, ...] = ()

    def look(self) -> RunFiles:
        """The run as it is now; the same object if nothing has changed. DataError if it is gone."""
        with opened(self.folder, self._known) as files:
            locked = files.is_locked()
            marks = (*map(files.mark, FOLLOWED), locked)
            if self.run is None or marks != self._marks or locked is None:  # without locks, time tells if it goes
                self.run, self._marks = self._read(files), marks
            return self.run


class FollowedFolder:
    """The runs in a folder, by name; new ones appear, and those that are removed go."""

    def __init__(self, folder: Path, read: Callable[[ForeignFolder], RunFiles] = read_progress) -> None:
        self.folder, self.runs = folder, dict[str, FollowedRun]()
        self.left_out = 0  # older runs
        self._read = read

    def look(self) -> dict[str, RunFiles]:
        """The runs, the newest first. DataError if the folder is gone."""
        try:
            with os.scandir(self.folder) as found:
                names = [each.name for each in found if each.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise DataError(f"{self.folder}: {error.strerror or error}; expected a folder of runs") from error
        self.runs = {name: self.runs.get(name) or FollowedRun(self.folder / name, self._read) for name in names}
        seen = {}
        for name, followed in self.runs.items():
            try:
                seen[name] = followed.look()
            except DataError:  # not a run, or not yet
                continue
        newest = sorted(seen, key=lambda name: (seen[name].state == "going", seen[name].written or 0.0, name))
        self.left_out = max(0, len(newest) - MOST_RUNS)
        return {name: seen[name] for name in reversed(newest[self.left_out :])}


def what_is_there(folder: Path) -> FollowedRun | FollowedFolder | str:
    """A run, a folder of runs, or the words for what is waited for; DataError if nothing can come of it."""
    try:
        if not folder.exists():
            if folder.absolute().parent.is_dir():
                return f"{folder} does not exist yet"
            raise DataError(
                f"{folder}: no such folder, nor the one above it; expected a run folder, or a folder of runs"
            )
        with ForeignFolder(folder) as files:
            if is_run(files):
                return FollowedRun(folder)
            names = files.names(".")
        followed = FollowedFolder(folder)
        if followed.look():
            return followed
        strange = [each.name for each in folder.iterdir() if each.name not in names and not each.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}; expected a run folder, or a folder of runs") from error
    if strange:
        raise DataError(f"{folder}: not a run folder, nor are there runs in it; expected {CONFIG} and {METRICS}")
    return f"there is no run in {folder} yet"
