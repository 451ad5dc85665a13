"""The TensorFlow program's inference_embedded.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("tf1:inference_embedded.py", __file__)
