"""The pages of `falconet watch`: the report of a run or a table of runs, and later changes to them."""

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from falconet.errors import DataError
from falconet.report.console import counted
from falconet.report.curves import charts_of
from falconet.report.dashboard import short_state
from falconet.report.epochs import in_short, rate
from falconet.report.followed_runs import FollowedFolder, FollowedRun, what_is_there
from falconet.report.pages import run_page
from falconet.report.pages.charts import curves_section, figures, numbers_part
from falconet.report.pages.document import document
from falconet.report.pages.live_server import Answer
from falconet.report.pages.parts import Cell, Column, inert, table
from falconet.report.pages.sections import TITLES, sections_of
from falconet.report.progress import left_in_words, progress_of, state_in_words
from falconet.report.results import MIXED, about_of, best_of, is_mixed, last_of
from falconet.report.run_files import RunFiles, read_all

LEAST_SECONDS = 1.0  # between two looks at the files, however many pages are open
NEWS = "live.json"  # the path, beside a page, that tells what is new in it
RUNS = "run"  # the path of the runs of a folder
Parts = Mapping[str, object]  # `html/NAME` and `data/NAME`, as JSON has them


class Versions:
    """The parts of a page, and when each of them last changed."""

    def __init__(self, kind: str) -> None:
        self._kind = f"{kind}-{secrets.token_hex(4)}"  # another start, or another kind of page, shares no part
        self._number, self._parts = 0, dict[str, tuple[object, int]]()

    @property
    def name(self) -> str:
        return f"{self._kind}-{self._number}"

    @property
    def parts(self) -> Parts:
        return {name: value for name, (value, _) in self._parts.items()}

    def take(self, parts: Parts) -> None:
        new = {name: value for name, value in parts.items() if self._parts.get(name, (None, 0))[0] != value}
        if new:
            self._number += 1
            self._parts |= {name: (value, self._number) for name, value in new.items()}

    def news(self, since: str) -> dict[str, object] | None:
        """The changes since a version; None: nothing changed. If the version is not ours, the page must be reloaded."""
        kind, _, number = since.rpartition("-")
        if kind != self._kind or not number.isdecimal():
            return {"reload": True}
        if int(number) == self._number:
            return None
        changed = {name: value for name, (value, at) in self._parts.items() if at > int(number)}
        return {"version": self.name, **changed}


class LiveRun:
    """The page of a run."""

    def __init__(self, followed: FollowedRun, *, above: str = "") -> None:
        """`above`: the address of the page of all runs."""
        self._followed, self._above, self._versions = followed, above, Versions("run")
        self._seen: RunFiles | None = None
        self._gone = ""

    def look(self) -> None:
        gone = ""
        try:
            self._followed.look()
        except DataError as error:
            gone = f"{error}; showing the last state that was read"
        run = self._followed.run
        if run is None:
            return
        if run is not self._seen or gone != self._gone:
            self._seen, self._gone = run, gone
            self._versions.take(_run_parts(run, gone, above=self._above))
        else:
            self._versions.take({"html/progress": _progress(run)})  # the time left has changed

    def page(self) -> str:
        parts = self._versions.parts
        at = {name.removeprefix("html/"): _slot(name, str(html)) for name, html in parts.items() if name[:5] == "html/"}
        main = [at["notes"], at["progress"], at["headline"], curves_section(at["charts"], at["numbers"])]
        main += [at[name] for name in TITLES]
        body = f"{at['header']}{run_page.MAIN}{STATUS}{''.join(main)}"
        data = {"charts": parts["data/charts"], "matrices": parts["data/matrices"], "version": self._versions.name}
        return document(self._seen.name if self._seen else "", body, data, follows=True)

    def news(self, since: str) -> dict[str, object] | None:
        return self._versions.news(since)


STATUS = '<p id="live" role="status" class="live">Following</p>'


def _slot(name: str, html: str) -> str:
    """A place in the page whose content is replaced when it changes."""
    return f'<div data-part="{name}">{html}</div>'


def _run_parts(run: RunFiles, gone: str, *, above: str) -> Parts:
    charts, sections = charts_of([run]), sections_of(run, "r0-")
    state, _ = state_in_words(run)
    header = run_page.header(run, state, sections)
    back = f'<p class="back"><a href="{inert(above)}">All runs</a></p>' if above else ""
    html = {
        "header": back + header,
        "notes": run_page.notes([*([gone] if gone else []), *run.problems]),
        "progress": _progress(run),
        "headline": run_page.headline(run),
        "charts": figures([run], charts),
        "numbers": numbers_part([run]),
        **{name: sections.get(name, "") for name in TITLES},
    }
    data = run_page.data_of([run], charts)
    summaries = {chart.key: chart.summary for chart in charts}
    return {
        **{f"html/{name}": value for name, value in html.items()},
        **{f"data/{name}": value for name, value in data.items()},
        "data/summaries": summaries,
    }


def _progress(run: RunFiles) -> str:
    """A progress bar with the epoch and the estimated time left; empty unless the run is in progress."""
    progress = progress_of(run)
    if run.state != "going":
        return ""
    of = f" of {in_short(progress.epochs)}" if progress.epochs else ""
    words = f"epoch {in_short(progress.epoch)}{of}"
    if progress.share is None:
        return f'<p class="progress">{words}</p>'
    left = f", {left_in_words(progress.seconds_left)}" if progress.seconds_left is not None else ""
    return (
        f'<p class="progress"><progress max="1" value="{progress.share:.4f}" aria-label="Progress"></progress>'
        f" {words}{left}</p>"
    )


