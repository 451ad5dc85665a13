"""Several gloo processes for a test, forked from a server that has imported everything once."""

import itertools
import multiprocessing.context
import multiprocessing.forkserver
import os
import random
import runpy
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from falconet.parallel.collectives import join
from falconet.parallel.environment import LOOPBACK, PORT, Place

MODULES = [
    "torch",
    "torch.distributed",
    "timm",
    "falconet.train.run",
    "gloo",
    "replica_scenarios",
    "pipeline_scenarios",
]
LIMIT = 300  # seconds for one scenario
PORTS = range(20_000, 32_000)  # the system hands out those above at any time
WORKERS = 16  # pytest workers, at most, that do not share ports


def _ports() -> Iterator[int]:
    """Ports in turn from a random start, because other tests may be running; no two workers share any.

    The port after each is the same worker's, too, and is not handed out.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    own = PORTS[2 * worker :: 2 * WORKERS]
    begin = random.SystemRandom().randrange(len(own))
    return (own[(begin + number) % len(own)] for number in itertools.count())


_NEXT = _ports()


def free_port() -> int:
    """A port that stays free until the caller takes it."""
    for port in _NEXT:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no end to ports")


def errors_in_world(size: int, scenario: Callable[..., Any], *args: object, expected: int) -> dict[int, str]:
    """The last lines of the first `expected` errors, by rank."""
    found: dict[int, str] = {}

    def note(rank, error):
        found[rank] = error.strip().splitlines()[-1]
        return len(found) == expected

    in_world(size, scenario, *args, on_error=note)
    return found


def in_world(size: int, scenario: Callable[..., Any], *args: object, on_error=None) -> list[Any]:
    """Run `scenario(world, *args)` in `size` processes; return the results or raise the first error."""
    context = forkserver()
    port, results = free_port(), context.SimpleQueue()
    processes = [
        context.Process(target=_run, args=(rank, size, port, results, scenario, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found, waiting = {}, dict(enumerate(processes))
    try:
        for _ in range(size):
            rank, result, error = _next_of(results, waiting)
            del waiting[rank]
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


def forkserver() -> multiprocessing.context.ForkServerContext:
    """The process that workers are forked from; it keeps the environment of its start, and so do they."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    multiprocessing.forkserver.ensure_running()
    return context


def forked(config: LaunchConfig, executable: str) -> Callable[..., None]:
    """In the place of torch's agent: workers forked with everything imported. To start one takes seconds."""
    context = forkserver()

    def agent(flag: str, module: str, *words: str) -> None:
        assert (executable, flag) == (sys.executable, "-m")
        with tempfile.TemporaryDirectory() as said:
            line, size = ([module, *words], Path.cwd(), dict(os.environ), Path(said)), config.nproc_per_node
            workers = [context.Process(target=_work, args=(rank, size, *line), daemon=True) for rank in range(size)]
            for worker in workers:
                worker.start()
            while (failed := _failures(workers)) is None:
                wait([worker.sentinel for worker in workers if worker.exitcode is None], LIMIT)
            for worker in workers:
                worker.terminate()
                worker.join(LIMIT)
            for stream in ("out", "err"):
                for rank in range(size):
                    print(Path(said, f"{rank}.{stream}").read_text(), end="", file=getattr(sys, f"std{stream}"))
        if failed:
            raise ChildFailedError(module, failed)

    return agent


def _failures(workers) -> dict[int, ProcessFailure] | None:
    """The failures by rank; None: some workers are still at work, and none has failed."""
    found = {
        rank: ProcessFailure(local_rank=rank, pid=worker.pid, exitcode=worker.exitcode, error_file=os.devnull)
        for rank, worker in enumerate(workers)
        if worker.exitcode
    }
    return found if found or all(worker.exitcode == 0 for worker in workers) else None


def _work(rank, size, argv, folder, variables, said) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    variables |= {name: str(value) for name, value in place.items()}
    variables |= {"FALCONET_LAUNCHER": str(os.getppid()), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(PORT)}
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(said / f"{rank}.{stream}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _next_of(results, waiting) -> tuple[int, Any, str | None]:
    """The next answer; raise if a process exits without one."""
    ready = wait([results._reader, *(process.sentinel for process in waiting.values())], LIMIT)
    died = {rank: process.exitcode for rank, process in waiting.items() if process.sentinel in ready}
    # An answer that came after its pipe was looked at is there before the end that was seen.
    is_there = results._reader in ready or results._reader.poll()
    assert is_there, f"ended without an answer: {died}" if died else f"nothing came within {LIMIT} s"
    return results.get()


def _run(rank, size, port, results, scenario, args) -> None:
    os.environ.pop("FALCONET_LAUNCHER", None)
    torch.set_num_threads(1)
    place = Place(launcher="test", rank=rank, size=size, local_rank=rank, local_size=size, port=port)
    try:
        with join(place, torch.device("cpu"), timeout=LIMIT) as world:
            result = scenario(world, *args)
    except BaseException:  # noqa: BLE001, the parent raises it
        results.put((rank, None, traceback.format_exc()))
    else:
        results.put((rank, result, None))
