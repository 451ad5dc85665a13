"""Where the time of traced calls goes: own times of operators, kernels on a device, and gaps."""

from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from falconet.report.profile import trace
from falconet.report.profile.kernel_times import brief, kernel_times, shares


class Event:
    """As torch records it; times in nanoseconds."""

    def __init__(self, name, begin, lasts, *, on=DeviceType.CPU, thread=1, marked=False):
        self._values = {"name": name, "start_ns": begin, "duration_ns": lasts, "device_type": on}
        self._values |= {"start_thread_id": thread, "is_user_annotation": marked}

    def __getattr__(self, name):
        return lambda: self._values[name]


def traced(events, *, device, seconds):
    return SimpleNamespace(events=events, device=torch.device(device), seconds=seconds)


def milliseconds(times):
    return {each["kind"]: each["milliseconds"] for each in times["kinds"]}


MS = 1_000_000


def test_an_operator_has_the_time_that_no_operator_inside_it_has():
    events = [
        Event("aten::conv2d", 0, 10 * MS),
        Event("aten::mkldnn_convolution", 1 * MS, 8 * MS),
        Event("aten::copy_", 2 * MS, 3 * MS),
        Event("aten::relu", 12 * MS, 4 * MS),
        Event("[memory]", 13 * MS, 0),
    ]
    times = kernel_times(traced(events, device="cpu", seconds=0.020), calls=2)
    assert milliseconds(times) == {"convolution, forward": 3.5, "elementwise": 2.0, "copies": 1.5}
    assert times["idle"] == 3.0  # 6 ms of 20, of two calls
    assert times["milliseconds"] == 10.0
    names = {each["name"]: (each["calls"], each["milliseconds"]) for each in times["kernels"]}
    assert names["aten::mkldnn_convolution"] == (0.5, 2.5)
    assert names["aten::conv2d"] == (0.5, 1.0)


def test_what_runs_in_an_optimizer_is_the_optimizers():
    events = [
        Event("Optimizer.step#SGD.step", 0, 10 * MS),
        Event("aten::copy_", 1 * MS, 4 * MS),
        Event("aten::copy_", 11 * MS, 1 * MS),
    ]
    assert milliseconds(kernel_times(traced(events, device="cpu", seconds=0.012), calls=1)) == {
        "optimizer": 10.0,
        "copies": 1.0,
    }


def test_on_a_gpu_only_kernels_count_and_gaps_are_idle():
    on = DeviceType.CUDA
    events = [
        Event("aten::conv2d", 0, 50 * MS),
        Event("cudaGraphLaunch", 0, 1 * MS),
        Event("sm90_xmma_fprop_implicit_gemm", 0, 10 * MS, on=on),
        Event("a range of the user's", 0, 40 * MS, on=on, marked=True),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5 * MS, 10 * MS, on=on),  # on another stream, meanwhile
        Event("_normalise", 20 * MS, 5 * MS, on=on),
    ]
    times = kernel_times(traced(events, device="cuda", seconds=0.040), calls=1)
    assert milliseconds(times) == {"convolution, forward": 10.0, "communication": 10.0, "norm": 5.0}
    assert times["idle"] == 20.0  # but for 0 to 15 and 20 to 25
    assert shares(times)["norm"] == pytest.approx(100 * 5 / 45)
    assert brief(times) == "40 ms: convolution 22 %, communication 22 %, norm 11 %, idle 44 %"


def test_the_times_of_a_real_trace_are_those_of_torchs_own_table():
    device = torch.device("cpu")
    tracing = trace.started(device)
    values = torch.ones(64, 3, 32, 32)
    torch.nn.functional.conv2d(values, torch.ones(8, 3, 3, 3)).relu().sum()
    done = trace.stopped(tracing)
    own = {each.key: each.self_cpu_time_total / 1000 for each in done.profiler.key_averages()}
    times = kernel_times(done, calls=1)
    found = {each["name"]: each["milliseconds"] for each in times["kernels"]}
    assert found == pytest.approx(own, rel=1e-3, abs=1e-3)
    assert sum(found.values()) + times["idle"] == pytest.approx(times["milliseconds"], rel=1e-3)
