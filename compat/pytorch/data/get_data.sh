#!/bin/sh
# What `make get-data` runs: sample photos for the inference benchmark, made here instead of fetched.
set -e
exec python3 "$(dirname "$0")/make_samples.py"
