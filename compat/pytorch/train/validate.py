"""The PyTorch program's validate.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("pytorch:validate.py", __file__))
