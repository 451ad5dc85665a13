"""`falconet watch`: follow runs as they go, on the terminal or as a page."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
import webbrowser
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from falconet.bench.execution import terminated_as_interrupted
from falconet.config.commands import WatchOptions
from falconet.config.load import Loaded
from falconet.config.tool_options import Watch
from falconet.exits import DONE
from falconet.report import dashboard, epoch_lines, folders, gpu_driver
from falconet.report.console import NOTICE, Lines, Screen
from falconet.report.dashboard import Place
from falconet.report.followed_runs import RUNS, FollowedFolder, FollowedRun, what_is_there
from falconet.report.pages import live_server
from falconet.report.pages.live_site import Site

LEAST_SECONDS = 1.0  # between two looks
SHARE = 10  # times as long as a look took, so that looking takes a tenth of a core at most
STOP = "\x1a"  # Ctrl-Z
FOOT = "q or Ctrl-C leaves"


def run(loaded: Loaded[WatchOptions]) -> int:
    options = loaded.options.watch
    folder, console = options.source or folders.home(RUNS), Lines(highlight=False, soft_wrap=True)
    with terminated_as_interrupted():  # so that the terminal is restored
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
    """Print a line per epoch as it comes, for a pipe or a file; a single run is followed to its end."""
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
    """Draw a dashboard on a screen of its own; its last lines stay on the terminal."""
    followed, frame = what_is_there(folder), list[Text]()  # a mistake is answered before the screen is cleared
    NOTICE.end()
    try:
        with _Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while not console.is_closed:
                began = time.monotonic()
                followed = what_is_there(folder) if isinstance(followed, str) else followed
                frame = _frame(followed, folder, console, rows=console.height - 2)
                live.update(Group(*frame, Text(), Text(_foot(followed)[: console.width], style="dim")), refresh=True)
                # As of the last look: a run that has ended since is shown once more, as it ended.
                if isinstance(followed, FollowedRun) and followed.run is not None and followed.run.state == "done":
                    break
                typed = keys.pressed(_pause(began))
                if "q" in typed.lower():
                    break
                if STOP in typed:
                    live.stop()
                    keys.stop()
                    live.start()
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


def _foot(followed: FollowedRun | FollowedFolder | str) -> str:
    """The last line: how to leave, and a reminder that the runs continue."""
    if isinstance(followed, str):
        return FOOT
    watched = [followed] if isinstance(followed, FollowedRun) else followed.runs.values()
    going = sum(each.run is not None and each.run.state == "going" for each in watched)
    return FOOT if not going else f"{FOOT}; the run goes on" if going == 1 else f"{FOOT}; the runs go on"


def _pause(began: float) -> float:
    return max(LEAST_SECONDS, SHARE * (time.monotonic() - began))


class _Keys:
    """The keys that are typed on a terminal, including Ctrl-Z if it arrives as a signal."""

    def __enter__(self) -> Self:
        self._handle = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._modes = None if self._handle is None else termios.tcgetattr(self._handle)
        self._heard, self._told = os.pipe()
        self._before = signal.getsignal(signal.SIGTSTP)
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()
        os.close(self._heard)
        os.close(self._told)

    def pressed(self, seconds: float) -> str:
        """The keys that are typed within some seconds."""
        # Not sys.stdin.read, which would keep what else was typed where select does not see it.
        inputs = [self._heard, *([] if self._handle is None else [self._handle])]
        return "".join(
            os.read(each, 1024).decode(errors="replace") for each in select.select(inputs, [], [], seconds)[0]
        )

    def stop(self) -> None:
        """Stop this process, with the terminal as it was; returns when `fg` continues it."""
        self._leave()
        signal.raise_signal(signal.SIGTSTP)
        self._take()  # after `bg` the system stops a process here

    def _take(self) -> None:
        if self._before != signal.SIG_IGN:  # else the shell has no jobs, and would not let it go on
            signal.signal(signal.SIGTSTP, lambda *_: os.write(self._told, STOP.encode()))
        if self._handle is not None:
            tty.setcbreak(self._handle)  # Ctrl-C still interrupts

    def _leave(self) -> None:
        signal.signal(signal.SIGTSTP, self._before)
        if self._handle is not None and self._modes is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._handle, termios.TCSADRAIN, self._modes)
