"""The PyTorch program's host_benchmark.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("pytorch:datasets/host_benchmark.py", __file__)
