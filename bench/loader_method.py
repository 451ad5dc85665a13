"""What bench/loader.py measures: a way to read photos, and the numbers that all ways share."""

import time
from collections.abc import Callable
from dataclasses import dataclass

SIZE, RESIZE, BATCH = 224, 256, 64
Epoch = Callable[[int], int]  # reads every photo once; how many


@dataclass(frozen=True)
class Method:
    """One way to read the photos: by one thread, and by loaders that stay up between rounds."""

    name: str
    alone: Epoch
    loaders: dict[int, Epoch]  # by workers
    clock: Callable[[], float] = time.thread_time  # of `alone`; the process's where it has a thread of its own
