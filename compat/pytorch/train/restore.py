"""The PyTorch program's restore.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("pytorch:restore.py", __file__))
