"""The PyTorch program's run_benchmark_with_triton_server.py: its command line, run by Falconet."""

from falconet.legacy.programs import run

run("pytorch:inference/run_benchmark_with_triton_server.py", __file__)
