"""The PopART program's resnet_main.py: its command line, handed over to Falconet."""

from falconet.legacy.programs import run

run("popart:resnet_main.py", __file__)
