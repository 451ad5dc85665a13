#!/bin/sh
# ResNet-50 as 64 replicas, originally for an IPU-POD64. HOSTS=a,b,c,d runs them on several hosts.
# Takes any option of train.py.
set -e
here=$(dirname "$0")
exec poprun -vv --num-instances=16 --num-replicas=64 ${HOSTS:+--host="$HOSTS"} \
    ${VIPU_SERVER:+--vipu-server-host="$VIPU_SERVER"} ${PARTITION:+--vipu-partition="$PARTITION"} \
    python3 "$here/train.py" --config resnet50-pod64 --dataloader-worker 14 --dataloader-rebatch-size 256 "$@"
