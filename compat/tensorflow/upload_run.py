"""The TensorFlow program's upload_run.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("tf1:upload_run.py", __file__))
