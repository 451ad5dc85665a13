"""Meet the other processes of a launcher at the first one's store; Ctrl-C ends the wait.

Torch's own waits are in C++, where Python notices no signal, and report nothing before the time-out.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from falconet.errors import ConfigError, WorldError
from falconet.parallel import environment
from falconet.parallel.environment import TF_CONFIG, Place
from falconet.parallel.network import store_at

QUIET = 5.0  # seconds before a wait is reported
EVERY = 0.05  # seconds between looks
CONNECTING = 1.0  # seconds for an address to answer
READING = 5.0  # seconds for the others to read, before the first process may go on and close the store
CAME, READ = "falconet/came", "falconet/read"
HOST, PROCESS = "host", "process"  # one that starts the processes of its host, or one of them
LISTED = 4  # missing workers that are named


class Wait:
    """A wait for other processes that prints a line after a few seconds and fails after `timeout` seconds."""

    def __init__(self, place: Place, *, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self._start = time.monotonic()
        # A launcher's processes share its terminal; torchrun sees for itself whether one is missing.
        is_heard = place.launcher == TF_CONFIG or place.local_rank == 0
        self._is_silent = not is_heard or environment.has_agent_store(os.environ)

    def pause(self, missing: Callable[[], Sequence[int]], reason: str = "") -> None:
        """Wait a little for those that are `missing`."""
        passed = time.monotonic() - self._start
        if passed > self.timeout:
            waited = f"worker {self.place.rank}: timed out after {self.timeout:g} s"
            raise WorldError(f"{waited} waiting for {self._named(missing())}{reason}")
        if passed > QUIET and not self._is_silent:
            self._is_silent = True
            alone = "; to run on this host alone, unset TF_CONFIG" if self.place.launcher == TF_CONFIG else ""
            sys.stderr.write(f"waiting for {self._named(missing())}{reason}{alone}\n")
            sys.stderr.flush()
        time.sleep(EVERY)

    def _named(self, missing: Sequence[int]) -> str:
        where = f"of {self.place.size} at {self.place.address}:{self.place.port}"
        if len(missing) > LISTED:
            return f"{len(missing)} {where}"
        return f"worker{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} {where}"


def open_store(wait: Wait) -> Store:
    """The store of the first process, at the address that the launcher gave."""
    place, most = wait.place, timedelta(seconds=wait.timeout)
    if place.rank == 0:
        return store_at(place.address, place.port, None, wait=most)  # of None: it does not wait for the others
    while (reason := _unanswered(place)) is not None:
        wait.pause(lambda: [0], f" ({reason})")
    return TCPStore(place.address, place.port, None, False, most)


def exchange(store: Store, kind: str, mine: str, *, wait: Wait) -> list[str]:
    """The text of every process by rank; all must be of one kind, or they would wait for each other elsewhere."""
    place = wait.place
    keys = [f"{CAME}/{rank}" for rank in range(place.size)]
    store.set(keys[place.rank], f"{kind} {mine}")
    while not store.check(keys):
        wait.pause(lambda: [rank for rank, key in enumerate(keys) if not store.check([key])])
    found = [said.decode().partition(" ") for said in store.multi_get(keys)]
    store.add(READ, 1)
    end = time.monotonic() + READING
    while place.rank == 0 and store.add(READ, 0) < place.size and time.monotonic() < end:
        time.sleep(EVERY)
    other = next((rank for rank, (its, _, _) in enumerate(found) if its != found[0][0]), None)
    if other is not None:
        starter, started = (0, other) if found[0][0] == HOST else (other, 0)
        raise ConfigError(
            f"{place.launcher}: worker {starter} starts the processes of its host, and worker {started} does not;"
            " expected the same options, and the same number of workers, on every host"
        )
    return [said for _, _, said in found]


def _unanswered(place: Place) -> str | None:
    """The reason why nothing answers at the address of the first process; None: something does."""
    try:
        with socket.create_connection((place.address, place.port), timeout=CONNECTING):
            return None
    except (OSError, UnicodeError) as error:  # a name that cannot be one
        return str(getattr(error, "strerror", None) or error)
