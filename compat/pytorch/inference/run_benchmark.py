"""The PyTorch program's run_benchmark.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("pytorch:inference/run_benchmark.py", __file__))
