"""The TensorFlow program's upload_run.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("tf1:upload_run.py", __file__)
