"""The PyTorch program's host_benchmark.py: its command line, handed over to Falconet."""

from falconet.legacy.programs import run

run("pytorch:datasets/host_benchmark.py", __file__)
