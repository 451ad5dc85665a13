"""The scripts in bench/: what they measure is what they say, and what they have measured is kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tiny

BENCH = Path(__file__).parents[1] / "bench"
pytestmark = pytest.mark.dist


def script(code):
    """Run code beside the scripts, in a process of its own: tests have a module `runs`, too."""
    return subprocess.run([sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=False)


AVERAGES = """
from pathlib import Path
from averaging import averaged, trained
run = Path({run!r})
dict(trained({words!r}, run))
print(len([*(run / "checkpoints").iterdir()]))
averaged("--weight-avg-N 5", run)
print("five")
averaged("--weight-avg-N 6", run)
"""


def test_averages_are_of_as_many_checkpoints_as_they_say(tmp_path):
    words = f"{tiny.TINY} --epoch 5".replace("--epoch 2", "").split()
    found = script(AVERAGES.format(run=str(tmp_path / "run"), words=words))
    assert found.stdout.split() == ["5", "five"], found.stderr
    assert found.stderr.endswith("RuntimeError: expected 6 checkpoints to average; the run has fewer epochs\n")


ROWS = """
from pathlib import Path
from runs import add_row, rows_in
path = Path({path!r})
print(rows_in(path))
add_row(path, {{"seed": 1}})
path.write_text(path.read_text() + '{{"seed": 2, "accu')
print(rows_in(path))
add_row(path, {{"seed": 3}})
print(rows_in(path))
"""


def test_a_row_that_a_kill_cut_short_is_made_again(tmp_path):
    found = script(ROWS.format(path=str(tmp_path / "new" / "rows.jsonl")))
    assert found.stdout.splitlines() == ["[]", "[{'seed': 1}]", "[{'seed': 1}, {'seed': 3}]"], found.stderr


RECIPES = """
import sys
import recipes
def trained(name, words, *, data_dir, seed):
    print("trained", name, seed)
    curve = [[1.0, 50.0, 40.0], [2.0, 60.0]] if seed else [[3.0, 70.0]]
    return {{
        "recipe": name, "seed": seed, "accuracy": 60.0, "seconds": 1.0, "images": 9, "moving_average": None,
        "whole": 2.0, "curve": curve, "options": list(words), "device": "CPU", "versions": {{}}, "date": "2026-11-19",
    }}
recipes.trained = trained
sys.argv = ["recipes.py", *{words!r}]
recipes.main()
"""


def seeds_trained(found):
    return [int(line.split()[-1]) for line in found.stdout.splitlines() if line.startswith("trained ")]


def test_recipes_are_not_trained_twice_and_drawn_whatever_their_phases_measured(tmp_path):
    path, picture = tmp_path / "rows.jsonl", tmp_path / "curves.png"
    line = ["cifar10-resnet20", "--data-dir", "none", "--output", str(path), "--seeds"]
    assert seeds_trained(script(RECIPES.format(words=[*line, "1"]))) == [0]
    again = script(RECIPES.format(words=[*line, "2"]))
    assert f"cifar10-resnet20, seed 0: is in {path}" in again.stdout
    assert seeds_trained(again) == [1]
    assert seeds_trained(script(RECIPES.format(words=[*line, "1", "--again"]))) == [0]
    assert seeds_trained(script(RECIPES.format(words=[*line, "1", "--", "--epoch", "3"]))) == [0]
    shown = script(RECIPES.format(words=["--show", str(path), "--plot", str(picture)]))
    assert shown.returncode == 0, shown.stderr
    assert "| `cifar10-resnet20`, 2 runs | 60.00, 0.00 |" in shown.stdout
    assert picture.stat().st_size > 10_000


def test_an_unknown_recipe_is_refused_before_any_is_trained(tmp_path):
    words = ["cifar10-resnet20", "cifar10-resnet21", "--data-dir", "none", "--output", str(tmp_path / "rows.jsonl")]
    found = script(RECIPES.format(words=words))
    assert found.returncode == 2
    assert "not a named config: cifar10-resnet21" in found.stderr
    assert seeds_trained(found) == []


AVERAGING = """
import sys
import averaging
averaging.trained = lambda words, run: iter([("last", [90.0, None])])
averaging.averaged = lambda words, run: print("averaging", words) or 91.0
averaging.AVERAGES = {{"one": "--one", "two": "--two"}}
sys.argv = ["averaging.py", "--output", {path!r}, "--run", {path!r} + ".run", "--", *{words!r}]
averaging.main()
"""


def test_averages_that_were_measured_are_kept(tmp_path):
    path = tmp_path / "averaging.json"
    assert script(AVERAGING.format(path=str(path), words=["--epoch", "3"])).stdout.count("averaging --") == 4
    stored = json.loads(path.read_text())
    del stored["accuracies"]["two"]
    path.write_text(json.dumps(stored))
    again = script(AVERAGING.format(path=str(path), words=["--epoch", "3"])).stdout
    assert "averaging --one" not in again
    assert "| one | 91.00 | 91.00 |" in again
    assert "| two | 91.00 | 91.00 |" in again
    other = script(AVERAGING.format(path=str(path), words=["--epoch", "4"]))
    assert other.returncode == 2
    assert f"{path} is of falconet train --epoch 3, " in other.stderr


REGIMES = """
import sys
import regimes
regimes.REGIMES = {{"one": "", "two": "", "three": ""}}
def measured(part, name, *, seed, **_):
    if (name, seed) == {fails!r}:
        raise RuntimeError("no luck")
    return [[1.0, 20.0 + seed]]