class LiveFolder:
    """The page of a folder of runs, and the page of each run."""

    def __init__(self, followed: FollowedFolder) -> None:
        self._followed, self._versions = followed, Versions("runs")
        self._pages = dict[str, LiveRun]()
        self._gone = ""

    def look(self) -> None:
        runs, gone = dict[str, RunFiles](), ""
        try:
            runs = self._followed.look()
        except DataError as error:
            gone = str(error)
        self._versions.take({"html/runs": _runs_table(runs, self._followed.left_out), "html/notes": _gone_note(gone)})

    def page(self) -> str:
        at = {name: _slot(name, str(html)) for name, html in self._versions.parts.items()}
        banner = run_page.banner("several", inert(self._followed.folder.resolve().name), "the newest first")
        body = f"{banner}{run_page.MAIN}{STATUS}{at['html/notes']}{at['html/runs']}"
        data = {"charts": [], "matrices": {}, "version": self._versions.name}
        return document("Runs", body, data, follows=True)

    def news(self, since: str) -> dict[str, object] | None:
        return self._versions.news(since)

    def page_of(self, name: str) -> LiveRun | None:
        """The page of a run in the folder, made from all of its files."""
        followed = self._followed.runs.get(name)
        if followed is None or followed.run is None:
            return None
        if name not in self._pages:
            self._pages[name] = LiveRun(FollowedRun(followed.folder, read_all), above="/")
        self._pages[name].look()
        return self._pages[name]


def _gone_note(gone: str) -> str:
    return run_page.notes([gone]) if gone else ""


def _runs_table(runs: Mapping[str, RunFiles], left_out: int) -> str:
    heads = [Column("run"), Column("state")]
    heads += [Column(name, is_number=True) for name in ("epoch", "best, %", "images/s", "time", "last log point")]
    heads.append(Column("what"))
    rows = []
    for name, run in runs.items():
        progress, best, speed = progress_of(run), best_of(run), last_of(run, "train/images_per_second")
        of = f"/{in_short(progress.epochs)}" if progress.epochs else ""
        left, written = progress.seconds_left, run.written
        rows.append(
            [
                Cell(run.name, link=f"/{RUNS}/{quote(name.encode('utf-8', 'surrogateescape'), safe='')}/"),
                Cell(short_state(run)),
                Cell(f"{in_short(progress.epoch)}{of}", by=progress.epoch),
                Cell(f"{best[0]:.2f}", by=best[0]) if best else Cell("-", by=-1),
                Cell(rate(speed), by=speed) if speed is not None else Cell("-", by=-1),
                Cell(left_in_words(left), by=left) if left is not None else Cell("-", by=-1),
                Cell(time.strftime("%Y-%m-%d %H:%M", time.localtime(written)), by=written)
                if written
                else Cell("-", by=0),
                Cell(about_of(run)),
            ]
        )
    if not rows:
        return "<p>There are no runs yet.</p>"
    more = f"<p>{counted(left_out, 'older run')} not shown.</p>" if left_out else ""
    more += f"<p>{MIXED}</p>" if is_mixed([*runs.values()]) else ""
    return f'<div class="runs">{table("Runs", heads, rows)}</div>{more}'


class Waiting:
    """The page of something that is not there yet."""

    def __init__(self, words: str) -> None:
        self._words, self._versions = words, Versions("waiting")

    def look(self) -> None: ...

    def page(self) -> str:
        body = run_page.banner("one", "Waiting", self._words) + run_page.MAIN + STATUS
        return document("Waiting", body, {"charts": [], "matrices": {}, "version": self._versions.name}, follows=True)

    def news(self, since: str) -> dict[str, object] | None:
        return self._versions.news(since)


class Site:
    """All pages of one folder; its files are read when a page asks, at most once a second."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """DataError if there can be no run."""
        self._folder, self._clock, self._lock = folder, clock, threading.Lock()
        self._looked = -LEAST_SECONDS
        self._home = self._found()
        self._home.look()  # a run that is removed before the first page is still shown

    def _found(self) -> LiveRun | LiveFolder | Waiting:
        found = what_is_there(self._folder)
        if isinstance(found, str):
            return Waiting(found)
        return LiveFolder(found) if isinstance(found, FollowedFolder) else LiveRun(FollowedRun(found.folder, read_all))

    def answer(self, path: tuple[str, ...], since: str) -> Answer | None:
        with self._lock:
            if self._clock() - self._looked >= LEAST_SECONDS:
                if isinstance(self._home, Waiting):
                    with contextlib.suppress(DataError):  # such as half of a copied folder
                        found = self._found()
                        self._home = self._home if isinstance(found, Waiting) else found
                self._home.look()
                self._looked = self._clock()
            is_news, place = path[-1:] == (NEWS,), path[:-1] if path[-1:] == (NEWS,) else path
            page: LiveRun | LiveFolder | Waiting | None = self._home if not place else None
            if len(place) == 2 and place[0] == RUNS and isinstance(self._home, LiveFolder):
                page = self._home.page_of(place[1])
            if page is None:
                return None
            if not is_news:
                return Answer("text/html", page.page())
            news = page.news(since)
            return Answer("application/json", None if news is None else json.dumps(news, allow_nan=False))
