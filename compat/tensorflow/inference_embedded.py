"""The TensorFlow program's inference_embedded.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("tf1:inference_embedded.py", __file__))
