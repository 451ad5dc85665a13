#!/bin/sh
# Draw sample photos for the inference benchmark, as `make get-data` does; nothing is downloaded.
set -e
exec python3 "$(dirname "$0")/make_samples.py"
