"""The PopART program's resnet_synthetic_benchmark.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("popart:resnet_synthetic_benchmark.py", __file__))
