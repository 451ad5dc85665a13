"""The PyTorch program's run_benchmark_with_triton_server.py: its command line, handed over to Falconet."""

from falconet.legacy.programs import run

run("pytorch:inference/run_benchmark_with_triton_server.py", __file__)
