"""Everything in a folder of photos that is not one: hidden files, other formats, links and pipes."""

import os
import stat
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from falconet.data.image_files import kind
from falconet.data.index import FOLDER
from falconet.data.sources import folder
from falconet.report.console import counted

MOST_NAMED = 5  # per kind


@dataclass
class Unlisted:
    """What training passes over."""

    hidden: int = 0  # files and folders whose names start with a dot, and what systems leave behind
    endings: Counter[str] = field(default_factory=Counter)  # of files whose names are not those of photos
    odd: list[str] = field(default_factory=list)  # pipes, devices, links to folders, folders that cannot be listed

    def lines(self) -> list[str]:
        """One line for each kind."""
        lines = []
        if self.hidden:
            lines.append(f"{counted(self.hidden, 'hidden name')} passed over")
        if self.endings:
            shown = _most(self.endings)
            kinds = ", ".join(f"{count:,} {ending or 'without an ending'}" for ending, count in shown)
            more = self.endings.total() - sum(count for _, count in shown)
            kinds += f" and {more:,} of other kinds" if more else ""
            lines.append(f"{counted(self.endings.total(), 'other file')} passed over: {kinds}")
        lines += self.odd[:MOST_NAMED]
        if len(self.odd) > MOST_NAMED:
            lines.append(f"and {len(self.odd) - MOST_NAMED:,} more pipes, devices, links or closed folders")
        return lines


def _most(endings: Counter[str]) -> list[tuple[str, int]]:
    return sorted(endings.items(), key=lambda each: (-each[1], each[0]))[:MOST_NAMED]


def unlisted(root: Path, *, classes_in: Collection[Path] = ()) -> Unlisted:
    """Look through a folder without following links. `classes_in`: folders in which a link to a folder is a class."""
    found, photos = Unlisted(), folder.image_extensions()
    waiting = [str(root)]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.name == FOLDER:
                        continue
                    if entry.name.startswith(".") or entry.name in folder.CLUTTER:
                        found.hidden += 1
                    elif entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif not folder.is_file(entry):
                        _note(entry, found, may_be_linked=Path(place) in classes_in)
                    elif (ending := os.path.splitext(entry.name)[1].lower()) not in photos:  # noqa: PTH122
                        found.endings[ending] += 1
        except OSError as error:
            found.odd.append(f"{place}: cannot be listed ({error.strerror})")
    return found


def _note(entry: "os.DirEntry[str]", found: Unlisted, *, may_be_linked: bool) -> None:
    try:
        mode = entry.stat().st_mode  # the target's, for a link
    except OSError:
        return  # a broken link: if it is named like a photo, it is a missing one
    link = "a link to " if entry.is_symlink() else ""
    if not (may_be_linked and stat.S_ISDIR(mode)):
        found.odd.append(f"{entry.path}: passed over, {link}{kind(mode)}")
