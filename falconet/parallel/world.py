"""World: which process this is, on which device, and how the processes agree. A world of one is a real World."""

import resource
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from falconet.errors import DeviceError


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
        """Bytes that this process had at the most: of the device's memory on CUDA, else of the machine's."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, on each of them."""
        return values


def open_world(device: Literal["auto", "cpu", "cuda"], *, threads: int, deterministic: bool) -> World:
    """The world of this one process, on the device asked for."""
    torch.set_num_threads(threads)
    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError("--device cuda: PyTorch sees no CUDA device here; --device cpu runs on the processor")
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = not deterministic
        return World(device=torch.device("cuda", torch.cuda.current_device()))
    return World(device=torch.device("cpu"))
