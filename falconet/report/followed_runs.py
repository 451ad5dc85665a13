"""Runs that are followed while they train, perhaps in another process: each look reads only what is new."""

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from falconet.config.fields import PHOTO_SUFFIXES
from falconet.errors import DataError, path_near
from falconet.report import folders
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
RUNS = "runs"  # where new run folders go by default
MOST_SEEN, DEEPEST = 2000, 2  # names that are looked at for photos, and folders below the one given


class FollowedRun:
    """One run; `run` is its state at the last look."""

    def __init__(self, folder: Path, read: Callable[[ForeignFolder], RunFiles] = read_progress) -> None:
        self.folder = folder
        self.run: RunFiles | None = None
        self._read, self._known = read, dict[str, Known]()
        self._marks: tuple[Mark | bool | None, ...] = ()

    def look(self) -> RunFiles:
        """Read the current state; the same object if nothing has changed. DataError if the run is gone."""
        with opened(self.folder, self._known) as files:
            locked = files.is_locked()
            marks = (*map(files.mark, FOLLOWED), locked)
            if self.run is None or marks != self._marks or locked is None:  # then the time decides whether it runs
                self.run, self._marks = self._read(files), marks
            return self.run


class FollowedFolder:
    """The runs in a folder, by name; new ones appear, removed ones disappear."""

    def __init__(self, folder: Path, read: Callable[[ForeignFolder], RunFiles] = read_progress) -> None:
        self.folder, self.runs = folder, dict[str, FollowedRun]()
        self.left_out = 0  # older runs
        self._read = read

    def look(self) -> dict[str, RunFiles]:
        """Read the runs, newest first. DataError if the folder is gone."""
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
    """A run, a folder of runs, or a line that says what is awaited; DataError if no run can appear there."""
    try:
        if not folder.exists():
            if folder == folders.home(RUNS):  # the first run makes it
                return f"{folder} does not exist yet"
            meant = path_near(folder, folders.home(RUNS))
            raise DataError(f"{folder}: no such folder; expected a run folder, or a folder of runs{meant}")
        if folder.is_file():
            raise DataError(f"{folder}: a file; expected a run folder, or a folder of runs")
        with ForeignFolder(folder) as files:
            if is_run(files):
                return FollowedRun(folder)
            names = files.names(".")
        followed = FollowedFolder(folder)
        if followed.look():
            return followed
        if photo := _photo_in(folder):
            raise DataError(
                f"{folder}: holds photos, such as {photo}, and no run; expected a run folder, or a folder of runs"
            )
        strange = [each.name for each in folder.iterdir() if each.name not in names and not each.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}; expected a run folder, or a folder of runs") from error
    if strange:
        raise DataError(f"{folder}: not a run folder, nor are there runs in it; expected {CONFIG} and {METRICS}")
    return f"there is no run in {folder} yet"


def _photo_in(folder: Path) -> str | None:
    """A photo in a folder or up to two levels below it, which shows that it is no folder of runs."""
    waiting, seen = [(str(folder), 0)], 0
    while waiting and seen < MOST_SEEN:
        place, depth = waiting.pop(0)
        # If one cannot be read, or is removed meanwhile, the others still count.
        with contextlib.suppress(OSError), os.scandir(place) as found:
            for each in itertools.islice(found, MOST_SEEN):
                seen += 1
                if each.is_dir(follow_symlinks=False) and depth < DEEPEST and not each.name.startswith("."):
                    waiting.append((each.path, depth + 1))
                elif each.name.lower().endswith(PHOTO_SUFFIXES):
                    return os.path.relpath(each.path, folder)
    return None
