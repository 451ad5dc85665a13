"""Freed blocks of any size are used again by a process that computes on a CPU, unless its user has tuned malloc."""

import ctypes
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from falconet.parallel import host, world

BLOCK = 34 << 20  # bytes; from 32 MiB on, glibc's malloc would map and unmap each
PAGES = BLOCK // os.sysconf("SC_PAGE_SIZE")
BLOCKS = 8
FAULTS = f"""
import resource, threading, torch
from falconet.parallel.world import open_world

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def print_faults():
    for _ in range(16):  # each of a thread's first aligned blocks leaves a sliver in its cache, and needs another place
        torch.ones({BLOCK}, dtype=torch.uint8)
    before = faults()
    for _ in range({BLOCKS}):
        torch.ones({BLOCK}, dtype=torch.uint8)
    print(faults() - before)

open_world("cpu", threads=1, deterministic=True)
print_faults()
thread = threading.Thread(target=print_faults)  # as a server computes
thread.start()
thread.join()
"""
KEPT = f"""
import torch
from pathlib import Path
from falconet.parallel import host
from falconet.parallel.world import open_world

open_world("cpu", threads=1, deterministic=True)
blocks = [torch.ones({BLOCK}, dtype=torch.uint8) for _ in range(5)]
last = torch.ones({BLOCK}, dtype=torch.uint8)  # what is freed is not the end of the heap
del blocks
print(Path("/proc/self/statm").read_text().split()[1])
host.return_freed_memory()
print(Path("/proc/self/statm").read_text().split()[1])
"""
of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
TUNED = {  # variables, and whether they are a user's choice about malloc
    "none": ({}, False),
    "one that has nothing to do with memory": ({"GLIBC_TUNABLES": "glibc.pthread.rseq=1"}, False),
    "a variable of malloc": ({"MALLOC_TOP_PAD_": "131072"}, True),
    "a tunable of malloc": ({"GLIBC_TUNABLES": "glibc.pthread.rseq=1:glibc.malloc.top_pad=131072"}, True),
}


@of_glibc
@pytest.mark.parametrize(("variables", "is_tuned"), TUNED.values(), ids=TUNED)
def test_pages_of_freed_blocks_are_faulted_in_again_only_if_a_user_has_tuned_malloc(variables, is_tuned):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    line = [sys.executable, "-c", FAULTS]
    done = subprocess.run(line, env=kept | variables, capture_output=True, text=True, check=True)
    for faults in map(int, done.stdout.split()):
        assert faults >= BLOCKS * PAGES if is_tuned else faults < PAGES


@of_glibc
def test_freed_memory_is_returned_when_it_is_asked_for():
    line = [sys.executable, "-c", KEPT]
    kept, returned = map(int, subprocess.run(line, capture_output=True, text=True, check=True).stdout.split())
    assert kept - returned > 4 * PAGES


def test_a_run_on_cuda_leaves_malloc_alone(monkeypatch):
    monkeypatch.setattr(world, "keep_freed_memory", lambda _: pytest.fail("called"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    world.open_world("cuda", threads=torch.get_num_threads(), deterministic=True)


def test_a_library_without_these_functions_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    host.keep_freed_memory({})
    host.return_freed_memory()
