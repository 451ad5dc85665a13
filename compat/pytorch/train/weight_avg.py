"""The PyTorch program's weight_avg.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("pytorch:weight_avg.py", __file__))
