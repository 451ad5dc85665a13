"""A world of several processes: collectives with a time-out that names the process that did not arrive."""

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
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

from falconet import exits
from falconet.errors import ConfigError, DeviceError, SaidElsewhereError, UserError, WorldError, memory_shortage
from falconet.parallel import environment, meeting, network
from falconet.parallel.environment import Place
from falconet.parallel.meeting import Wait
from falconet.parallel.world import World

EVERY = 0.5  # seconds between checks; publishing costs one message, after a change or at a beat
BEAT = 1.0  # seconds between signs of life
SILENCE = 2.5  # seconds without one after which a process counts as lost, not busy
PATIENCE = 6.0  # seconds to read the states of the others twice
GRACE = 30.0  # seconds from the end of the launcher to ours, however busy we are
GAVE_UP = " (gave up)"
MARGIN = 2 * PATIENCE  # seconds for the main thread to report a time-out itself
COURTESY = 3.0  # seconds for the process that failed first to be seen
REGISTERS = "NCCL_GRAPH_REGISTER"  # NCCL's own variable


class Folder:
    """Values in files that are overwritten; torch's FileStore would keep every value, 100 bytes per beat."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, key: str, value: str) -> None:
        new = self._file(f"{key}.new")
        new.write_text(value)
        new.replace(self._file(key))  # atomic for readers

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Do nothing: every process writes its file as soon as it starts."""

    def get(self, key: str) -> bytes:
        return self._file(key).read_bytes()

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "-")


class Liveness:
    """Publishes `doing` from a thread, and reads it from other processes, through `board` or else the store."""

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
        published, at, beat, since = "", 0.0, 0, time.time()
        while True:
            doing, now = self.doing, time.monotonic()
            if doing != published or now >= at + BEAT:
                try:
                    since = since if doing == published else time.time()
                    self._board.set(_key(self.rank), f"{beat} {since:.1f} {doing}")
                except (DistError, RuntimeError, OSError):
                    return  # the first process, which holds the store, has gone; one that waits for it reports that
                published, at, beat = doing, now, beat + 1
            if self._ended.wait(EVERY):
                return

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def timed_out(self, seconds: float) -> WorldError:
        """The error for a time-out, naming the processes that did not arrive here."""
        here = self.doing
        self.doing = f"{here}{GAVE_UP}"
        said, silent = self._asked()
        # Blame those without a sign of life: the others may be waiting for them elsewhere.
        missing = sorted(silent) or [rank for rank in self._others if not _is_at(said.get(rank), here)]
        absent = [f"rank {rank}{self._place(rank)} {_absent(said.get(rank), rank in silent)}" for rank in missing]
        found = "; ".join(absent) or "all processes are there, so suspect the network between them"
        return WorldError(f"rank {self.rank}: timed out after {seconds:g} s in {here}: {found}")

    def lost(self, operation: str, error: RuntimeError) -> WorldError:
        """The error for losing another process, delayed so that the other's error is reported first.

        Meanwhile our launcher ends this process and reports the failed one; it cannot see a failing device.
        """
        with contextlib.suppress(ValueError):  # not possible in autograd's threads
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher may end us now: nothing is left to save
            if environment.OWN in os.environ and self.is_asked():  # it noticed the other one first
                os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(COURTESY)
        said, silent = self._asked()
        gone = [rank for rank in self._others if rank in silent or rank not in said]
        absent = [f"rank {rank} on {self._hosts[rank]} {_absent(said.get(rank), rank in silent)}" for rank in gone]
        found = f"{'; '.join(absent)}; see its last output" if absent else self._network()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return WorldError(f"rank {self.rank}: lost another process while {operation} ({reason}): {found}{_how()}")

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _network(self) -> str:
        hosts = ", ".join(sorted(set(self._hosts)))
        return f"all processes are alive, so suspect a device or the network of {hosts}"

    def _asked(self) -> tuple[dict[int, str], set[int]]:
        """The last state of each process that answers, and the set of those without a sign of life."""
        said: dict[int, str] = {}
        silent: set[int] = set()
        # In a thread: the first process holds the store, and a client of a stopped store hangs.
        asking = threading.Thread(target=self._ask, args=(said, silent), name="asking", daemon=True)
        asking.start()
        asking.join(PATIENCE)
        return dict(said), set(silent)

    def _place(self, rank: int) -> str:
        """The host of a process in words, if there are several hosts."""
        return f" on {self._hosts[rank]}" if len(set(self._hosts)) > 1 else ""

    def _ask(self, said: dict[int, str], silent: set[int]) -> None:
        """Read all states twice: a live process has a new beat the second time, whatever its clock."""
        self._read(said)
        time.sleep(SILENCE)
        again: dict[int, str] = {}
        self._read(again)
        same = {rank for rank, words in again.items() if words == said.get(rank)}
        gave_up = {rank for rank in same if said[rank].endswith(GAVE_UP)}  # these may have exited
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
    what = "gives no sign of life" if is_silent else "did not arrive"
    return f"{what}, last seen {time.time() - float(since):.0f} s ago in {doing}"


