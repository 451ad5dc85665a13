"""The PyTorch program's validate_dataset.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("pytorch:datasets/validate_dataset.py", __file__)
