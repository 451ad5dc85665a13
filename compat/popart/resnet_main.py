"""The PopART program's resnet_main.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("popart:resnet_main.py", __file__)
