"""The TensorFlow program's restore.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("tf1:restore.py", __file__))
