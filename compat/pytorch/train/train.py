"""The PyTorch program's train.py: its command line, handed over to Falconet."""

from falconet.originals import run

run("pytorch:train.py", __file__)
