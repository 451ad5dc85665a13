"""report.html: one page about one run, or about several side by side, from the files of their folders alone.

Everything from a run folder is escaped text: the folder may come from another person.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from falconet import writing
from falconet.report.curves import Chart, charts_of, csv_lines
from falconet.report.pages.charts import chart_data, curves_section, figures, numbers_part
from falconet.report.pages.document import document
from falconet.report.pages.mistakes import matrix_data
from falconet.report.pages.parts import Cell, Column, details, inert, table
from falconet.report.pages.sections import TITLES, sections_of
from falconet.report.progress import state_in_words
from falconet.report.results import MIXED, OUTPUTS, about_of, differences, is_mixed, results_of
from falconet.report.run_files import REPORT, RESULTS, RunFiles, State, read_run

MAIN = '<main id="main">'
STATES: Mapping[State, str] = {
    "done": "finished",
    "going": "under way when this was written",
    "stopped": "stopped before its end",
}


def write_own(folder: Path, *, state: State | None = None) -> RunFiles:
    """Write report.html and results.csv of a run into its folder; return the files that were read."""
    run = read_run(folder, state=state)
    writing.replace(folder, REPORT, page([run]))
    writing.replace(folder, RESULTS, "".join(f"{line}\n" for line in csv_lines(run)))
    return run


def page(runs: Sequence[RunFiles]) -> str:
    """The whole page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    charts = charts_of(runs)
    sections = [sections_of(run, f"r{place}-") for place, run in enumerate(runs)]
    body = [_header(runs, title, sections[0]), MAIN]
    body += [notes([problem for run in runs for problem in run.problems])]
    body += [headline(runs[0]) if len(runs) == 1 else _comparison(runs)]
    body += [curves_section(figures(runs, charts), numbers_part(runs))]
    for run, found in zip(runs, sections, strict=True):
        own = "".join(found.values())
        body.append(own if len(runs) == 1 else f'<section class="run">{details(run.name, own)}</section>')
    return document(title, "".join(body), data_of(runs, charts))


def data_of(runs: Sequence[RunFiles], charts: Sequence[Chart]) -> dict[str, object]:
    """The data that the script draws."""
    return {
        "charts": [chart_data(chart) for chart in charts],
        "matrices": {f"r{place}-matrix": matrix_data(run.answers) for place, run in enumerate(runs) if run.answers},
    }


def _header(runs: Sequence[RunFiles], title: str, sections: Mapping[str, str]) -> str:
    """The head of the page; `sections`: the first run's, which get links if it is the only one."""
    if len(runs) == 1:
        return header(runs[0], _state(runs[0]), sections)
    about = ", ".join(run.name for run in runs)
    return banner("several", inert(title), about) + navigation({"comparison": "Comparison", "curves": "Curves"})


def _state(run: RunFiles) -> str:
    return STATES[run.state] if run.ending is None or run.state != "stopped" else state_in_words(run)[0]


def header(run: RunFiles, state: str, sections: Iterable[str]) -> str:
    """The head of the page of one run, with links to its sections."""
    links = {"curves": "Curves", **{f"r0-{name}": TITLES[name][1] for name in sections}}
    badge = f'<span class="badge {run.state}">{inert(state)}</span>'
    return banner("one", f"{inert(run.name)} {badge}", about_of(run)) + navigation(links)


def banner(kind: str, heading: str, about: str) -> str:
    """The banner of a page; `heading` is HTML, `about` is text."""
    return (
        f'<header class="{kind}"><p class="brand">Falconet report</p><h1>{heading}</h1>'
        f'<p class="about">{inert(about)}</p></header>'
    )


def navigation(links: Mapping[str, str]) -> str:
    shown = "".join(f'<a href="#{name}">{label}</a>' for name, label in links.items())
    return f'<nav aria-label="Sections">{shown}</nav>'


def notes(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    shown = "".join(f"<li>{inert(problem)}</li>" for problem in problems[:20])
    return f'<aside class="notes" aria-label="What could not be read"><ul>{shown}</ul></aside>'


def headline(run: RunFiles) -> str:
    found = results_of(run)
    if not found:  # the curves say so
        return ""
    main = next((name for name in found if name.startswith("best ")), None)
    cards = [
        f'<div class="card{" main" if name == main else ""}"><dt>{inert(name)}</dt><dd>{inert(value)}</dd></div>'
        for name, value in found.items()
    ]
    return f'<section aria-label="Results"><dl class="cards">{"".join(cards)}</dl></section>'


def _comparison(runs: Sequence[RunFiles]) -> str:
    columns = [Column(""), *(Column(run.name) for run in runs)]
    results = [results_of(run) for run in runs]
    names = list(dict.fromkeys(name for found in results for name in found))
    states = [Cell("state"), *(Cell(_state(run)) for run in runs)]
    rows = [[Cell(name), *(Cell(found.get(name, "-")) for found in results)] for name in names]
    differ = differences(runs)
    matter = {name: values for name, values in differ.items() if name not in OUTPUTS}
    others = {name: values for name, values in differ.items() if name in OUTPUTS}
    options = (
        _changed("Options that differ", columns, matter)
        if matter
        else "<p>All options that change the result are the same.</p>"
        if others
        else "<p>All options are the same.</p>"
    )
    if others:
        named = ", ".join(f"--{name}" for name in others)
        options += details(
            f"Also different, without an effect on the result: {named}", _changed("Other options", columns, others)
        )
    note = f'<aside class="notes"><p>{MIXED}</p></aside>' if is_mixed(runs) else ""
    return (
        f'<section id="comparison"><h2>What differs</h2>{note}{options}<h3>Results</h3>'
        f"{table('Results', columns, [states, *rows], sorts=False)}</section>"
    )


def _changed(caption: str, columns: Sequence[Column], options: Mapping[str, Sequence[str]]) -> str:
    rows = [
        [Cell(f"--{name}", is_mono=True), *(Cell(value, is_mono=True) for value in values)]
        for name, values in options.items()
    ]
    return table(caption, columns, rows, sorts=False)
