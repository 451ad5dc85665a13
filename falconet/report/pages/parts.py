"""Parts of a page: escaped text, tables that sort, lists, and pictures."""

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from falconet.errors import printable
from falconet.report.answers import Example, Picture

PRINTED = 300  # rows of a table on paper, about eight pages; as in report.css


def inert(value: object) -> str:
    """Text escaped for HTML, also within an attribute; characters that would reverse its direction are made visible."""
    whole = str(value).encode("utf-8", "backslashreplace").decode()
    return html.escape(printable(whole), quote=True)


class Cell(NamedTuple):
    """A cell of a table: its text, and the value to sort by if that differs."""

    shown: str
    by: float | None = None
    bar: float | None = None  # percent of a bar behind it
    is_mono: bool = False
    link: str = ""  # where it leads


class Column(NamedTuple):
    """The head of a column."""

    name: str
    is_number: bool = False


def table(
    caption: str, columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, sorts: bool = True, tall: bool = False
) -> str:
    """A table; `sorts`: a click on a head sorts it; `tall`: it scrolls within a limited height."""
    heads = "".join(_head(column, sorts=sorts) for column in columns)
    body = [f"<tr>{_cells(row, columns)}</tr>" for row in rows]
    kind, is_long = ' class="sorts"' if sorts else "", len(body) > PRINTED
    cut = f'<p class="on-paper">Printed: the first {PRINTED} of {len(body):,} rows.</p>' if is_long else ""
    place = f"scrolls{' tall' if tall else ''}{' long' if is_long else ''}"
    return (
        f'<div class="{place}" role="region" tabindex="0" aria-label="{inert(caption)}">'
        f'<table{kind}><caption class="hidden">{inert(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{cut}"
    )


def _head(column: Column, *, sorts: bool) -> str:
    kind = ' class="number"' if column.is_number else ""
    if not sorts or not column.name:
        return f'<th scope="col"{kind}>{inert(column.name)}</th>'
    return f'<th scope="col"{kind} aria-sort="none"><button type="button">{inert(column.name)}</button></th>'


def _cells(row: Sequence[Cell], columns: Sequence[Column]) -> str:
    found = []
    for cell, column in zip(row, columns, strict=True):
        kinds = [*(["number"] if column.is_number else []), *(["mono"] if cell.is_mono else [])]
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        by = "" if cell.by is None else f' data-by="{cell.by:.9g}"'
        bar = "" if cell.bar is None else f'<i class="bar" style="width:{min(100.0, max(0.0, cell.bar)):.1f}%"></i>'
        shown = f'<a href="{inert(cell.link)}">{inert(cell.shown)}</a>' if cell.link else inert(cell.shown)
        found.append(f"<td{kind}{by}>{bar}<span>{shown}</span></td>")
    return "".join(found)


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names and values."""
    rows = "".join(f"<div><dt>{inert(name)}</dt><dd>{inert(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{rows}</dl>'


def details(summary: str, body: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{inert(summary)}</summary>{body}</details>"


def image(picture: Picture | None, words: str) -> str:
    if picture is None:
        return f'<span class="missing">{inert(words)}</span>'
    kind = ' class="pixels"' if picture.kind == "png" else ""
    return f'<img{kind} decoding="async" alt="{inert(words)}" src="data:image/{picture.kind};base64,{picture.data}">'


def examples(found: Sequence[Example], *, is_wrong: bool) -> str:
    """Pictures of validation images with their classes, the model's answers and their paths."""
    tiles = []
    for each in found:
        sure = f"{100 * each.probability:.1f} %"
        words = f"{each.label}, taken for {each.predicted}" if is_wrong else each.label
        answer = f'<b class="wrong">{inert(each.predicted)}</b>' if is_wrong else f"<b>{inert(each.predicted)}</b>"
        truth = f'<span class="truth">is {inert(each.label)}</span>' if is_wrong else ""
        tiles.append(
            f"<figure>{image(each.picture, words)}<figcaption>{answer} <span>{sure}</span>{truth}"
            f'<code title="{inert(each.path)}">{inert(_end_of(each.path))}</code></figcaption></figure>'
        )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _end_of(path: str) -> str:
    """The last two parts of a path, usually class and file, with the whole path as the title."""
    return "/".join(path.split("/")[-2:])


def tiles(pictures: Sequence[tuple[str, Picture]]) -> str:
    found = (
        f"<figure>{image(each, label)}<figcaption>{inert(label)}</figcaption></figure>" for label, each in pictures
    )
    return f'<div class="tiles small">{"".join(found)}</div>'
