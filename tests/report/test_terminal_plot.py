"""The plot at the end of a run: its width, its scales, and where the dots are."""

import io
import json

import pytest
from rich.console import Console

from falconet.report import terminal_plot
from falconet.report.console import Screen
from falconet.report.run_files import read_run
from falconet.report.terminal_plot import BLANK, HEIGHT, MARGIN, WIDTH
from report_runs import several_labels, write_run


def dots(rows):
    """The places of all dots, in columns and rows of dots."""
    found = set()
    for y, row in enumerate(rows):
        for x, letter in enumerate(row[MARGIN : MARGIN + WIDTH]):
            bits = ord(letter) - BLANK if letter != " " else 0
            found |= {
                (2 * x + right, 4 * y + down)
                for down, pair in enumerate(terminal_plot.DOTS)
                for right, bit in enumerate(pair)
                if bits & bit
            }
    return found


def test_it_fits_80_columns_and_names_its_scales(tmp_path):
    lines = terminal_plot.lines(read_run(write_run(tmp_path / "run", epochs=40)))
    assert max(map(len, lines)) <= 80
    assert len(lines) == HEIGHT + 4
    assert "loss (log scale)" in lines[1]
    assert "accuracy, %" in lines[1]
    assert lines[2].lstrip().startswith("2 ")  # the highest loss
    assert "0.025" in lines[HEIGHT + 1]  # the lowest
    assert lines[HEIGHT + 2].split() == ["1", "epoch", "40", "1", "epoch", "40"]


def test_the_curve_goes_from_corner_to_corner(tmp_path):
    folder = write_run(tmp_path / "run")
    points = [{"update": each, "epoch": each, "validation/loss": 10.0**-each} for each in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in points))
    lines = terminal_plot.lines(read_run(folder))
    found = dots(lines[2 : 2 + HEIGHT])
    assert {(0, 0), (2 * WIDTH - 1, 4 * HEIGHT - 1)} <= found
    assert {x for x, _ in found} == set(range(2 * WIDTH))  # solid: a straight line on a log scale
    assert all(abs(y - x * (4 * HEIGHT - 1) / (2 * WIDTH - 1)) <= 1 for x, y in found)


def test_one_epoch_is_no_curve(tmp_path):
    assert terminal_plot.lines(read_run(write_run(tmp_path / "run", epochs=1))) == []


@pytest.mark.parametrize(
    ("terminal", "width", "encoding", "drawn"),
    [(True, 80, "utf-8", True), (False, 80, "utf-8", False), (True, 79, "utf-8", False), (True, 80, "ascii", False)],
)
def test_it_is_for_wide_terminals_that_have_the_characters(monkeypatch, terminal, width, encoding, drawn):
    monkeypatch.setenv("TERM", "xterm")
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert Screen(Console(file=file, force_terminal=terminal, width=width)).is_drawable == drawn


def test_the_plot_of_mean_average_precision_is_of_validations_alone(tmp_path):
    """Training measures how often all labels are right, which would be drawn as a much lower precision."""
    _, right = terminal_plot.plots(read_run(several_labels(tmp_path / "run")))
    assert right[0].strip() == "mAP, %"
    assert (right[1].split()[0], right[HEIGHT].split()[0]) == ("80", "40")  # of the training it is 50 to 83
