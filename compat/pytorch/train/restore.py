"""The PyTorch program's restore.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("pytorch:restore.py", __file__)
