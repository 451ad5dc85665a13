"""`python3 -m examples_utils benchmark ...`, handed over to Falconet."""

import sys

from falconet.originals import main

words = sys.argv[1:]
if words[:1] != ["benchmark"]:
    sys.exit("usage: python3 -m examples_utils benchmark [--spec FILE ...] [--benchmark NAME ...]")
sys.exit(main("tool:examples_utils benchmark", __file__, words[1:]))
