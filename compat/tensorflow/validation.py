"""The TensorFlow program's validation.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("tf1:validation.py", __file__))
