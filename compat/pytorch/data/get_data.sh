#!/bin/sh
# Put sample photos for the inference benchmark into images/, as `make get-data` does; they are here, so nothing is downloaded.
set -e
cd "$(dirname "$0")"
mkdir -p images
cp samples/*.jpg images/
echo "$(find images -name '*.jpg' | wc -l | tr -d ' ') sample photos in $PWD/images; samples/README.md says where they come from"
