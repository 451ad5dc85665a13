"""The PyTorch program's weight_avg.py: its command line, handed over to Falconet."""

from falconet.legacy.programs import run

run("pytorch:weight_avg.py", __file__)
