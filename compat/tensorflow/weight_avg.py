"""The TensorFlow program's weight_avg.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("tf1:weight_avg.py", __file__))
