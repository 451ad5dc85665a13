"""The PyTorch program's restore.py: its command line, handed over to Falconet."""

from falconet.originals import run

run("pytorch:restore.py", __file__)
