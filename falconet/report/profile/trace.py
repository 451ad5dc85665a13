"""Profiler traces that show, kernel by kernel, where the time of an update or a batch goes."""

import contextlib
import ctypes
import gzip
import heapq
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.profiler import ProfilerActivity, profile

from falconet import writing
from falconet.errors import ConfigError
from falconet.report.run_files import PROFILE

BEFORE, TRACED = 4, 2  # the first calls choose kernels, allocate memory and are captured
TRACE, TABLE = "profile.json.gz", "profile.txt"
FILES = (TRACE, TABLE, PROFILE)
MOST_EVENTS = 150_000  # in the trace: about 3 MB
_ROWS = 30
_QUIET = "99"  # above all of kineto's levels: without a GPU, it prints that there is none as an error


@dataclass(frozen=True)
class Tracing:
    """A profiler that is running."""

    profiler: profile
    device: torch.device
    begun: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Traced:
    """The records of a profiler."""

    profiler: profile
    device: torch.device
    seconds: float  # from its start to its end, the profiler's own work excluded

    @property
    def events(self) -> list[Any]:
        """Torch's own records from the host and the device."""
        found: list[Any] = self.profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        return found


def started(device: torch.device, *, memory: bool = False) -> Tracing:
    """Start a profiler once the device is idle; `memory`: record every allocation, too."""
    if _profiler_enabled():
        raise ConfigError("another profiler is running")
    settle(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)  # read when the first profiler starts
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    # There is one cycle, whose events are all kept; without `acc_events` torch 2.11 warns that they were not.
    profiler = profile(activities=kinds, profile_memory=memory, acc_events=True)
    profiler.start()
    return Tracing(profiler, device)


def stopped(tracing: Tracing) -> Traced:
    """Stop a profiler once the device is idle: otherwise the last kernels would be missing."""
    settle(tracing.device)
    seconds = time.perf_counter() - tracing.begun
    tracing.profiler.stop()
    return Traced(tracing.profiler, tracing.device, seconds)


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def warnings_withheld() -> Iterator[None]:
    """Suppress warnings of torch's C++ code, which warns when memory is freed that is older than the profiler.

    Torch reads TORCH_CPP_LOG_LEVEL only when it is imported, so the level is set in its memory.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # another build of torch: the line is printed
        yield
        return
    before, level.value = level.value, max(level.value, 2)
    try:
        yield
    finally:
        level.value = before


def write(traced: Traced, summary: dict[str, object], folder: Path) -> None:
    """Write profile.json.gz, profile.txt and profile_summary.json into a folder."""
    with writing.explained(f"the profile to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        writing.refuse_links(folder, FILES)
        writing.replace(folder, PROFILE, json.dumps(summary, allow_nan=False) + "\n")
        writing.replace(folder, TABLE, _table(traced) + "\n")
        _write_trace(traced, folder)


def _table(traced: Traced) -> str:
    order = "self_cuda_time_total" if traced.device.type == "cuda" else "self_cpu_time_total"
    return str(traced.profiler.key_averages().table(sort_by=order, row_limit=_ROWS))


def _write_trace(traced: Traced, folder: Path) -> None:
    """Write torch's own trace or, if there are very many events, one with only the longest."""
    events = traced.events
    if len(events) > MOST_EVENTS:
        longest = heapq.nlargest(MOST_EVENTS, events, key=lambda event: event.duration_ns())
        content = {"traceEvents": [_chrome_event(event) for event in longest], "displayTimeUnit": "ms"}
        writing.replace(folder, TRACE, gzip.compress(json.dumps(content, separators=(",", ":")).encode()))
        return
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=folder) as aside:  # torch would follow links
        traced.profiler.export_chrome_trace(str(Path(aside) / TRACE))
        (Path(aside) / TRACE).replace(folder / TRACE)


def _chrome_event(event: Any) -> dict[str, object]:
    on_host = event.device_type() == DeviceType.CPU
    return {
        "ph": "X",
        "name": event.name(),
        "pid": "host" if on_host else f"device {event.device_index()}",
        "tid": event.start_thread_id() if on_host else event.device_resource_id(),
        "ts": event.start_ns() / 1000,  # microseconds
        "dur": event.duration_ns() / 1000,
    }


@torch.inference_mode()
def trace_calls(call: Callable[[int], object], *, device: torch.device) -> Traced:
    """Call a function a few times, numbered from 0, and trace the last calls."""
    for number in range(BEFORE):
        call(number)
    tracing = started(device)
    for number in range(BEFORE, BEFORE + TRACED):
        call(number)
    return stopped(tracing)
