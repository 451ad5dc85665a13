#!/bin/sh
# EfficientNet-B4 (group norm, group convolutions) as 8 replicas of 2 stages, originally for an IPU-POD16.
# Takes any option of train.py.
set -e
here=$(dirname "$0")
exec poprun --num-instances=2 --num-replicas=8 --ipus-per-replica=2 python3 "$here/train.py" \
    --config efficientnet-b4-g16-gn-pod16 --dataloader-worker 16 --dataloader-rebatch-size 256 "$@"
