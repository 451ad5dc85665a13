"""The PyTorch program's restore.py: its command line, handed over to Falconet."""

from falconet.legacy.programs import run

run("pytorch:restore.py", __file__)
