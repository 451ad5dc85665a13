"""The PopART program's resnet_synthetic_benchmark.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("popart:resnet_synthetic_benchmark.py", __file__)