def _how() -> str:
    """Advice for the user, unless our own launcher restarts the workers or reports the error."""
    return "" if os.environ.get(environment.OWN) else "; resume the run to continue from the newest checkpoint"


def follow(launcher: int) -> None:
    """Stop, with a checkpoint if there is time, when the process that started us has exited."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _key(rank: int) -> str:
    return f"doing/{rank}"


SAYING = 2.0  # seconds for the first process to report an error of all of them
STAYING = 1.0  # seconds that it stays for the others to ask
NAMES = "surrogateescape"  # how Python holds file names that are not UTF-8


@dataclass(frozen=True, kw_only=True)
class Processes(World):
    """Several processes, one replica each."""

    store: Store = field(repr=False)
    host: dist.ProcessGroup = field(repr=False)  # for host tensors, whatever the device
    group: dist.ProcessGroup | None = field(default=None, repr=False)  # for device tensors; None for all processes
    alive: Liveness = field(repr=False)
    timeout: float  # seconds

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM, "summing over the processes")

    def max(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX, "taking the maximum over the processes")

    def broadcast(self, values: Tensor) -> Tensor:
        received = values.detach().clone()
        with self.waiting("receiving the first process's values"):
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
                    f" {self.global_rank(0)}; expected the same in both"
                )

    def counter(self, what: str) -> Callable[[str], int]:
        """A counter that may be called from any thread and does not wait for other processes: the store counts."""

        def count(thing: str) -> int:
            key = f"{what}/{_digest(thing)}"
            return self.store.add(what, int(self.store.add(key, 1) == 1))

        return count

    def vote(self) -> Callable[[bool], bool]:
        return _Vote(self)

    def replay_watch(self) -> Callable[[], None]:
        return _ReplayWatch(self)

    def heeds(self, is_asked: Callable[[], bool]) -> None:
        self.alive.is_asked = is_asked

    def at(self, moment: str) -> None:
        self.alive.doing = moment

    @contextlib.contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """A context in which this process may wait for others; errors name the rank and the operation."""
        before, self.alive.doing = self.alive.doing, f"{self.alive.doing}, {operation}"
        try:
            yield
        except RuntimeError as error:  # gloo and NCCL have no class for a time-out
            if memory_shortage(error) is not None or self._captures:
                raise  # an error of this process: a capture sends nothing and waits for no other
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise self.alive.timed_out(self.timeout) from error
            raise self.alive.lost(operation, error) from error
        self.alive.doing = before

    @property
    def _captures(self) -> bool:
        try:
            return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # an earlier error of the device's
            return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave together; after an error, do not wait for the others, who will notice and stop too."""
        if error is None:
            self.barrier("ending the run")
            self.alive.close()
            dist.destroy_process_group()  # NCCL waits here until no graph with its messages is left
        elif isinstance(error, UserError):
            raise self._said(error) from None

    def _said(self, error: UserError) -> UserError:
        """The error to raise so that it is reported once: by the first process if it has it too, else by this one."""
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
        said = SaidElsewhereError(str(error))
        said.code = error.code
        return said

    def _stay_until(self, heard: str) -> None:
        """Wait until the others have asked about the same error, because the store ends with the first process."""
        deadline = time.monotonic() + STAYING
        with contextlib.suppress(dist.DistError, RuntimeError):  # torchrun may hold the store and have exited
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
        """The rank among all processes, for a rank in this world."""
        return dist.get_global_rank(self.host, rank)

    def texts(self, mine: str, operation: str) -> list[str]:
        """The texts of all processes by rank, sent as bytes because torch would pickle them."""
        data = mine.encode(errors=NAMES)
        longest = int(self.max(torch.tensor(len(data))))
        padded = torch.zeros(longest + 1, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        received = [torch.empty_like(padded) for _ in range(self.size)]
        with self.waiting(operation):
            dist.all_gather(received, padded, group=self.host)
        return [bytes(each.tolist()).rstrip(b"\0").decode(errors=NAMES) for each in received]


class _Vote:
    """A vote whose answer comes one call late, so that no process waits for the network."""

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


class _ReplayWatch:
    """Ends this process if the device waits in a captured update for a message that does not come.

    NCCL's watchdog does not see captured messages. The main thread may itself wait for the device, where neither an
    error nor a signal would reach it, so the error is printed from here.
    """

    def __init__(self, world: Processes) -> None:
        self._world = world
        self._pending: deque[torch.cuda.Event] = deque()  # replays, in order
        self._first: torch.cuda.Event | None = None  # that has not ended
        self._since = 0.0
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="replays", daemon=True).start()

    def __call__(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append(event)

    def is_overdue(self) -> bool:
        first = self._next()
        if first is not self._first:
            self._first, self._since = first, time.monotonic()
        return first is not None and time.monotonic() - self._since > self._world.timeout + MARGIN

    def _next(self) -> torch.cuda.Event | None:
        """The first unfinished replay; None: all have ended, or the device has failed, which the step reports."""
        try:
            while self._pending and self._pending[0].query():  # type: ignore[no-untyped-call]
                self._pending.popleft()
        except RuntimeError:
            self._pending.clear()
        return self._pending[0] if self._pending else None

    def end(self) -> None:
        sys.stderr.write(f"{self._world.alive.timed_out(self._world.timeout)}\n")
        exits.now(exits.FAILED)


def _watch(watched: "weakref.ref[_ReplayWatch]") -> None:
    """Check the replays until the step that makes them is gone."""
    while (watch := watched()) is not None and not watch.is_overdue():
        del watch
        time.sleep(EVERY)
    if watch is not None:
        watch.end()


def join(place: Place, device: torch.device, *, timeout: float) -> Processes:
    """Join the other processes that the launcher started."""
    if os.environ.get(environment.OWN):
        follow(int(os.environ[environment.OWN]))
    wait = timedelta(seconds=timeout)
    try:
        folder = os.environ.get(environment.MEETING)
        until = Wait(place, timeout=timeout)
        store = _in_folder(Path(folder), place, wait) if folder else _at_port(place, until)
        if folder or _share_a_network(store, until):
            network.keep_to_loopback()
        # Captures must not exchange anything: registering buffers, NCCL would wait for a process that captures nothing.
        os.environ[REGISTERS] = os.environ.get(REGISTERS) or "0"
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
    except RuntimeError as error:  # a FileStore has no class for a time-out
        if not isinstance(error, dist.DistError) and not folder:
            raise
        raise WorldError(
            f"rank {place.rank}: the {place.size} processes did not meet in {timeout:g} s: {_first_line(error)}"
        ) from error
    sys.excepthook = _with_rank(place.rank)
    assert isinstance(host, dist.ProcessGroup)
    return Processes(
        device=device, rank=place.rank, size=place.size, store=store, host=host, alive=alive, timeout=timeout
    )


def _in_folder(folder: Path, place: Place, wait: timedelta) -> Store:
    """A file store in our launcher's private folder, which needs no port and is closed to other users."""
    if place.rank == 0:
        (folder / environment.FIRST).touch()
    store = FileStore(str(folder / "store"), place.size)
    store.set_timeout(wait)
    return store


def _at_port(place: Place, wait: Wait) -> Store:
    """The store of the first process or of torchrun, at the address that the launcher gave."""
    if environment.has_agent_store(os.environ):
        return TCPStore(place.address, place.port, place.size, is_master=False, timeout=timedelta(seconds=wait.timeout))
    return meeting.open_store(wait)


def _share_a_network(store: Store, wait: Wait) -> bool:
    """Whether all processes share a network namespace, whatever the names of their hosts."""
    own = network.namespace()
    if environment.has_agent_store(os.environ):
        store = PrefixStore("workers", store)  # the hosts have met at the same one
    return {own} == set(meeting.exchange(store, meeting.PROCESS, own, wait=wait)) != {""}


def _with_rank(rank: int) -> Callable[..., None]:
    """A hook that prints uncaught errors with the rank before each line: processes share the terminal."""

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        lines = "".join(traceback.format_exception(kind, error, at)).splitlines()
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))

    return hook


def _taken(place: Place) -> ConfigError:
    """The error for a port that the user chose."""
    return ConfigError(
        f"MASTER_PORT: {place.port} is in use on {place.address}; choose a free port, such as {place.port + 1}"
    )


def _digest(text: str) -> str:
    return sha256(text.encode(errors=NAMES)).hexdigest()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
