"""Who interrupts a command does not wait for it."""

import subprocess
import sys

SCRIPT = """
import atexit, sys
from falconet import __main__, cli
atexit.register(print, "cleared up")
cli.main = lambda: (sys.stdout.write("said"), {code})[1]
sys.exit(__main__.main())
"""


def ended(code):
    result = subprocess.run([sys.executable, "-c", SCRIPT.format(code=code)], capture_output=True, text=True)
    return result.returncode, result.stdout, result.stderr


def test_an_interrupted_command_has_said_all_and_leaves_without_clearing_up():
    assert ended(130) == (130, "said", "")


def test_any_other_end_is_pythons_own():
    assert ended(2) == (2, "saidcleared up\n", "")
