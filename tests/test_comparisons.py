"""The scripts in bench/: what they measure is what they say, and what they have measured is kept."""

import json
import sys
from typing import NamedTuple

import pytest

import averaging
import recipes
import regimes
import tiny
from product_runs import add_row, rows_in

pytestmark = pytest.mark.run


class Said(NamedTuple):
    code: object
    out: str
    err: str


@pytest.fixture
def said(monkeypatch, capfd):
    """What a script answers to these words, and its exit code."""

    def call(script, *words):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, words)])
        try:
            code = script.main()
        except SystemExit as left:
            code = left.code
        return Said(code or 0, *capfd.readouterr())

    return call


def test_averages_are_of_as_many_checkpoints_as_they_say(tmp_path, capfd):
    run = tmp_path / "run"
    with capfd.disabled():  # the commands' output goes to the run's log, which pytest would keep for itself
        dict(averaging.trained(f"{tiny.TINY} --epoch 5".replace("--epoch 2", "").split(), run))
        assert len([*(run / "checkpoints").iterdir()]) == 5
        assert 0 <= averaging.averaged("--weight-avg-N 5", run) <= 100
        with pytest.raises(RuntimeError, match=r"^expected 6 checkpoints to average; the run has fewer epochs$"):
            averaging.averaged("--weight-avg-N 6", run)


