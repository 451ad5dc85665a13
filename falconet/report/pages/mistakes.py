"""The part of a page that shows where a model is wrong: classes, confusion matrix, calibration, mistakes, hits."""

from collections.abc import Sequence

from falconet.report.answers import Answers, Bin
from falconet.report.console import counted
from falconet.report.pages.parts import Cell, Column, details, examples, inert, table

MOST_CELLS = 60_000  # of a confusion matrix, the largest: about 700 kB
MOST_NAMED = 2000  # classes in a table, the worst
MOST_CONFUSED = 50  # pairs
WIDTH, HEIGHT, LEFT, BELOW = 340, 300, 40, 36  # of the reliability diagram, and its margins


def answers_part(answers: Answers, *, matrix: str) -> str:
    """The whole part; `matrix`: the element in which the script draws the confusion matrix."""
    epoch = f" after epoch {answers.epoch}" if answers.epoch else ""
    which = f"The best validation{epoch}, of {counted(answers.images, 'image')}."
    if answers.checkpoint:
        which += f" Checkpoint: {answers.checkpoint}."
    parts = [f"<p>{inert(which)}</p>", _class_table(answers)]
    if answers.cells:
        listed = parts.pop() + _confusions(answers)
        parts.append(f'<div class="beside">{_matrix_figure(answers, matrix)}<div>{listed}</div></div>')
    if answers.bins:
        parts.append(_calibration(answers))
    if answers.mistakes:
        parts.append(f"<h3>Most confident mistakes</h3>{examples(answers.mistakes, is_wrong=True)}")
    if answers.hits:
        parts.append(f"<h3>Least confident hits</h3>{examples(answers.hits, is_wrong=False)}")
    return "".join(parts)


def _class_table(answers: Answers) -> str:
    is_one = any(each.correct is not None for each in answers.classes)
    ranked = sorted(answers.classes, key=lambda each: (each.score is None, each.score or 0.0, each.name))
    shown = ranked[:MOST_NAMED]
    heads = [Column("class"), Column("accuracy, %" if is_one else "average precision, %", is_number=True)]
    heads += [Column("right", is_number=True)] if is_one else []
    heads += [Column("images", is_number=True)]
    rows = []
    for each in shown:
        score = Cell("-", by=-1.0) if each.score is None else Cell(f"{each.score:.2f}", by=each.score, bar=each.score)
        right = [Cell(f"{each.correct or 0:,}", by=each.correct or 0)] if is_one else []
        rows.append([Cell(each.name), score, *right, Cell(f"{each.images:,}", by=each.images)])
    more = f"<p>The worst {MOST_NAMED:,} of {len(ranked):,} classes.</p>" if len(shown) < len(ranked) else ""
    title = "Accuracy by class" if is_one else "Average precision by class"
    return f"<h3>{title}</h3>{table(title, heads, rows, tall=len(rows) > 12)}{more}"


def _matrix_figure(answers: Answers, element: str) -> str:
    number_of = len(answers.classes)
    words = (
        f"Confusion matrix of {number_of:,} classes: a row for each class, a column for what its images were taken for."
        " The table of confused classes below lists the largest cells."
    )
    return (
        f'<figure class="matrix"><div class="title"><h3>Confusion matrix</h3><span class="tools">'
        f'<button type="button" data-zoom="in" aria-label="Zoom in">+</button>'
        f'<button type="button" data-zoom="out" aria-label="Zoom out">&minus;</button>'
        f'<button type="button" data-zoom="all">all</button></span></div>'
        f'<div class="canvas" id="{element}" tabindex="0" role="img" aria-label="{inert(words)}"></div>'
        f"<figcaption>A row for each class, a column for what its images were taken for."
        f'<output aria-live="polite">Point at a cell, or move with the arrow keys. The buttons, the keys +, - and 0, a'
        f" mouse wheel or two fingers zoom.</output></figcaption></figure>"
    )


def matrix_data(answers: Answers) -> dict[str, object]:
    """Class names, images per class, and the cells as one flat list to save space."""
    largest = sorted(answers.cells, key=lambda cell: -cell[2])[:MOST_CELLS]
    return {
        "names": [each.name for each in answers.classes] if answers.cells else [],
        "images": [each.images for each in answers.classes],
        "cells": [value for cell in sorted(largest) for value in cell],
    }


