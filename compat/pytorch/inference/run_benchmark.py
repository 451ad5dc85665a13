"""The PyTorch program's run_benchmark.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("pytorch:inference/run_benchmark.py", __file__)
