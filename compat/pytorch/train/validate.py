"""The PyTorch program's validate.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("pytorch:validate.py", __file__)
