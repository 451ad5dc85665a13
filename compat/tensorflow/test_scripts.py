"""`pytest` in this folder: each script prints its help. `make test` runs the real tests."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_lists_its_options(script: Path) -> None:
    run = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"usage: {script.name} [options]")