def test_a_row_that_a_kill_cut_short_is_made_again(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    assert rows_in(path) == []
    add_row(path, {"seed": 1})
    path.write_text(path.read_text() + '{"seed": 2, "accu')
    assert rows_in(path) == [{"seed": 1}]
    add_row(path, {"seed": 3})
    assert rows_in(path) == [{"seed": 1}, {"seed": 3}]


@pytest.fixture
def seeds(monkeypatch):
    """The seeds that recipes were trained with, in order; nothing is trained."""
    found = []

    def trained(name, words, *, data_dir, seed):
        found.append(seed)
        curve = [[1.0, 50.0, 40.0], [2.0, 60.0]] if seed else [[3.0, 70.0]]
        about = {"device": "CPU", "versions": {}, "date": "2026-11-19", "options": list(words), "curve": curve}
        rates = {"accuracy": 60.0, "seconds": 1.0, "images": 9, "moving_average": None, "whole": 2.0}
        return {"recipe": name, "seed": seed, **rates, **about}

    monkeypatch.setattr(recipes, "trained", trained)
    return found


def test_recipes_are_not_trained_twice_and_drawn_whatever_their_phases_measured(said, seeds, tmp_path):
    path, picture = tmp_path / "rows.jsonl", tmp_path / "curves.png"
    line = ["cifar10-resnet20", "--data-dir", "none", "--output", path, "--seeds"]
    said(recipes, *line, 1)
    assert seeds == [0]
    assert f"cifar10-resnet20, seed 0: is in {path}" in said(recipes, *line, 2).out
    assert seeds == [0, 1]
    said(recipes, *line, 1, "--again")
    assert seeds == [0, 1, 0]
    said(recipes, *line, 1, "--", "--epoch", 3)
    assert seeds == [0, 1, 0, 0]
    shown = said(recipes, "--show", path, "--plot", picture)
    assert shown.code == 0, shown.err
    assert "| `cifar10-resnet20`, 2 runs | 60.00, 0.00 |" in shown.out
    assert picture.stat().st_size > 10_000


def test_recipes_that_were_left_out_or_had_no_time_are_named(said, seeds, monkeypatch, tmp_path):
    path = tmp_path / "rows.jsonl"
    line = ["cifar10-resnet20", "--data-dir", "none", "--output", path, "--seeds", 2]
    late = said(recipes, *line, "--minutes", -1)
    assert (late.code, late.out.count("no time is left")) == (1, 2)

    def failing(name, words, *, data_dir, seed):
        raise RuntimeError("falconet train: no data")

    monkeypatch.setattr(recipes, "trained", failing)
    failed = said(recipes, *line)
    assert (failed.code, failed.out.count("left out: falconet train: no data")) == (1, 2)
    shown = said(recipes, "--show", path, "--plot", tmp_path / "curves.png")
    assert shown.code == f"{path}: no runs; expected a file that --output has written"


def test_an_unknown_recipe_is_refused_before_any_is_trained(said, seeds, tmp_path):
    names = ["cifar10-resnet20", "cifar10-resnet21"]
    found = said(recipes, *names, "--data-dir", "none", "--output", tmp_path / "rows.jsonl")
    assert found.code == 2
    assert "not a named config: cifar10-resnet21" in found.err
    assert seeds == []


@pytest.fixture
def averages(monkeypatch):
    """The options of averages that were measured, in order; nothing is trained."""
    found = []
    monkeypatch.setattr(averaging, "trained", lambda words, run: iter([("last", [90.0, None])]))
    monkeypatch.setattr(averaging, "averaged", lambda words, run: found.append(words) or 91.0)
    monkeypatch.setattr(averaging, "AVERAGES", {"one": "--one", "two": "--two"})
    return found


def test_averages_that_were_measured_are_kept(said, averages, tmp_path):
    path = tmp_path / "averaging.json"
    line = ["--output", path, "--run", f"{path}.run", "--", "--epoch"]
    said(averaging, *line, 3)
    estimated = "--batchnorm-images 10000"
    assert averages == [f"--one {estimated}", "--one", f"--two {estimated}", "--two"]
    stored = json.loads(path.read_text())
    del stored["accuracies"]["two"]
    path.write_text(json.dumps(stored))
    averages.clear()
    again = said(averaging, *line, 3).out
    assert averages == [f"--two {estimated}", "--two"]
    assert "| one | 91.00 | 91.00 |" in again
    assert "| two | 91.00 | 91.00 |" in again
    other = said(averaging, *line, 4)
    assert other.code == 2
    assert f"{path} is of falconet train --epoch 3, " in other.err


@pytest.fixture
def fails(monkeypatch):
    """The runs of regimes, by name and seed, that fail; nothing is trained."""
    failing = set()

    def measured(part, name, *, seed, **_):
        if (name, seed) in failing:
            raise RuntimeError("no luck")
        return [[1.0, 20.0 + seed]]

    monkeypatch.setattr(regimes, "measured", measured)
    monkeypatch.setattr(regimes, "REGIMES", {"one": "", "two": "", "three": ""})
    return failing


def line_of(path, *words):
    return ["--data-dir", "none", "--output", path, *words, "--", "--device", "cpu"]


FIRST, SECOND = [[1.0, 20.0]], [[1.0, 21.0]]  # of seeds 0 and 1


def test_regimes_that_were_measured_are_kept_and_the_others_added(said, fails, tmp_path):
    path = tmp_path / "regimes.json"
    line = line_of(path, "--parts", "full", "--seeds", 2)
    fails.add(("two", 0))
    answer = said(regimes, *line)
    assert "full two, seed 0: left out: no luck" in answer.out
    assert answer.code == 1
    found = json.loads(path.read_text())
    assert found["full"] == {"one": [FIRST, SECOND], "three": [FIRST, SECOND]}
    del found["full"]["one"][1]
    found["low"] = {"one": [[[1.0, 90.0]]]}
    path.write_text(json.dumps(found))
    fails.clear()
    again = said(regimes, *line)
    assert again.code == 0, again.err
    assert [line for line in again.out.splitlines() if line.startswith("full")] == [
        "full two [1.0, 20.0]",
        "full one [1.0, 21.0]",
        "full two [1.0, 21.0]",
    ]
    assert json.loads(path.read_text())["low"] == {"one": [[[1.0, 90.0]]]}
    assert said(regimes, *line).out.startswith("| regime")


@pytest.mark.usefixtures("fails")
def test_parts_of_another_device_are_measured_again_on_request_alone(said, tmp_path):
    path, made = tmp_path / "regimes.json", {"one": [[[1.0, 90.0]]]}
    path.write_text(json.dumps({"measured": {"low": {"on": "a GPU"}}, "full": made, "low": made, "speed": {}}))
    refused = said(regimes, *line_of(path, "--parts", "low"))
    assert refused.code == 2
    assert f"{path}: low is of a GPU; this is CPU, torch " in refused.err
    assert json.loads(path.read_text())["low"] == made
    answer = said(regimes, *line_of(path, "--parts", "low", "--again"))
    found = json.loads(path.read_text())
    assert found["low"] == {name: [FIRST] for name in ("one", "two", "three")}
    assert found["full"] == made
    assert list(found["measured"]) == ["low"]
    assert "| two |  | 20.00 |" in answer.out
