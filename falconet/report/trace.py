"""Profiler traces: where the time of an update or a batch goes."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from falconet import writing
from falconet.errors import ConfigError

BEFORE, TRACED = 3, 3  # the first calls choose kernels and allocate memory
TRACE, TABLE = "profile.json", "profile.txt"
_ROWS = 30


def started(device: torch.device) -> profile:
    """Start a profiler."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    traced = profile(activities=kinds, record_shapes=True)
    traced.start()
    return traced


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write(traced: profile, folder: Path, *, device: torch.device) -> None:
    """Stop a profiler and write profile.json and profile.txt into a folder."""
    settle(device)  # otherwise the last kernels are missing from the trace
    traced.stop()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writing.refuse_links(folder, (TRACE, TABLE))
        with tempfile.TemporaryDirectory(prefix=".profile-", dir=folder) as aside:  # torch would follow links
            traced.export_chrome_trace(str(Path(aside) / TRACE))
            (Path(aside) / TRACE).replace(folder / TRACE)
        order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = traced.key_averages().table(sort_by=order, row_limit=_ROWS)
        writing.replace(folder, TABLE, table + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the profile to {folder}: {error.strerror or error}") from error


@torch.inference_mode()
def write_trace(call: Callable[[int], object], folder: Path, *, device: torch.device) -> None:
    """Call a function a few times, numbered from 0, and trace the last calls."""
    for number in range(BEFORE):
        call(number)
    traced = started(device)
    for number in range(BEFORE, BEFORE + TRACED):
        call(number)
    write(traced, folder, device=device)
