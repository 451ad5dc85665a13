"""Memory that runs out, wherever it does: one line, and no traceback."""

import errno
import io
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from falconet.checkpoint import format
from falconet.commands import bench_infer, data_bench
from falconet.data import buffers, dataset, loader
from falconet.errors import memory_shortage
from falconet.infer.predictor import Predictor
from falconet.parallel.collectives import Processes
from falconet.serve import app, connections
from falconet.serve.batching import _failure
from falconet.train import build, defaults
from tiny import TINY

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB")
HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you")
SHORTAGES = {
    "torch on the host": HOST,
    "torch on the device": CUDA,
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "python": MemoryError(),
    "numpy": np._core._exceptions._ArrayMemoryError((1 << 40,), np.dtype(np.uint8)),
    "system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "a library": ImportError("libx.so: failed to map segment from shared object: Cannot allocate memory"),
}


@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES)
def test_every_way_to_say_so_is_recognised(shortage):
    where = "device" if "CUDA" in str(shortage) else "host"
    found = memory_shortage(shortage)
    assert found.startswith(f"out of memory on the {where}")
    assert ("2.50 GiB" in found) == (shortage is CUDA)
    assert ("1.00 TiB" in found) == isinstance(shortage, np._core._exceptions._ArrayMemoryError)


@pytest.mark.parametrize("other", [RuntimeError("no"), OSError(errno.ENOENT, "no"), ValueError("out of memory")])
def test_other_errors_are_not_taken_for_it(other):
    assert memory_shortage(other) is None


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


PLACES = {
    "opening data": (dataset, "open_dataset", "train {tiny} --run-dir r", defaults),
    "building a model": (build.BuiltPhase, "new_state", "train {tiny} --run-dir r", None),
    "a loader thread": (buffers.PixelRows, "read", "train {tiny} --run-dir r", None),
    "pinned buffers": (loader.Resources, "batch_for", "train {tiny} --run-dir r", None),
    "saving": (format, "write", "train {tiny} --run-dir r", None),
    "measuring speed": (bench_infer, "_held", "bench infer {tiny}", None),
    "measuring data": (data_bench, "_pipeline", "data bench --data digits --device cpu", None),
}


@pytest.mark.parametrize("shortage", [CUDA, MemoryError(), SHORTAGES["system"]], ids=["torch", "python", "system"])
@pytest.mark.parametrize("place", PLACES)
def test_running_out_of_memory_is_one_line(falconet, monkeypatch, place, shortage):
    owner, name, line, importer = PLACES[place]
    monkeypatch.setattr(importer or owner, name, failing(shortage))
    if place == "measuring speed":
        monkeypatch.setattr(bench_infer, "BatchShape", failing(shortage))
    answer = falconet(line.format(tiny=TINY if "train" in line else "--data generated --image-size 8 --device cpu"))
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert ": out of memory on the " in answer.err


@pytest.mark.parametrize("command", ["validate", "average", "restore"])
def test_running_out_of_memory_with_a_checkpoint_is_one_line(falconet, monkeypatch, command):
    assert falconet(f"train {TINY} --run-dir r").code == 0
    monkeypatch.setattr(format, "read_tensors", failing(MemoryError()))
    more = {"restore": " --epoch 3", "average": " --weight-avg-N 1"}.get(command, "")
    answer = falconet(f"{command} --checkpoint-input-path r{more}")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert "out of memory on the host" in answer.err


def test_a_server_that_does_not_fit_says_so_when_it_starts(falconet, monkeypatch):
    monkeypatch.setattr(Predictor, "lanes", failing(CUDA))
    answer = falconet(
        "serve --model resnet8-cifar --image-size 8 --classes 5 --port 0 --threads 1 --device cpu --engine torch"
    )
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert answer.err.startswith("falconet serve: out of memory on the device (tried to allocate 2.50 GiB)")


@pytest.mark.parametrize(("error", "lines"), [(CUDA, 1), (RuntimeError("no"), 3)])
def test_a_server_logs_a_shortage_in_one_line_and_a_fault_with_its_traceback(error, lines):
    import asyncio

    async def handler(_):
        raise _failure(error)

    written = io.StringIO()
    logged = logging.StreamHandler(written)
    connections.LOG.addHandler(logged)
    try:
        answer = asyncio.run(app._in_one_line(SimpleNamespace(), handler))
    finally:
        connections.LOG.removeHandler(logged)
    assert answer.status == 500
    assert (written.getvalue().count("\n") == 1) == (lines == 1)
    assert ("Traceback" in written.getvalue()) == (lines > 1)


@pytest.mark.parametrize("error", [CUDA, SHORTAGES["cublas"]])
def test_a_shortage_among_processes_is_not_taken_for_a_lost_one(error):
    world = object.__new__(Processes)
    object.__setattr__(world, "alive", SimpleNamespace(doing=""))
    with pytest.raises(type(error), match=r"CUDA"), world.waiting("summing"):
        raise error
