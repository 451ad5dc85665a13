"""How many devices a command asks for, in every spelling."""

import shlex

import pytest

from falconet.bench.runner import devices_needed

LINES = {
    "falconet train": 1,
    "falconet train --replicas 4": 4,
    "falconet train --replicas=4 --pipeline-splits layer2/0 layer3/0 --epoch 2": 12,
    "falconet train --pipeline-splits auto:4 --replicas 2": 8,
    "falconet train --config digits": 1,
    "falconet bench infer --replicas 4": 4,
    "falconet train --config resnet50-pod4": 4,
    "falconet train --config mobilenet-v3-large-pod16": 16,
    "falconet train --config mobilenet-v3-large-pod16 --replicas 2": 8,
    "falconet bench infer --config resnet50": 1,
    "python3 run_benchmark.py --config resnet50": 1,
    "poprun -vv --num-instances=8 --num-replicas=16 python3 train.py --config resnet50": 16,
    "poprun --num-replicas 4 --ipus-per-replica 4 --num-instances 4 python train.py --shards=4": 16,
    "python train.py --shards 2 --replicas 8 --pipeline-splits b3/3/relu": 16,
    "torchrun --nproc-per-node 8 -m falconet train": 8,
    "mpirun -np 3 falconet train": 3,
    "falconet train --replicas auto": 1,
    "falconet train --pipeline-splits auto:x": 1,
    "falconet train --replicas \u00b2": 1,
    "falconet train --config": 1,
}


@pytest.mark.parametrize(("line", "devices"), LINES.items())
def test_devices_needed_by_a_command_line(line, devices):
    assert devices_needed(shlex.split(line)) == devices
