"""The TensorFlow program's train.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("tf1:train.py", __file__))
