"""The TensorFlow program's restore.py: its command line, handed over to Falconet."""

from falconet.legacy.programs import run

run("tf1:restore.py", __file__)
