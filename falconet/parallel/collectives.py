"""Who is where: each process says what it is about, so that a time-out can name the one that did not come."""

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from falconet.errors import ConfigError, DeviceError, SaidElsewhereError, UserError, WorldError
from falconet.parallel import environment, listening
from falconet.parallel.environment import Place
from falconet.parallel.world import World

EVERY = 0.5  # seconds between two looks; publishing costs one message, when something changed or at a beat
BEAT = 1.0  # seconds between two signs of life
SILENCE = 2.5  # seconds without one that tell a process that is gone from one that is busy
PATIENCE = 6.0  # seconds to ask the store for the others' words, twice
GRACE = 30.0  # seconds from the launcher's end to our own, however busy we are
GAVE_UP = " (gave up)"
COURTESY = 3.0  # seconds in which whoever failed first can be seen to have failed


class Folder:
    """Words in files, each written anew: torch's FileStore keeps every value that was ever set, 100 bytes a beat."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, key: str, value: str) -> None:
        new = self._file(f"{key}.new")
        new.write_text(value)
        new.replace(self._file(key))  # read whole, or not yet

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """A process writes as soon as it is there: whose file is missing is not waited for."""

    def get(self, key: str) -> bytes:
        return self._file(key).read_bytes()

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "-")


class Liveness:
    """Publishes `doing` from a thread of its own, and reads what the others did: in `board`, else in the store."""

    def __init__(self, store: Store, *, rank: int, size: int, board: Folder | None = None) -> None:
        self.rank, self.size = rank, size
        store.set(f"host/{rank}", socket.gethostname())
        self._hosts = [host.decode() for host in store.multi_get([f"host/{other}" for other in range(size)])]
        self.doing = "starting"
        self.is_asked: Callable[[], bool] = lambda: False  # to stop
        self._board: Folder | Store = board or store
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
                    self._board.set(_key(self.rank), f"{beat} {since:.1f} {doing}")
                except (DistError, RuntimeError, OSError):
                    return  # a store is the first process's: it is gone, and the process that waits for it will say so
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
        # In a thread: a store is the first process's, and a client of a store that is stopped waits for ever.
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
            with contextlib.suppress(DistError, RuntimeError, OSError):
                self._board.wait([_key(rank)], timedelta(seconds=1))
                said[rank] = self._board.get(_key(rank)).decode()


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


SAYING = 2.0  # seconds in which the first process may say what went wrong on all of them
STAYING = 1.0  # seconds that it waits for them to ask
NAMES = "surrogateescape"  # how Python holds names of files that are no UTF-8


@dataclass(frozen=True, kw_only=True)
class Processes(World):
    """Several processes, one replica each."""

    store: Store = field(repr=False)
    host: dist.ProcessGroup = field(repr=False)  # for what is on the host, whatever the device
    group: dist.ProcessGroup | None = field(default=None, repr=False)  # for what is on the device; None: all processes
    alive: Liveness = field(repr=False)
    timeout: float  # seconds

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM, "summing over the processes")

    def max(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX, "taking the largest over the processes")

    def broadcast(self, values: Tensor) -> Tensor:
        received = values.detach().clone()
        with self.waiting("taking over the first process's values"):
            dist.broadcast(received, group_src=0, group=self._group(values))
        return received

    def barrier(self, operation: str) -> None:
        with self.waiting(operation):
            dist.all_reduce(torch.zeros(1), group=self.host)

    def once(self, make: Callable[[], str]) -> str:
        text = make() if self.is_first else ""
        return self.texts(text, "waiting for the first process")[0]

    def agree(self, what: str, mine: str) -> None:
        texts = self.texts(mine, f"comparing {what}")
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise DeviceError(
                    f"{what}: is '{text}' in process {self.global_rank(rank)} and '{texts[0]}' in process"
                    f" {self.global_rank(0)}; wanted the same in both"
                )

    def counter(self, what: str) -> Callable[[str], int]:
        """From any thread, and without waiting for the others: the first process's store counts."""

        def count(thing: str) -> int:
            key = f"{what}/{_digest(thing)}"
            return self.store.add(what, int(self.store.add(key, 1) == 1))

        return count

    def vote(self) -> Callable[[bool], bool]:
        return _Vote(self)

    def heeds(self, is_asked: Callable[[], bool]) -> None:
        self.alive.is_asked = is_asked

    def at(self, moment: str) -> None:
        self.alive.doing = moment

    @contextlib.contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Within it, this process may wait for others; what goes wrong is said with rank and operation."""
        before, self.alive.doing = self.alive.doing, f"{self.alive.doing}, {operation}"
        try:
            yield
        except torch.OutOfMemoryError:
            raise  # nobody else's fault
        except RuntimeError as error:  # of gloo and of NCCL; neither has a class of its own for a time-out
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise self.alive.timed_out(self.timeout) from error
            raise self.alive.lost(operation, error) from error
        self.alive.doing = before

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """On an error the others are not waited for: they find this process gone, and go too."""
        if error is None:
            self.barrier("ending the run")
            self.alive.close()
            dist.destroy_process_group()
        elif isinstance(error, UserError):
            raise self._said(error) from None

    def _said(self, error: UserError) -> UserError:
        """The same error, said by one process: the first if it has it too, else by this one with its rank."""
        key = f"said/{_digest(str(error))}"
        heard = f"{key}/heard"
        if self.is_first:
            self.store.set(key, "")
            self._stay_until(heard)
            return error
        try:
            self.store.wait([key], timedelta(seconds=SAYING))
            self.store.add(heard, 1)
        except (dist.DistError, RuntimeError):
            return type(error)(f"rank {self.rank}: {error}")
        return SaidElsewhereError(str(error))

    def _stay_until(self, heard: str) -> None:
        """Its store ends with the first process: those with the same error are given time to ask it."""
        deadline = time.monotonic() + STAYING
        with contextlib.suppress(dist.DistError, RuntimeError):  # torchrun may hold the store, and be gone
            while self.store.add(heard, 0) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(0.02)

    def _reduced(self, values: Tensor, how: dist.ReduceOp.RedOpType, operation: str) -> Tensor:
        result = values.detach().clone()
        with self.waiting(operation):
            dist.all_reduce(result, how, group=self._group(values))
        return result

    def _group(self, values: Tensor) -> dist.ProcessGroup | None:
        return self.host if values.device.type == "cpu" else self.group

    def global_rank(self, rank: int) -> int:
        """The number, among all processes, of one of ours."""
        return dist.get_global_rank(self.host, rank)

    def texts(self, mine: str, operation: str) -> list[str]:
        """The texts of all processes, in order; as bytes, because torch's own way is to pickle them."""
        data = mine.encode(errors=NAMES)
        longest = int(self.max(torch.tensor(len(data))))
        padded = torch.zeros(longest + 1, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        received = [torch.empty_like(padded) for _ in range(self.size)]
        with self.waiting(operation):
            dist.all_gather(received, padded, group=self.host)
        return [bytes(each.tolist()).rstrip(b"\0").decode(errors=NAMES) for each in received]


class _Vote:
    """The answer comes one call late, so that nobody waits for the network; it is the same on every process."""

    def __init__(self, world: Processes) -> None:
        self._world = world
        self._cast: tuple[dist.Work, Tensor] | None = None

    def __call__(self, mine: bool) -> bool:
        answer = self._count()
        ballot = torch.tensor(int(mine))
        with self._world.waiting("asking whether to stop"):
            work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._world.host, async_op=True)
        self._cast = work, ballot
        return answer

    def _count(self) -> bool:
        if self._cast is None:
            return False
        work, ballot = self._cast
        with self._world.waiting("asking whether to stop"):
            work.wait()
        return bool(ballot)


