"""How a command ends: at once after Ctrl-C, with its output written, with the right exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from falconet import exits

SCRIPT = """
import atexit, sys
from falconet import __main__, cli
atexit.register(print, "cleaned up")
{more}
cli.main = lambda: (sys.stdout.write("printed"), {code})[1]
__main__.main()
"""


def ended(code, *, more="", **variables):
    line = [sys.executable, "-c", SCRIPT.format(code=code, more=more)]
    result = subprocess.run(line, capture_output=True, text=True, env=os.environ | variables)
    return result.returncode, result.stdout, result.stderr


def test_interrupted_command_flushes_and_skips_clean_up():
    assert ended(130) == (130, "printed", "")


def test_one_of_several_processes_skips_clean_up():
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert ended(0, **place) == (0, "printed", "")
    assert ended(1, **place) == (1, "printed", "")
    assert ended(2, **place, MASTER_PORT="x") == (2, "printedcleaned up\n", "")  # it has not joined a world


def test_any_other_command_ends_with_clean_up():
    assert ended(2) == (2, "printedcleaned up\n", "")


@pytest.mark.parametrize(("code", "exit_code", "message"), [(0, 2, "stdout: No space left on device\n"), (2, 2, "")])
def test_unwritable_stdout_is_reported_once(code, exit_code, message):
    line = [sys.executable, "-c", SCRIPT.format(code=code, more="")]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered)
    assert (result.returncode, result.stderr) == (exit_code, message)


def test_ctrl_c_during_clean_up_keeps_the_exit_code():
    interrupted = "import os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    assert ended(0, more=interrupted) == (0, "printed", "")
    assert ended(2, more=interrupted) == (2, "printed", "")


def test_closed_stdout_is_not_a_mistake():
    for code in (0, 130):
        line = [sys.executable, "-c", f"from falconet import cli; import sys; sys.stdout = None; cli.end({code})"]
        result = subprocess.run(line, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (code, "")


def test_output_to_a_terminal_is_discarded_only_when_it_is_lost(tmp_path):
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
