"""The PyTorch program's train.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("pytorch:train.py", __file__))
