"""`--lr auto`: the range test, its files, and a run that is the same as with the number it found."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from falconet.checkpoint import format
from falconet.errors import ConfigError
from falconet.train.lr_finder import UPDATES, choose, smooth
from runs import assert_bitwise
from tiny import TINY

DIGITS = "--data digits --threads 1 --dataloader-workers 1 --device cpu --epoch 1 --micro-batch-size 32"
RATES = [10 ** (-6 + 7 * number / (UPDATES - 1)) for number in range(UPDATES)]


def found(run="r"):
    return json.loads((Path(run) / "lr_finder.json").read_text())


def test_the_run_is_that_of_the_rate_it_found(falconet):
    answer = falconet(f"train {DIGITS} --lr auto --optimizer adamw --ema-half-life 1 --run-dir r")
    assert answer.code == 0, answer.err
    rate = found()["rate"]
    assert 1e-5 < rate < 1
    assert f"learning rate {rate:g} by a range test of " in answer.out
    assert falconet(f"train {DIGITS} --lr {rate} --optimizer adamw --ema-half-life 1 --run-dir given").code == 0
    assert_bitwise(Path("r"), Path("given"))
    stored = format.read_manifest(format.checkpoints_in(Path("r"))[-1]).config["lr"]
    assert (float(stored["value"]), stored["source"]) == (rate, "range test of --lr auto")
    assert yaml.safe_load(Path("r/config.yaml").read_text())["lr"] == rate


def test_the_points_and_a_plot_are_in_the_run_folder(falconet):
    assert falconet(f"train {TINY} --lr auto --run-dir r").code == 0
    points = found()
    assert len(points["rates"]) == len(points["losses"]) == len(points["smoothed"]) <= UPDATES
    assert points["smoothed"] == pytest.approx(smooth(points["losses"]).tolist())
    lines = ElementTree.parse("r/lr_finder.svg").findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [len(points["rates"])] * 2


def test_layers_that_are_frozen_at_first_stay_so_in_the_range_test(falconet):
    line = f"train {DIGITS} --epoch 2 --updates 1 --optimizer adamw --lr auto --freeze backbone"
    for run, extra in (("r", "--unfreeze-after 1"), ("frozen", "")):
        answer = falconet(f"{line} {extra} --run-dir {run}")
        assert answer.code == 0, answer.err
    assert len(found()["rates"]) > 1437 // 32  # more than an epoch
    assert found() == found("frozen")


def test_the_range_test_has_the_image_size_that_the_run_starts_with(falconet):
    line = f"train {DIGITS} --epoch 2 --updates 1 --optimizer adamw --lr auto --resolution-schedule 4:1"
    for run, later in (("r", "8:2"), ("small", "")):
        answer = falconet(f"{line} {later} --run-dir {run}")
        assert answer.code == 0, answer.err
    assert len(found()["rates"]) > 1437 // 32  # more than an epoch
    assert found() == found("small")


def test_the_screen_names_the_plot_and_counts_the_rates(falconet, monkeypatch):
    monkeypatch.setattr("falconet.report.console.SILENCE", 0.0)
    answer = falconet(f"train {TINY} --lr auto --run-dir r")
    assert answer.code == 0, answer.err
    assert "the loss at each learning rate: r/lr_finder.svg\n" in answer.out
    assert f"trying learning rates: 1 of {UPDATES}\n" in answer.err


def test_another_run_finds_the_same_rate_and_a_resumed_one_does_not_look_again(falconet):
    line = f"train {TINY} --lr auto --resume --run-dir"
    assert falconet(f"{line} r").code == falconet(f"{line} again").code == 0
    assert found("r") == found("again")
    answer = falconet(f"{line} r")
    assert answer.code == 0, answer.err
    assert "nothing left to train" in answer.out
    assert "range test" not in answer.out


def test_a_plan_says_that_the_rate_is_found_later(falconet):
    answer = falconet(f"train {TINY} --lr auto --plan")
    assert answer.code == 0, answer.err
    assert "note: --lr auto is found by a range test before the first update" in answer.out


def test_the_steepest_fall_of_a_known_curve_is_chosen():
    """A loss that falls from 2 to 1 around 1e-3 and diverges from 1e-1 on."""
    decades = np.log10(RATES)
    curve = 2 - 1 / (1 + np.exp(-4 * (decades + 3))) + np.exp(6 * (decades + 0.5))
    assert choose(RATES, curve) == pytest.approx(1e-3, rel=0.2)


@pytest.mark.parametrize("curve", [np.full(UPDATES, 2.3), np.linspace(2.3, 4.0, UPDATES), np.array([2.3, 9.0])])
def test_a_loss_that_never_falls_is_refused(curve):
    with pytest.raises(
        ConfigError, match=r"--lr auto: the loss fell at none of .* rates from 1e-06; expected a number"
    ):
        choose(RATES, curve)
