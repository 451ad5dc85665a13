#!/bin/sh
# ResNet-50 as 16 replicas, originally for an IPU-POD16; on fewer devices, replicas become accumulation.
# Takes any option of train.py.
set -e
here=$(dirname "$0")
exec poprun --num-instances=8 --num-replicas=16 python3 "$here/train.py" --config resnet50 \
    --dataloader-worker 14 --dataloader-rebatch-size 256 "$@"
