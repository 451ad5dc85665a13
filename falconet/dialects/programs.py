"""Every program of the originals by name."""

from falconet.dialects import popart, pytorch_tools, tensorflow, tools

PROGRAMS = {
    program.name: program
    for program in (*pytorch_tools.PROGRAMS, *tensorflow.PROGRAMS, *popart.PROGRAMS, *tools.PROGRAMS)
}
# Whose options people mix up.
TRAINERS = tuple(PROGRAMS[name] for name in ("pytorch:train.py", "tf1:train.py", "popart:resnet_main.py"))
