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


REGIMES = """
import sys
import regimes
regimes.measured = lambda parts, **_: iter([("low", "32.32", [[1.0, 20.0]])])
sys.argv = ["regimes.py", "--data-dir", "none", "--output", {path!r}, "--parts", "low"]
regimes.main()
"""


def test_regimes_replace_only_the_parts_that_are_measured(tmp_path):
    path = tmp_path / "regimes.json"
    stored = {"what": "of a GPU", "full": {"32.32": [[[1.0, 90.0]]]}, "low": {"old": []}, "speed": {}, "other": [1]}
    path.write_text(json.dumps(stored))
    found = script(REGIMES.format(path=str(path)))
    assert found.returncode == 0, found.stderr
    kept = json.loads(path.read_text())
    assert {name: kept[name] for name in ("full", "speed", "other")} == {
        name: stored[name] for name in ("full", "speed", "other")
    }
    assert kept["low"] == {"32.32": [[[1.0, 20.0]]]}
    assert kept["what"].startswith("low: ")
    assert kept["what"].endswith("; before: of a GPU")
