#!/bin/sh
# EfficientNet-B0 (group norm, group convolutions) as 8 replicas of 2 stages, half resolution first.
# Takes any option of train.py.
set -e
here=$(dirname "$0")
exec poprun --num-instances=4 --num-replicas=8 --ipus-per-replica=2 python3 "$here/train.py" \
    --config efficientnet-b0-g16-gn-pod16 --half-res-training --micro-batch-size 40 --gradient-accumulation 3 \
    --fine-tune-epoch 2 --fine-tune-lr 0.25 --fine-tune-micro-batch-size 20 --fine-tune-gradient-accumulation 5 \
    --fine-tune-first-trainable-layer blocks/5/3 --dataloader-worker 16 "$@"
