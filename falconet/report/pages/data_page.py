"""The page of `falconet data check`: one HTML file without scripts, with its small pictures inside."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from falconet.report.console import counted
from falconet.report.pages.document import asset
from falconet.report.pages.parts import inert

TEMPLATE = Path(__file__).with_name("data_page.html")
FIRST_CLASSES = 40  # shown at once; the others on request
MOST_CLASSES = 2000
NARROW = 3  # pictures of a finding that fits into half of the page


@dataclass(frozen=True)
class Picture:
    """A photo: its path, its part (train or val), its class, the finding, and its small pictures as JPEGs."""

    path: str
    side: str
    label: str
    detail: str
    jpegs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Section:
    """One kind of finding. `rows`: pictures that belong together, such as copies of a photo; else one each."""

    title: str
    meaning: str
    count: int
    unit: str  # what is counted: photo, group, class, folder
    is_broken: bool
    rows: Sequence[Sequence[Picture]] = ()
    names: Sequence[str] = ()  # of classes or folders, which have no picture

    @property
    def are_groups(self) -> bool:
        return self.unit == "group"


@dataclass(frozen=True)
class Tile:
    number: str
    words: str
    tone: str = ""  # bad, note or fine


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    warning: str  # why it is incomplete; empty: it is not
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    classes: Sequence[tuple[str, int, int]]  # name, photos to train, photos to validate
    balance: str
    notes: Sequence[str]
    footer: str


def rendered(page: Page) -> str:
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(
        base=asset("base.css"),
        title=inert(page.title),
        subtitle=inert(page.subtitle),
        warning=f'<p class="warning">{inert(page.warning)}</p>' if page.warning else "",
        tiles="\n".join(_tile(tile) for tile in page.tiles),
        contents=_contents(page.sections),
        sections=_sections(page.sections),
        classes=_classes(page),
        notes=_notes(page.notes),
        footer=inert(page.footer),
    )


def _tile(tile: Tile) -> str:
    return f'<li class="{tile.tone}"><b>{inert(tile.number)}</b><span>{inert(tile.words)}</span></li>'


def _contents(sections: Sequence[Section]) -> str:
    rows = "\n".join(
        f'<tr><td><a href="#finding-{number}">{inert(_capital(section.title))}</a></td>'
        f'<td class="number">{counted(section.count, section.unit)}</td>'
        f'<td class="words">{inert(section.meaning)}</td></tr>'
        for number, section in enumerate(sections)
    )
    return f'<nav aria-label="Findings"><table>{rows}</table></nav>' if sections else ""


def _sections(sections: Sequence[Section]) -> str:
    found = "\n".join(_section(number, section) for number, section in enumerate(sections))
    return f'<div class="findings">{found}</div>' if found else ""


def _section(number: int, section: Section) -> str:
    tone = " bad" if section.is_broken else ""
    pictures = sum(map(len, section.rows))
    shown = len(section.rows) if section.are_groups else pictures + len(section.names)
    wide = "wide" if pictures > NARROW else ""
    left = section.count - shown
    more = f'<p class="more">and {counted(left, f"more {section.unit}")}, in the list</p>' if left > 0 else ""
    return (
        f'<section id="finding-{number}" class="{wide}"><div class="head"><h2>{inert(_capital(section.title))}</h2>'
        f'<span class="chip{tone}">{counted(section.count, section.unit)}</span></div>'
        f"<p>{inert(section.meaning)}</p>{_rows(section)}{more}</section>"
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _rows(section: Section) -> str:
    if section.names:
        return f'<ul class="notes">{"".join(f"<li>{inert(name)}</li>" for name in section.names)}</ul>'
    if section.are_groups:
        items = "".join(f'<li><ul class="photos">{"".join(map(_figure, row))}</ul></li>' for row in section.rows)
        return f'<ul class="groups">{items}</ul>'
    return f'<ul class="photos">{"".join(_figure(each) for row in section.rows for each in row)}</ul>'


def _figure(picture: Picture) -> str:
    images = "".join(
        f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}">' for jpeg in picture.jpegs
    )
    two = " two" if len(picture.jpegs) > 1 else ""
    side = "val" if picture.side == "val" else "train"
    return (
        f'<li><figure><div class="shown{two}">{images or "<span>no picture</span>"}</div>'
        f"<figcaption>{_path(picture.path)}"
        f'<i><span class="side {side}">{inert(picture.side)}</span> {inert(picture.label)}</i>'
        f"{f'<i>{inert(picture.detail)}</i>' if picture.detail else ''}</figcaption></figure></li>"
    )


def _path(path: str) -> str:
    """HTML of a path that may be broken after slashes rather than within names."""
    return inert(path).replace("/", "/<wbr>")


def _classes(page: Page) -> str:
    if not page.classes:
        return ""
    most = max(1, max(max(train, validation) for _, train, validation in page.classes))
    rows = [_bar(*each, most) for each in sorted(page.classes, key=lambda each: -each[1])]
    head, tail = rows[:FIRST_CLASSES], rows[FIRST_CLASSES:MOST_CLASSES]
    rest = (
        f"<details><summary>{counted(len(tail), 'smaller class')}</summary>"
        f'<table class="bars">{"".join(tail)}</table></details>'
        if tail
        else ""
    )
    left = len(rows) - MOST_CLASSES
    more = f'<p class="more">and {counted(left, "more class")}, in the JSON</p>' if left > 0 else ""
    return (
        f'<section id="classes"><div class="head"><h2>Classes</h2><span class="key"><b class="bar train"></b>to train'
        f'<b class="bar val"></b>to validate</span></div><p>{inert(page.balance)}</p>'
        f'<table class="bars">{"".join(head)}</table>{rest}{more}</section>'
    )


def _bar(name: str, train: int, validation: int, most: int) -> str:
    widths = [100 * number / most for number in (train, validation)]
    return (
        f'<tr><th scope="row">{inert(name)}</th><td><div class="bar train" style="width:{widths[0]:.2f}%"></div>'
        f'<div class="bar val" style="width:{widths[1]:.2f}%"></div></td>'
        f'<td class="number">{train:,} + {validation:,}</td></tr>'
    )


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{inert(note)}</li>" for note in notes)
    return f'<section id="notes"><h2>Notes</h2><ul class="notes">{items}</ul></section>' if notes else ""
