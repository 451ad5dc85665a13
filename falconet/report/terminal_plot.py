"""Loss and accuracy of a run as a small plot of characters, side by side in 80 columns."""

import itertools
import math
from collections.abc import Sequence

from falconet.report.curves import Points, short, thinned
from falconet.report.epochs import in_short
from falconet.report.run_files import RunFiles

WIDTH, HEIGHT = 30, 6  # characters of one plot, each 2 x 4 dots, by default
GAP, MARGIN = 3, 7  # columns between the plots, and for their scales
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille character, by row and column
BLANK = 0x2800
LEGEND = "solid: validation, dotted: training"


def lines(run: RunFiles) -> list[str]:
    """The plots side by side; none if there are fewer than two epochs to draw."""
    drawn = plots(run)
    if not drawn:
        return []
    rows = beside(*drawn) if len(drawn) > 1 else drawn[0]
    return ["", *rows, *([" " * MARGIN + LEGEND] if is_validated(run) else [])]


def beside(left: Sequence[str], right: Sequence[str], *, width: int = WIDTH) -> list[str]:
    return [f"{a:{MARGIN + width}}{' ' * GAP}{b}".rstrip() for a, b in zip(left, right, strict=True)]


def plots(run: RunFiles, *, width: int = WIDTH, height: int = HEIGHT) -> list[list[str]]:
    """Plots of the loss and, if there were validations, of their metric; width and height are without the scales."""
    trained = ["train/accuracy"] if run.metric == "accuracy" else []  # training has nothing on the scale of mAP
    losses = [thinned(run.series(name), 8 * width) for name in ("validation/loss", "train/loss")]
    scores = [thinned(run.series(name), 8 * width) for name in (f"validation/{run.metric}", *trained)]
    if max(map(len, losses), default=0) < 2:
        return []
    is_log = all(value > 0 for points in losses for _, value in points)
    size = width, height
    left = _plot("loss (log scale)" if is_log else "loss", losses, size, is_log=is_log)
    right = [_plot(f"{run.metric}, %", scores, size, is_log=False)] if any(scores) else []
    return [left, *right]


def is_validated(run: RunFiles) -> bool:
    return bool(run.series("validation/loss") or run.series(f"validation/{run.metric}"))


def _plot(title: str, curves: Sequence[Points], size: tuple[int, int], *, is_log: bool) -> list[str]:
    """A plot's title, its rows beside the scale, and the first and last epoch below."""

    wide, tall = size

    def height(value: float) -> float:
        return math.log(value) if is_log else value

    points = [point for curve in curves for point in curve]
    first, last = min(epoch for epoch, _ in points), max(epoch for epoch, _ in points)
    low, high = min(height(value) for _, value in points), max(height(value) for _, value in points)
    dots = [[0] * wide for _ in range(tall)]

    def place(epoch: float, value: float) -> tuple[int, int]:
        x = (epoch - first) / ((last - first) or 1) * (2 * wide - 1)
        y = (high - height(value)) / ((high - low) or 1) * (4 * tall - 1)
        return round(x), round(y)

    for number, curve in enumerate(curves):
        for x, y in _line([place(*point) for point in curve]):
            if number == 0 or x % 3 == 0:  # the second curve is dotted, so that no colour is needed
                dots[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    ends = {0: max(value for _, value in points), tall - 1: min(value for _, value in points)}
    rows = []
    for row, marks in enumerate(dots):
        scale = _brief(ends[row]) if row in ends else ""
        rows.append(f"{scale:>{MARGIN - 1}} " + "".join(chr(BLANK + dot) if dot else " " for dot in marks))
    begin, end = in_short(first), f"epoch {in_short(last)}"
    return [f"{'':{MARGIN}}{title}", *rows, f"{'':{MARGIN}}{begin}{end:>{wide - len(begin)}}"]


def _brief(value: float) -> str:
    """A number in six characters if possible: 0.0068 for 0.006819."""
    return short(value) if len(short(value)) < MARGIN else f"{value:.2g}"


def _line(corners: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """All dots of a line through the corners."""
    found = list(corners[:1])
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        found += [(round(x0 + (x1 - x0) * k / steps), round(y0 + (y1 - y0) * k / steps)) for k in range(1, steps + 1)]
    return found
