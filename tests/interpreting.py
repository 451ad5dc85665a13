"""Run Triton's kernels on the CPU, in a process of their own: Triton must be imported with its interpreter."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from importlib.metadata import version

import pytest

IS_THERE = importlib.util.find_spec("triton") is not None
ROUNDS_TWICE = IS_THERE and version("triton").startswith("3.6.")


def require():
    """Skip the test if Triton is not installed."""
    if not IS_THERE:
        pytest.skip("Triton is not installed here")


def errors(script):
    """The kernels' errors by case, as the script prints them."""
    require()
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    line = [sys.executable, __file__, script]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def replace_the_language_once(replace):
    """Triton's interpreter does so whenever one function of a kernel calls another, which is a third of its time.

    `replace`: setattr, or that of a monkeypatch.
    """
    from triton.language import core
    from triton.runtime import interpreter

    plain = interpreter._patch_lang

    def patch(function):
        languages = [each for each in function.__globals__.values() if each in (interpreter.tl, core)]
        is_done = languages and not any(core.is_builtin(each.load) for each in languages)
        return interpreter._LangPatchScope() if is_done else plain(function)

    replace(interpreter, "_patch_lang", patch)


if __name__ == "__main__":
    replace_the_language_once(setattr)
    runpy.run_path(sys.argv[1], run_name="__main__")
