"""The PyTorch program's validate_dataset.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("pytorch:datasets/validate_dataset.py", __file__))
