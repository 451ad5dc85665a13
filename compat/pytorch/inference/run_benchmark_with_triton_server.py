"""The PyTorch program's run_benchmark_with_triton_server.py: its command line, handed over to Falconet."""

import sys

from falconet.originals import main

sys.exit(main("pytorch:inference/run_benchmark_with_triton_server.py", __file__))
