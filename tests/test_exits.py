"""Who interrupts a command does not wait for it, and nothing that was said gets lost unnoticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from falconet import exits

SCRIPT = """
import atexit, sys
from falconet import __main__, cli
atexit.register(print, "cleared up")
{more}
cli.main = lambda: (sys.stdout.write("said"), {code})[1]
__main__.main()
"""


def ended(code, *, more="", **variables):
    line = [sys.executable, "-c", SCRIPT.format(code=code, more=more)]
    result = subprocess.run(line, capture_output=True, text=True, env=os.environ | variables)
    return result.returncode, result.stdout, result.stderr


def test_an_interrupted_command_has_said_all_and_leaves_without_clearing_up():
    assert ended(130) == (130, "said", "")


def test_so_does_one_of_several_whatever_its_end():
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert ended(0, **place) == (0, "said", "")
    assert ended(1, **place) == (1, "said", "")
    assert ended(2, **place, MASTER_PORT="x") == (2, "saidcleared up\n", "")  # who has met nobody


def test_any_other_end_is_pythons_own():
    assert ended(2) == (2, "saidcleared up\n", "")


@pytest.mark.parametrize(("code", "ends", "told"), [(0, 2, "standard output: No space left on device\n"), (2, 2, "")])
def test_words_that_cannot_be_written_are_missed_once(code, ends, told):
    line = [sys.executable, "-c", SCRIPT.format(code=code, more="")]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered)
    assert (result.returncode, result.stderr) == (ends, told)


def test_ctrl_c_while_python_clears_up_ends_it_with_its_own_code_and_no_further_word():
    interrupted = "import os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    assert ended(0, more=interrupted) == (0, "said", "")
    assert ended(2, more=interrupted) == (2, "said", "")


def test_a_closed_standard_output_is_no_mistake():
    for code in (0, 130):
        line = [sys.executable, "-c", f"from falconet import cli; import sys; sys.stdout = None; cli.end({code})"]
        result = subprocess.run(line, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (code, "")


def test_what_is_said_to_a_terminal_goes_nowhere_only_when_that_is_lost(tmp_path):
    there, stream = os.openpty()
    file = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    exits.forget_lost_terminal([stream, file])
    os.write(stream, b"one")
    assert os.read(there, 3) == b"one"
    os.close(there)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(stream, b"two")
    exits.forget_lost_terminal([stream, file])
    assert os.write(stream, b"three") == os.write(file, b"three")
    assert (tmp_path / "log").read_text() == "three"
    os.close(stream)
    os.close(file)
