"""The TensorFlow program's train.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("tf1:train.py", __file__)
