"""Who is where: each process says what it is about, so that a time-out can name the one that did not come."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from falconet.errors import WorldError
from falconet.parallel import environment

EVERY = 0.5  # seconds between two looks; publishing costs one message, when something changed or at a beat
BEAT = 1.0  # seconds between two signs of life
SILENCE = 2.5  # seconds without one that tell a process that is gone from one that is busy
PATIENCE = 6.0  # seconds to ask the store for the others' words, twice
GRACE = 30.0  # seconds from the launcher's end to our own, however busy we are
GAVE_UP = " (gave up)"
COURTESY = 3.0  # seconds in which whoever failed first can be seen to have failed


class Liveness:
    """Publishes `doing` from a thread of its own, and reads what the others published."""

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        store.set(f"host/{rank}", socket.gethostname())
        self._hosts = [host.decode() for host in store.multi_get([f"host/{other}" for other in range(size)])]
        self.doing = "starting"
        self.is_asked: Callable[[], bool] = lambda: False  # to stop
        self._store = store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="liveness", daemon=True)
        self._thread.start()

    def _publish(self) -> None:
        said, at, beat, since = "", 0.0, 0, time.time()
        while True:
            doing, now = self.doing, time.monotonic()
            if doing != said or now >= at + BEAT:
                try:
                    since = since if doing == said else time.time()
                    self._store.set(_key(self.rank), f"{beat} {since:.1f} {doing}")
                except (DistError, RuntimeError):
                    return  # the store is the first process's: it is gone, and whoever waits for it will say so
                said, at, beat = doing, now, beat + 1
            if self._ended.wait(EVERY):
                return

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def timed_out(self, seconds: float) -> WorldError:
        """The error of this process, naming those that are not where it is."""
        here = self.doing
        self.doing = f"{here}{GAVE_UP}"
        said, silent = self._asked()
        # Who gives no sign of life is to blame; the living may wait elsewhere for the same one.
        missing = sorted(silent) or [rank for rank in self._others if not _is_at(said.get(rank), here)]
        absent = [f"rank {rank}{self._place(rank)} {_absent(said.get(rank), rank in silent)}" for rank in missing]
        found = "; ".join(absent) or "every process is there, so the network between them is to blame"
        return WorldError(f"rank {self.rank}: waited {seconds:g} s in vain at {here}: {found}")

    def lost(self, operation: str, error: RuntimeError) -> WorldError:
        """The error of a process that was cut off from another; comes late, so that the other's own error is the news.

        Our launcher ends this process meanwhile, and says who went, if one has. It cannot see a device that fails.
        """
        with contextlib.suppress(ValueError):  # not in autograd's own threads
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher may end us now: there is nothing left to save
            if environment.OWN in os.environ and self.is_asked():  # it saw the other one go before we did
                os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(COURTESY)
        said, silent = self._asked()
        gone = [rank for rank in self._others if rank in silent or rank not in said]
        absent = [f"rank {rank} on {self._hosts[rank]} {_absent(said.get(rank), rank in silent)}" for rank in gone]
        found = f"{'; '.join(absent)}; see what it said last" if absent else self._network()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return WorldError(f"rank {self.rank}: lost another process, {operation} ({reason}): {found}{_how()}")

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _network(self) -> str:
        hosts = ", ".join(sorted(set(self._hosts)))
        return f"every process gives signs of life, so a device or the network of {hosts} is to blame"

    def _asked(self) -> tuple[dict[int, str], set[int]]:
        """Each process's last words, where it answers, and those that give no sign of life."""
        said: dict[int, str] = {}
        silent: set[int] = set()
        # In a thread: the store is the first process's, and a client of a store that is stopped waits for ever.
        asking = threading.Thread(target=self._ask, args=(said, silent), name="asking", daemon=True)
        asking.start()
        asking.join(PATIENCE)
        return dict(said), set(silent)

    def _place(self, rank: int) -> str:
        """Its host, where there are several."""
        return f" on {self._hosts[rank]}" if len(set(self._hosts)) > 1 else ""

    def _ask(self, said: dict[int, str], silent: set[int]) -> None:
        """Each process's words, and again after a while: who still lives has a new beat, whatever its clock says."""
        self._read(said)
        time.sleep(SILENCE)
        again: dict[int, str] = {}
        self._read(again)
        same = {rank for rank, words in again.items() if words == said.get(rank)}
        gave_up = {rank for rank in same if said[rank].endswith(GAVE_UP)}  # and may have ended
        silent.update(same - gave_up - {self.rank})
        said.update(again)

    def _read(self, said: dict[int, str]) -> None:
        for rank in range(self.size):
            with contextlib.suppress(DistError, RuntimeError):
                self._store.wait([_key(rank)], timedelta(seconds=1))
                said[rank] = self._store.get(_key(rank)).decode()


def _is_at(words: str | None, here: str) -> bool:
    return words is not None and words.split(" ", 2)[2].removesuffix(GAVE_UP) == here


def _absent(words: str | None, is_silent: bool) -> str:
    if words is None:
        return "does not answer"
    _, since, doing = words.split(" ", 2)
    what = "gives no sign of life" if is_silent else "did not come"
    return f"{what}, it was last seen {time.time() - float(since):.0f} s ago at {doing}"


def _how() -> str:
    """What to do; our own launcher starts all again, or says it itself."""
    return "" if os.environ.get(environment.OWN) else "; the same line with --resume goes on from the newest checkpoint"


def follow(launcher: int) -> None:
    """Stop, with a checkpoint if there is time for one, when the process that started us is gone."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _key(rank: int) -> str:
    return f"doing/{rank}"
