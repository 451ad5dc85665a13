"""The PyTorch program's weight_avg.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("pytorch:weight_avg.py", __file__)
