"""`falconet watch`: follow runs as they go, on the terminal or as a page."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from falconet.bench.execution import terminated_as_interrupted
from falconet.config.commands import WatchOptions
from falconet.config.load import Loaded
from falconet.config.options import Watch
from falconet.exits import DONE
from falconet.report import dashboard, epoch_lines, folders, gpu_driver, live_server
from falconet.report.console import NOTICE, Lines, Screen
from falconet.report.dashboard import Place
from falconet.report.followed_runs import FollowedFolder, FollowedRun, what_is_there
from falconet.report.live_site import Site

LEAST_SECONDS = 1.0  # between two looks
SHARE = 10  # times as long as a look took, so that looking takes a tenth of a core at most
FOOT = "q or Ctrl-C leaves; the run goes on"


def run(loaded: Loaded[WatchOptions]) -> int:
    options = loaded.options.watch
    folder, console = options.source or folders.home("runs"), Lines(highlight=False, soft_wrap=True)
    with terminated_as_interrupted():  # so that the terminal is put in order
        if options.page:
            return _serve(folder, options)
        if not console.is_terminal or console.is_dumb_terminal:
            return _print(folder, console)
        return _draw(folder, console)


def _serve(folder: Path, options: Watch) -> int:
    """Answer a browser until Ctrl-C."""
    site, say = Site(folder), Screen().line
    with live_server.listening(site, options.port) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        say(f"watching {folder} at {url}; Ctrl-C stops")
        if options.browser and not webbrowser.open(url):
            say("note: --browser: there is no browser here")
        server.serve_forever(poll_interval=0.2)
    return DONE


def _print(folder: Path, console: Lines) -> int:
    """A line per epoch as it comes, for a pipe or a file; until a single run has ended."""
    screen, waiting = Screen(console), ""
    while isinstance(followed := what_is_there(folder), str):
        if followed != waiting:
            screen.line(f"waiting: {followed}")
            waiting = followed
        time.sleep(LEAST_SECONDS)
    told = epoch_lines.Told(where=folder)
    while not console.is_closed:
        began = time.monotonic()
        runs = followed.look() if isinstance(followed, FollowedFolder) else {"": followed.look()}
        for line in told.lines(runs):
            screen.line(line)
        if isinstance(followed, FollowedRun) and runs[""].state != "going":
            break
        time.sleep(_pause(began))
    return DONE


def _draw(folder: Path, console: Lines) -> int:
    """A dashboard, on a screen of its own; what it showed last stays on the terminal."""
    followed, frame = what_is_there(folder), list[Text]()  # a mistake is answered before the screen is cleared
    NOTICE.end()
    try:
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            while not console.is_closed:
                began = time.monotonic()
                followed = what_is_there(folder) if isinstance(followed, str) else followed
                frame = _frame(followed, folder, console, rows=console.height - 2)
                live.update(Group(*frame, Text(), Text(FOOT[: console.width], style="dim")), refresh=True)
                if isinstance(followed, FollowedRun) and followed.look().state == "done":
                    break
                if "q" in pressed(_pause(began)).lower():
                    break
    finally:
        for line in frame:
            console.print(line, soft_wrap=False, no_wrap=True, overflow="ignore", crop=False)
    return DONE


def _frame(followed: FollowedRun | FollowedFolder | str, folder: Path, console: Console, *, rows: int) -> list[Text]:
    place = Place(width=console.width, height=rows, has_unicode=console.encoding == "utf-8")
    if isinstance(followed, str):
        return [Text(f"waiting: {followed}", style="yellow")]
    if isinstance(followed, FollowedFolder):
        return dashboard.runs_lines(followed.look(), place, where=folder, left_out=followed.left_out)
    return dashboard.run_lines(followed.look(), place, where=folder, gauges=gpu_driver.gauges())


def _pause(began: float) -> float:
    return max(LEAST_SECONDS, SHARE * (time.monotonic() - began))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key, and returns it."""
    if not (sys.stdin and sys.stdin.isatty()):

        def slept(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield slept
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)

    def pressed(seconds: float) -> str:
        # Not sys.stdin.read, which would keep what else was typed where select does not see it.
        return os.read(handle, 1024).decode(errors="replace") if select.select([handle], [], [], seconds)[0] else ""

    try:
        tty.setcbreak(handle)  # Ctrl-C still interrupts
        yield pressed
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
