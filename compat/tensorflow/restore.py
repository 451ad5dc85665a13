"""The TensorFlow program's restore.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("tf1:restore.py", __file__)
