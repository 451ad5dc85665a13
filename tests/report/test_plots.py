"""Plots for papers and chats: PNG and PDF files of every chart, of any names."""

import builtins
import json

import pytest
from matplotlib.figure import Figure
from PIL import Image

from falconet.errors import ConfigError, LinkError
from falconet.report import plots
from falconet.report.run_files import read_run
from report_runs import lines, write_run

NAMES = ["accuracy", "calibration", "confusion", "loss", "lr", "memory", "throughput"]


def test_every_plot_is_drawn_as_png_and_pdf(tmp_path):
    run = read_run(write_run(tmp_path / "$x_{$", names=("_a", "$b$", "c")))
    assert sorted(plots.save([run], tmp_path)) == [f"plots/{name}.{kind}" for name in NAMES for kind in ("pdf", "png")]
    for name in NAMES:
        assert (tmp_path / f"plots/{name}.pdf").read_bytes().startswith(b"%PDF")
        with Image.open(tmp_path / f"plots/{name}.png") as image:
            assert min(image.size) > 500
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20  # something is drawn


def test_several_runs_share_their_curves(tmp_path):
    runs = [read_run(write_run(tmp_path / name)) for name in ("a", "b")]
    written = plots.save(runs, tmp_path)
    assert "plots/loss.png" in written
    assert {"plots/confusion-1.pdf", "plots/confusion-2.pdf"} <= set(written)


def drawn(runs):
    """The figures, by name."""
    return dict(plots._figures(runs, Figure))


def test_the_legend_is_below_the_axes_and_every_curve_is_marked_alike(tmp_path):
    runs = [read_run(write_run(tmp_path / name, epochs=epochs)) for name, epochs in (("a", 1), ("b", 3), ("c", 12))]
    for name in ("loss", "throughput"):
        figure = drawn(runs)[name]
        figure.draw_without_rendering()
        (legend,) = figure.legends
        curves = [line for axes in figure.axes for line in axes.get_lines()]
        assert len(legend.get_texts()) == len(curves) == 6
        assert {line.get_marker() for line in curves} == {"o"}
        box = legend.get_window_extent()
        assert all(box.y1 <= axes.get_window_extent().y0 for axes in figure.axes)
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_a_long_curve_has_no_marks_and_one_point_is_seen(tmp_path):
    runs = [read_run(write_run(tmp_path / name, epochs=epochs)) for name, epochs in (("a", 1), ("b", 50))]
    marks = [line.get_marker() for line in drawn(runs)["loss"].axes[0].get_lines()]
    assert marks == ["o", "o", "None", "None"]


def test_the_axes_of_the_learning_rate_and_of_the_loss_scale_have_their_names(tmp_path):
    folder = write_run(tmp_path / "run")
    assert drawn([read_run(folder)])["lr"].axes[0].get_ylabel() == "learning rate"
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scaled = [point | {"train/loss_scale": 1.0} if "train/loss" in point else point for point in points]
    (folder / "metrics.jsonl").write_text(lines(scaled))
    left, right = drawn([read_run(folder)])["lr"].axes
    assert [left.get_title(), left.get_ylabel()] == ["Learning rate and loss scale", "learning rate"]
    assert right.get_ylabel() == "loss scale"
    assert right.get_ylim()[0] == 0, "a scale that stays at 1 is a line at 1, not one between 0.95 and 1.05"


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_short_run_has_ticks_at_whole_epochs(tmp_path, epochs):
    figure = drawn([read_run(write_run(tmp_path / "run", epochs=epochs))])["loss"]
    figure.draw_without_rendering()
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())


def test_without_matplotlib_the_package_to_install_is_named(tmp_path, monkeypatch):
    plain = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"needs the package matplotlib: pip install 'falconet\[plots\]'"):
        plots.save([], tmp_path)


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "plots").symlink_to(tmp_path)
    with pytest.raises(LinkError):
        plots.save([read_run(write_run(tmp_path / "run"))], tmp_path)
