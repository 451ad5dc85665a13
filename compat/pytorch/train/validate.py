"""The PyTorch program's validate.py: its command line, handed over to Falconet."""

from falconet.originals import run

run("pytorch:validate.py", __file__)
