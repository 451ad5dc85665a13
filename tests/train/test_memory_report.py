"""The memory that processes hold, in bytes, against arithmetic."""

from dataclasses import replace

import torch
from torch import nn

from falconet.checkpoint.state import TrainState
from falconet.config.options import Optimizer
from falconet.optim.offload import HostedState
from falconet.optim.optimizers import build_optimizer
from falconet.parallel.data_parallel import OneReplica
from falconet.parallel.grid import Grid
from falconet.parallel.world import ALONE
from falconet.train.memory_report import Held, StageMemory, measure_memory, told

VALUES = 1000 * 100 + 100  # of the layer
GRID = Grid(ALONE, ALONE, ALONE)


def updated(rule, *, hosted=False):
    layer = nn.Linear(1000, 100)
    optimizer = build_optimizer(layer, Optimizer(optimizer=rule))
    state = TrainState(layer, optimizer)
    if hosted:
        state.hosted = HostedState(optimizer, bucket_megabytes=0.01, device=torch.device("cpu"))
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(1, 1000)).sum().backward()
        (state.hosted or optimizer).step()
    return state


def test_weights_gradients_and_both_moments_are_counted_once():
    found = measure_memory(updated("adamw"), OneReplica(), GRID)
    assert found.weights.host == found.gradients.host == 4 * VALUES
    counts = 2 * 4  # of updates, one per parameter
    assert found.optimizer_state.host == found.whole_state == 2 * 4 * VALUES + counts
    assert found.weights.device == found.messages.both == 0


def test_a_velocity_stored_in_the_gradient_counts_as_a_gradient():
    found = measure_memory(updated("sgd_combined"), OneReplica(), GRID)
    assert found.gradients.host == 4 * VALUES
    assert found.optimizer_state.both == 0


def test_offloaded_state_is_counted_with_its_device_buffers():
    state = updated("sgd", hosted=True)
    found = measure_memory(state, OneReplica(), GRID)
    places = sum(t.numel() for t in state.hosted.tensors() if t.dtype == torch.uint8)
    homes = 4 * (1000 * 100 + 32 + 128)  # each state starts at a multiple of 64 values
    assert found.whole_state == homes
    assert found.optimizer_state.host == homes + places


def test_the_summary_shows_what_dividing_and_offloading_save():
    found = measure_memory(updated("sgd"), OneReplica(), GRID)
    assert found.told() == {}
    divided = replace(found, optimizer_state=Held(device=100_000, host=0))
    assert divided.told() == {
        "weights": "0.4 MB, gradients 0.4 MB",
        "optimizer state": "0.1 MB on the device, 0.0 MB on the host of this process, 0.4 MB in total",
    }
    stages = [StageMemory(peak=2**30, held=found), StageMemory(peak=2**31, held=divided)]
    assert told(stages[:1], replicas=1) == {"peak memory": "1.00 GiB"}
    assert told(stages[:1], replicas=2) == {"peak memory": "1.00 GiB per process, at most"}
    assert told(stages, replicas=1) == {
        "peak memory": "stage 0: 1.00 GiB; stage 1: 2.00 GiB",
        "weights": "stage 0: 0.4 MB; stage 1: 0.4 MB",
        "gradients": "stage 0: 0.4 MB; stage 1: 0.4 MB",
        "optimizer state": "stage 0: 0.4 MB on the host; stage 1: 0.1 MB on the device, 0.0 MB on the host;"
        " 0.4 MB in total",
    }
    hosted = replace(found, weights=Held(device=400_000, host=0))
    assert hosted.told()["optimizer state"] == "0.4 MB on the host"
