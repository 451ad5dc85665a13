"""The PyTorch program's validate.py: its command line, handed over to Falconet."""

from falconet.legacy.programs import run

run("pytorch:validate.py", __file__)
