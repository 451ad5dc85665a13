"""The PyTorch program's train.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("pytorch:train.py", __file__)
