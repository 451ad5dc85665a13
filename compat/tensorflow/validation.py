"""The TensorFlow program's validation.py: its command line, handed over to Falconet."""

from falconet.legacy.programs import run

run("tf1:validation.py", __file__)
