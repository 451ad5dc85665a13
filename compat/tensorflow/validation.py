"""The TensorFlow program's validation.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("tf1:validation.py", __file__)