def join(place: Place, device: torch.device, *, timeout: float) -> Processes:
    """Meet the other processes that the launcher started."""
    if os.environ.get(environment.OWN):
        follow(int(os.environ[environment.OWN]))
    wait = timedelta(seconds=timeout)
    try:
        folder = os.environ.get(environment.MEETING)
        store = _in_folder(Path(folder), place, wait) if folder else _at_port(place, wait)
        if folder or _share_a_network(store, place):
            listening.keep_to_loopback()
        backend = "nccl" if device.type == "cuda" else "gloo"
        own = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=wait, device_id=own
        )
        host = dist.new_group(backend="gloo", timeout=wait)
        board = Folder(Path(folder)) if folder else None
        alive = Liveness(PrefixStore("falconet", store), rank=place.rank, size=place.size, board=board)
    except (OSError, dist.DistNetworkError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise _taken(place) from error
        raise WorldError(
            f"rank {place.rank}: cannot reach {folder or f'{place.address}:{place.port}'}: {_first_line(error)}"
        ) from error
    except RuntimeError as error:  # a FileStore has no class of its own for a time-out
        if not isinstance(error, dist.DistError) and not folder:
            raise
        raise WorldError(
            f"rank {place.rank}: the {place.size} processes did not meet within {timeout:g} s: {_first_line(error)}"
        ) from error
    sys.excepthook = _with_rank(place.rank)
    assert isinstance(host, dist.ProcessGroup)
    return Processes(
        device=device, rank=place.rank, size=place.size, store=store, host=host, alive=alive, timeout=timeout
    )


def _in_folder(folder: Path, place: Place, wait: timedelta) -> Store:
    """A store that is a file in our launcher's private folder: no port, and closed to other users of this host."""
    if place.rank == 0:
        (folder / environment.FIRST).touch()
    store = FileStore(str(folder / "store"), place.size)
    store.set_timeout(wait)
    return store


def _at_port(place: Place, wait: timedelta) -> Store:
    """The store of the first process, at the address that the launcher told all, or of torchrun."""
    if place.rank or environment.has_agent_store(os.environ):
        return TCPStore(place.address, place.port, place.size, is_master=False, timeout=wait)
    return listening.store_at(place.address, place.port, place.size, wait=wait)


def _share_a_network(store: Store, place: Place) -> bool:
    """Whether all processes are on one host, whatever the launcher calls it."""
    own = listening.network()
    keys = [f"falconet/network/{rank}" for rank in range(place.size)]
    store.set(keys[place.rank], own)
    return own != "" and all(other == own.encode() for other in store.multi_get(keys))


def _with_rank(rank: int) -> Callable[..., None]:
    """Prints an error that nobody caught with the rank before each line: several processes share the screen."""

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        lines = "".join(traceback.format_exception(kind, error, at)).splitlines()
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))

    return hook


def _taken(place: Place) -> ConfigError:
    """A port that a person chose is theirs to change."""
    return ConfigError(
        f"MASTER_PORT: {place.port} is in use on {place.address}; wanted a free one, such as {place.port + 1}"
    )


def _digest(text: str) -> str:
    return sha256(text.encode(errors=NAMES)).hexdigest()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
