"""The PopART program's resnet_main.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("popart:resnet_main.py", __file__))
