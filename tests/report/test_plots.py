"""Plots for papers and chats: PNG and PDF files of every chart, of any names."""

import builtins

import pytest
from PIL import Image

from falconet.errors import ConfigError, LinkError
from falconet.report import plots
from falconet.report.run_files import read_run
from report_runs import write_run

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
