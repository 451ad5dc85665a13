"""The peak memory of a process does not include that of its parent."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from falconet.parallel import host

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not host.peak_of(os.getpid()), reason="this system does not tell a peak")


def test_a_small_child_of_a_large_process_has_its_own_peak():
    ballast = b"x" * (300 * MIB)
    program = "from falconet.parallel.host import own_peak; print(own_peak())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 2 * MIB < int(found.stdout) < len(ballast)


def test_a_missing_process_has_no_peak():
    assert host.peak_of(os.getpid()) > MIB
    assert host.peak_of(2**22 + 1) == 0  # above the largest number of a process


@pytest.mark.parametrize(
    ("account", "seen", "expected"),
    [(900, 30, 900), (900, 950, 950), (510, 30, 30), (500, 0, 0)],
)
def test_rusage_of_an_exited_child_is_used_unless_it_may_be_inherited(account, seen, expected):
    usage = SimpleNamespace(ru_maxrss=account * 1024)
    assert host.peak_of_ended(usage, seen=seen * MIB, ours=500 * MIB) == expected * MIB
