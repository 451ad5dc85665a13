"""Run Triton's kernels on the CPU, in a process of their own: Triton must be imported with its interpreter."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest


def errors(script):
    """The kernels' errors by case, as the script prints them."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed here")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
