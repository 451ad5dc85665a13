"""The TensorFlow program's inference_embedded.py: its command line, handed over to Falconet."""

from falconet.legacy.programs import run

run("tf1:inference_embedded.py", __file__)
