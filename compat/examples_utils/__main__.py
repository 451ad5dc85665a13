"""`python3 -m examples_utils benchmark ...`, run by Falconet."""

import sys

from falconet.legacy.programs import run

if sys.argv[1:2] != ["benchmark"]:
    asked = {"-h", "--help"} & {*sys.argv}
    usage = "usage: python3 -m examples_utils benchmark [--spec FILE ...] [--benchmark NAME ...]"
    print(usage, file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)
run("tool:examples_utils benchmark", __file__, sys.argv[2:])
