"""The PyTorch program's host_benchmark.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("pytorch:datasets/host_benchmark.py", __file__))
