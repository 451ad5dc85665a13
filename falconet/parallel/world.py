"""World: the processes of a run, their devices, and how they agree; a single process is a World too."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from falconet.config import options
from falconet.config.fields import value_or
from falconet.errors import ConfigError, DeviceError, named_option
from falconet.parallel.environment import Place, cores_of, threads_of
from falconet.parallel.host import keep_freed_memory, own_peak


@dataclass(frozen=True, kw_only=True)
class World:
    """All processes of a run, seen from one of them."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def peak_memory(self) -> int:
        """Peak bytes of this process: of device memory on CUDA, else of host memory."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return own_peak()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, returned on each."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over all processes, returned on each."""
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        """The first process's values, returned on each."""
        return values

    def barrier(self, operation: str) -> None:
        """Wait for every process; `operation` names this point in a time-out."""

    def once(self, make: Callable[[], str]) -> str:
        """Call `make` on the first process only, and return its result on all."""
        return make()

    def texts(self, mine: str, operation: str) -> list[str]:  # noqa: ARG002
        """The texts of all processes, by rank; `operation` names this point in a time-out."""
        return [mine]

    def agree(self, what: str, mine: str) -> None:
        """Raise DeviceError if the processes differ in what must be the same on all."""

    def counter(self, what: str) -> Callable[[str], int]:
        """A counter of distinct things over all processes; returns their number, the new one included."""
        seen: set[tuple[str, str]] = set()

        def count(thing: str) -> int:
            seen.add((what, thing))
            return len(seen)

        return count

    def vote(self) -> Callable[[bool], bool]:
        """A function that asks, once per update, whether any process votes yes, without synchronising devices."""
        return bool

    def replay_watch(self) -> Callable[[], None]:
        """A function to call after each replay of captured messages, which ends the process if one never ends."""
        return lambda: None

    def heeds(self, is_asked: Callable[[], bool]) -> None:
        """Set the function that tells whether this process was asked to stop."""

    def at(self, moment: str) -> None:
        """Publish what this process is doing, for others to read if it stops answering."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the world."""


ALONE = World(device=torch.device("cpu"))


def open_world(
    device: Literal["auto", "cpu", "cuda"],
    *,
    threads: int,
    deterministic: bool,
    place: Place | None = None,
    timeout: float = 600.0,
) -> World:
    """Open the world on this device: this process alone, or all that a launcher started.

    `timeout`: the seconds that one process waits for another.
    """
    torch.set_num_threads(threads)
    chosen = _device(device_kind(device), place, deterministic=deterministic)
    if chosen.type == "cpu":
        keep_freed_memory(os.environ)
    if place is None:
        return World(device=chosen)
    from falconet.parallel.collectives import join  # torch.distributed takes a second to import

    return join(place, chosen, timeout=timeout)


def keep_compiled(folder: Path | None) -> None:
    """Make Triton and torch's compiler keep their output in `folder`; call this before the first kernel is compiled.

    cuDNN and cuBLAS are already compiled; cuDNN cannot store which of its kernels are fastest.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; expected a folder that you may write to") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: may not be written to; expected a folder that you may write to")
    os.environ |= {"TRITON_CACHE_DIR": str(folder.resolve()), "TORCHINDUCTOR_CACHE_DIR": str(folder.resolve())}


def device_kind(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def require_device(device: Literal["auto", "cpu", "cuda"]) -> None:
    """Refuse a device that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device cuda: PyTorch finds no CUDA device here; device cpu runs on the processor")


def _device(kind: Literal["cpu", "cuda"], place: Place | None, *, deterministic: bool) -> torch.device:
    require_device(kind)
    if kind == "cpu":
        return torch.device("cpu")
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    if place is not None:
        count = torch.cuda.device_count()
        if place.local_size > count:
            devices = "1 CUDA device" if count == 1 else f"{count} CUDA devices"
            raise DeviceError(
                f"{place.launcher}: started {place.local_size} processes on this host, which has {devices};"
                " expected one process per device"
            )
        torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", torch.cuda.current_device())


def cores(processes: int = 1) -> int:
    """The cores for this process, or for each of `processes` that are still to be started."""
    host = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    return cores_of(os.environ, host=host, own=own, expected=processes)


def threads(processes: int = 1) -> int:
    """The CPU threads for this process, or for each of `processes` that are still to be started."""
    return threads_of(os.environ, cores=cores(processes))


def open_machine(machine: options.Machine, *, place: Place | None = None) -> World:
    """Open the world that the options ask for: this process, or all that a launcher started."""
    count = value_or(machine.threads, threads())
    with named_option("model_cache_path"):
        keep_compiled(machine.model_cache_path)
    return open_world(machine.device, threads=count, deterministic=machine.deterministic, place=place)
