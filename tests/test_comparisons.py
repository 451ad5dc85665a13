"""The scripts in bench/: what they measure is what they say."""

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
