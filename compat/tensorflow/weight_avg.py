"""The TensorFlow program's weight_avg.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("tf1:weight_avg.py", __file__)
