#!/bin/sh
# ResNet-50 as 16 replicas, once an IPU-POD16; fewer devices run them in turn.
# Any option of train.py may follow.
set -e
here=$(dirname "$0")
exec poprun --num-instances=8 --num-replicas=16 python3 "$here/train.py" --config resnet50 \
    --dataloader-worker 14 --dataloader-rebatch-size 256 "$@"
