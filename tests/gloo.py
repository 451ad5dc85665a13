"""Several gloo processes for a test: forked from a server that has imported everything once."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

from falconet.parallel.environment import Place
from falconet.parallel.processes import join

MODULES = [
    "torch",
    "torch.distributed",
    "timm",
    "falconet.wiring.running",
    "gloo",
    "replica_scenarios",
    "pipeline_scenarios",
]
LIMIT = 100  # seconds for one scenario


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def errors_in_world(size: int, scenario: Callable[..., Any], *args: object, expected: int) -> dict[int, str]:
    """The last lines of the errors of the first `expected` processes that fail, by rank."""
    found: dict[int, str] = {}

    def note(rank, error):
        found[rank] = error.strip().splitlines()[-1]
        return len(found) == expected

    in_world(size, scenario, *args, on_error=note)
    return found


def in_world(size: int, scenario: Callable[..., Any], *args: object, timeout: float = 60.0, on_error=None) -> list[Any]:
    """What `scenario(world, *args)` returns in each of `size` processes; its first error is raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    port, results = free_port(), context.SimpleQueue()
    processes = [
        context.Process(target=_run, args=(rank, size, port, timeout, results, scenario, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = {}
    try:
        for _ in range(size):
            rank, result, error = results.get()
            if error and on_error:
                if on_error(rank, error):
                    return []
                continue
            if error:
                raise AssertionError(f"rank {rank}:\n{error}")
            found[rank] = result
    finally:
        for process in processes:
            process.join(LIMIT if len(found) == size else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    return [found[rank] for rank in range(size)]


def _run(rank, size, port, timeout, results, scenario, args) -> None:
    os.environ.pop("FALCONET_LAUNCHER", None)
    torch.set_num_threads(1)
    place = Place(launcher="test", rank=rank, size=size, local_rank=rank, local_size=size, port=port)
    try:
        with join(place, torch.device("cpu"), timeout=timeout) as world:
            result = scenario(world, *args)
    except BaseException:  # noqa: BLE001, it is the parent's to raise
        results.put((rank, None, traceback.format_exc()))
    else:
        results.put((rank, result, None))