def _confusions(answers: Answers) -> str:
    wrong = answers.confusions()
    if not wrong:
        return "<p>No image was taken for another class.</p>"
    rows = []
    for label, predicted, images in wrong[:MOST_CONFUSED]:
        own = answers.classes[label]
        share = 100 * images / max(1, own.images)
        rows.append(
            [
                Cell(own.name),
                Cell(answers.classes[predicted].name),
                Cell(f"{images:,}", by=images),
                Cell(f"{share:.1f}", by=share, bar=share),
            ]
        )
    heads = [
        Column("class"),
        Column("taken for"),
        Column("images", is_number=True),
        Column("of the class, %", is_number=True),
    ]
    more = f", the largest {MOST_CONFUSED} of {len(wrong):,} pairs" if len(wrong) > MOST_CONFUSED else ""
    return f"<h3>Most confused classes{more}</h3>{table('Most confused classes', heads, rows, tall=len(rows) > 6)}"


def _calibration(answers: Answers) -> str:
    error = answers.calibration_error
    known = [each for each in answers.bins if each.accuracy is not None and each.confidence is not None]
    images = max(1, sum(each.images for each in known))
    sure = sum(each.images * (each.confidence or 0.0) for each in known) / images
    right = sum(each.images * (each.accuracy or 0.0) for each in known) / images
    verdict = (
        "too sure of itself" if sure > right + 0.5 else "not sure enough" if sure < right - 0.5 else "well calibrated"
    )
    words = (
        f"On average the model is {sure:.2f} % sure and {right:.2f} % right: {verdict} overall."
        + ("" if error is None else f" Expected calibration error (ECE, {len(answers.bins)} bins): {error:.2f} %.")
        + " Bars that end below the line are answers that the model was too sure of; faint bars are few images."
    )
    rows = [
        [
            Cell(f"{100 * each.low:.0f} to {100 * each.high:.0f}", by=each.low),
            Cell(f"{each.images:,}", by=each.images),
            Cell(f"{each.confidence:.1f}", by=each.confidence),
            Cell(f"{each.accuracy:.1f}", by=each.accuracy),
        ]
        for each in known
    ]
    heads = [Column(name, is_number=True) for name in ("sure, %", "images", "mean confidence, %", "right, %")]
    numbers = details("Numbers", table("Calibration", heads, rows))
    return (
        f'<h3>Calibration</h3><div class="calibration">{_reliability(answers.bins, error=error)}'
        f"<div><p>{inert(words)}</p>{numbers}</div></div>"
    )


def _reliability(bins: Sequence[Bin], *, error: float | None) -> str:
    """A diagram of how often answers are right at each confidence; a perfect model's bars end on the diagonal."""
    wide, high = WIDTH - LEFT - 14, HEIGHT - BELOW - 8
    most = max((each.images for each in bins), default=0) or 1
    marks = []
    for each in bins:
        if each.accuracy is None or each.confidence is None:
            continue
        x, width = LEFT + each.low * wide, (each.high - each.low) * wide
        tall = high * min(100.0, max(0.0, each.accuracy)) / 100
        title = (
            f"{100 * each.low:.0f} to {100 * each.high:.0f} % sure: {counted(each.images, 'image')},"
            f" {each.accuracy:.1f} % right"
        )
        share = max(0.25, (each.images / most) ** 0.5)  # faint where there are few images
        marks.append(
            f'<rect class="bin" x="{x + 0.5:.1f}" y="{8 + high - tall:.1f}" width="{width - 1:.1f}" height="{tall:.1f}"'
            f' fill-opacity="{share:.2f}"><title>{inert(title)}</title></rect>'
        )
    ticks = []
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = 8 + high * (1 - part)
        ticks += [
            f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{100 * part:.0f}</text>',
            f'<line class="grid" x1="{LEFT}" x2="{LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{LEFT + wide * part:.0f}" y="{HEIGHT - 22}" text-anchor="middle">{100 * part:.0f}</text>',
        ]
    words = "Reliability diagram" + ("" if error is None else f", calibration error {error:.2f} %")
    return (
        f'<svg class="reliability" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{inert(words)}">'
        f'{"".join((*ticks, *marks))}<line class="perfect" x1="{LEFT}" y1="{8 + high}" x2="{LEFT + wide}" y2="8"/>'
        f'<text x="{LEFT + wide / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">sure, %</text>'
        f'<text transform="translate(11 {8 + high / 2:.0f}) rotate(-90)" text-anchor="middle">right, %</text></svg>'
    )