regimes.measured = measured
sys.argv = ["regimes.py", "--data-dir", "none", "--output", {path!r}, *{words!r}, "--", "--device", "cpu"]
regimes.main()
"""


def regimes(path, *words, fails=None):
    return script(REGIMES.format(path=str(path), words=words, fails=fails))


FIRST, SECOND = [[1.0, 20.0]], [[1.0, 21.0]]  # of seeds 0 and 1


def test_regimes_that_were_measured_are_kept_and_the_others_added(tmp_path):
    path = tmp_path / "regimes.json"
    answer = regimes(path, "--parts", "full", "--seeds", "2", fails=("two", 0))
    assert "full two, seed 0: left out: no luck" in answer.stdout
    assert answer.returncode == 1
    found = json.loads(path.read_text())
    assert found["full"] == {"one": [FIRST, SECOND], "three": [FIRST, SECOND]}
    del found["full"]["one"][1]
    found["low"] = {"one": [[[1.0, 90.0]]]}
    path.write_text(json.dumps(found))
    again = regimes(path, "--parts", "full", "--seeds", "2")
    assert again.returncode == 0, again.stderr
    assert [line for line in again.stdout.splitlines() if line.startswith("full")] == [
        "full two [1.0, 20.0]",
        "full one [1.0, 21.0]",
        "full two [1.0, 21.0]",
    ]
    assert json.loads(path.read_text())["low"] == {"one": [[[1.0, 90.0]]]}
    assert regimes(path, "--parts", "full", "--seeds", "2").stdout.startswith("| regime")


def test_parts_of_another_device_are_measured_again_on_request_alone(tmp_path):
    path, made = tmp_path / "regimes.json", {"one": [[[1.0, 90.0]]]}
    path.write_text(json.dumps({"measured": {"low": {"on": "a GPU"}}, "full": made, "low": made, "speed": {}}))
    refused = regimes(path, "--parts", "low")
    assert refused.returncode == 2
    assert f"{path}: low is of a GPU; this is CPU, torch " in refused.stderr
    assert json.loads(path.read_text())["low"] == made
    answer = regimes(path, "--parts", "low", "--again")
    found = json.loads(path.read_text())
    assert found["low"] == {name: [FIRST] for name in ("one", "two", "three")}
    assert found["full"] == made
    assert list(found["measured"]) == ["low"]
    assert "| two |  | 20.00 |" in answer.stdout
