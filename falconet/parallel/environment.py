"""The variables of launchers: torchrun, mpirun, MPICH, SLURM, TF_CONFIG. This module does not import torch."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from falconet.errors import ConfigError

LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # where gloo and NCCL listen
PORT = 29500  # torch's default
SLURM_PORTS = range(20_000, 40_000)  # so that two jobs on one host get different ports
WAITING = 3.0  # seconds for the first process to open its port, or to report an error and exit
ATTEMPT = "FALCONET_ATTEMPT"  # how often our launcher has restarted the workers
OURS = "falconet"  # our own launcher, which users do not type
OWN = "FALCONET_LAUNCHER"  # process id of our launcher
MEETING = "FALCONET_MEETING"  # private folder in which the workers of our launcher meet, instead of at a port
FIRST = "first"  # a file in it: the first worker has started
BOUND = "FALCONET_BOUND"  # this process is already bound to a NUMA node
TF_CONFIG = "TF_CONFIG"  # TensorFlow's variable, and the name of what it launches
TETHERED = "FALCONET_TETHERED"  # the launcher that holds our stdin open while it runs, by its name
REPLICAS, STAGES = "FALCONET_REPLICAS", "FALCONET_STAGES"  # what the launcher was asked for
ALL_HOSTS = "FALCONET_LOG_ALL_HOSTS"  # the first process of every host prints, not only that of the first
RUNNING = "FALCONET_RUNNING_STAGES"  # stages of a replica that have a process each, as the launcher decided


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this process among those that a launcher started."""

    launcher: str
    rank: int
    size: int
    local_rank: int  # among the processes of this host
    local_size: int
    address: str = LOOPBACK  # of the first process
    port: int = PORT


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher gave this process; None without a launcher, or for a single process."""
    for read in (_torchrun, _open_mpi, _mpich, _slurm, _tf_config):
        place = read(environment)
        if place is not None:
            _check(place, environment)
            return place if place.size > 1 else None
    return None


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process together with others."""
    try:
        return find_place(environment) is not None
    except ConfigError:
        return False  # it could not have met any


def said_here(environment: Mapping[str, str], message: str) -> str | None:
    """The part of an error that this process should print: the first process everything, others only their own."""
    try:
        place = find_place(environment)
    except ConfigError:
        return message  # the place itself is the error
    if place is None or place.rank == 0 or message.startswith(f"rank {place.rank}: "):
        return message
    # Before there is a world: if the first process waits for us, it does not have the same error.
    if has_agent_store(environment):  # which is there in any case
        time.sleep(WAITING)  # when we exit, the launcher ends the first process, which may not have reported it yet
        return None
    return f"rank {place.rank}: {message}" if _is_waiting(place, environment) else None


def has_agent_store(environment: Mapping[str, str]) -> bool:
    """Whether torchrun itself holds the store, at the port that it gives us."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_waiting(place: Place, environment: Mapping[str, str]) -> bool:
    """Whether the first process waits for the others, or soon will."""
    folder = environment.get(MEETING)
    deadline = time.monotonic() + WAITING
    while time.monotonic() < deadline:
        if folder:
            if Path(folder, FIRST).exists():
                return True
        else:
            with contextlib.suppress(OSError), socket.create_connection((place.address, place.port), timeout=WAITING):
                return True
        time.sleep(0.1)
    return False


def is_first(environment: Mapping[str, str]) -> bool:
    """Whether this is the first process, which alone prints and does work that cannot be shared."""
    place = find_place(environment)
    return place is None or place.rank == 0


def prints(environment: Mapping[str, str]) -> bool:
    """Whether this process prints as the first one does, although it is not the first."""
    place = find_place(environment)
    return bool(environment.get(ALL_HOSTS)) and place is not None and place.local_rank == 0


def cores_of(environment: Mapping[str, str], *, host: int, own: int, expected: int = 1) -> int:
    """The number of cores for this process, from those of the `host` and of its `own` affinity.

    A launcher that binds gives each process its own cores, or those of a socket to several; otherwise all processes
    share the cores that each sees. `expected`: processes that will share them, before any has been started.
    """
    place = find_place(environment)
    beside = place.local_size if place else expected
    return max(1, min(own, host // beside) if place and is_bound(environment) else own // beside)


def threads_of(environment: Mapping[str, str], *, cores: int) -> int:
    """The CPU threads of this process: the user's OMP_NUM_THREADS, otherwise one per core.

    For several processes, torchrun sets 1 if the user set nothing; our launcher leaves the variable alone.
    """
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # after a comma: nested levels
    is_torchruns = asked == "1" and "TORCHELASTIC_RUN_ID" in environment and OWN not in environment
    return int(asked) if asked.isdecimal() and int(asked) and not is_torchruns else cores


def is_bound(environment: Mapping[str, str]) -> bool:
    """Whether the launcher set the affinity of each process."""
    if environment.get(BOUND) or environment.get("OMPI_MCA_orte_bound_at_launch") == "1":
        return True
    if environment.get("HYDRA_USER_PROVIDED_BINDING") == "1":
        return True
    return environment.get("SLURM_CPU_BIND_TYPE", "none").rstrip(":") not in ("", "none")


def asked_of_launcher(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """The replicas, and processes per replica, that the launcher was asked for; it may have started fewer."""
    if not _are_set(environment, REPLICAS, STAGES):
        return None
    return _number(environment, REPLICAS), _number(environment, STAGES)


def stages_running(environment: Mapping[str, str]) -> int | None:
    """The stages of a replica for which the launcher has a process, on one host; None: it left that open."""
    return _number(environment, RUNNING) if _are_set(environment, RUNNING) else None


def is_one_per_host(environment: Mapping[str, str], place: Place) -> bool:
    """Whether TF_CONFIG or mpirun gives each host one process, which starts the others that the plan needs there."""
    if place.launcher == "mpirun":
        return place.local_size == 1
    if place.launcher != TF_CONFIG:
        return False
    hosts = [_host(address) for address in _cluster(environment)]
    return len(set(hosts)) == len(hosts)


def attempt(environment: Mapping[str, str]) -> int:
    """The number of times that our launcher or torchrun has restarted this run after a worker died."""
    return max(int(environment.get(name) or 0) for name in (ATTEMPT, "TORCHELASTIC_RESTART_COUNT"))


def _torchrun(environment: Mapping[str, str]) -> Place | None:
    if not _are_set(environment, "RANK", "WORLD_SIZE"):
        return None
    launcher = OURS if environment.get(OWN) else environment.get(TETHERED) or "torchrun"
    return _place(environment, launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _open_mpi(environment: Mapping[str, str]) -> Place | None:
    if not _are_set(environment, "OMPI_COMM_WORLD_RANK"):
        return None
    names = [f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return _place(environment, "mpirun", *names)


def _mpich(environment: Mapping[str, str]) -> Place | None:
    if not _are_set(environment, "PMI_RANK"):
        return None
    return _place(environment, "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _slurm(environment: Mapping[str, str]) -> Place | None:
    """The place that `srun` gave; a batch script outside it has a SLURM_PROCID too, but is a single process."""
    if not _are_set(environment, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        return None
    size, tasks = _number(environment, "SLURM_STEP_NUM_TASKS"), environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))]
    node = _number(environment, "SLURM_NODEID", 0)
    job = _number(environment, "SLURM_JOB_ID", 0)
    first = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST") or LOOPBACK)
    return Place(
        launcher="srun",
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_size=counts[node] if node < len(counts) else size,
        address=LOOPBACK if counts == [size] else first,
        port=_number(environment, "MASTER_PORT", SLURM_PORTS[job % len(SLURM_PORTS)]),
    )


def first_host(nodes: str) -> str:
    """The first name in a SLURM node list: that of `gpu[03-05,9],cpu1` is gpu03."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def _tf_config(environment: Mapping[str, str]) -> Place | None:
    """The place that TensorFlow's variable gives: first the chief, then the workers, each as host:port."""
    everyone = _cluster(environment)
    if not everyone:
        return None
    hosts = [_host(address) for address in everyone]
    with _parsed():
        content = json.loads(environment[TF_CONFIG])
        chiefs, task = content["cluster"].get("chief", []), content.get("task", {})
        rank = int(task["index"]) + (len(chiefs) if task["type"] == "worker" else 0)
        own = [number for number, name in enumerate(hosts) if name == hosts[rank]]
        return Place(
            launcher=TF_CONFIG,
            rank=rank,
            size=len(everyone),
            local_rank=own.index(rank),
            local_size=len(own),
            address=hosts[0],
            port=_port(everyone[0]),
        )


def _cluster(environment: Mapping[str, str]) -> list[str]:
    """The host:port of every process in TF_CONFIG; none without it, or for a single process."""
    with _parsed():
        content = json.loads(environment.get(TF_CONFIG) or "{}")
        cluster = content.get("cluster", {})
        everyone = [*cluster.get("chief", []), *cluster.get("worker", [])]
        for address in everyone:
            if not (isinstance(address, str) and re.fullmatch(r".+:\d+", address)):
                raise ValueError(f"{address!r} is not host:port")
        return everyone


@contextlib.contextmanager
def _parsed() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            "TF_CONFIG: cannot be parsed; expected JSON such as {'cluster': {'worker': ['host:port', ...]}, 'task':"
            f" {{'type': 'worker', 'index': 0}}}} ({type(error).__name__}: {error})"
        ) from error


def _host(address: str) -> str:
    return address.rsplit(":", 1)[0]


def _port(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def _place(environment: Mapping[str, str], launcher: str, rank: str, size: str, local_rank: str, local: str) -> Place:
    """A place from four variables; without the local ones, all processes are assumed to be on this host."""
    own, everyone = _number(environment, rank), _number(environment, size)
    local_size = _number(environment, local, everyone)
    # Under mpirun, TF_CONFIG is the same for all processes, without an index.
    cluster = [] if _are_set(environment, "MASTER_ADDR", "MASTER_PORT") else _cluster(environment)
    address = environment.get("MASTER_ADDR") or (_host(cluster[0]) if cluster else None)
    if environment.get(local) and local_size == everyone and not has_agent_store(environment):
        address = LOOPBACK  # all are on this host, so no other needs to reach the first process
    if not address and local_size < everyone:
        raise ConfigError(f"MASTER_ADDR: required under {launcher} on several hosts: the address of the first process")
    return Place(
        launcher=launcher,
        rank=own,
        size=everyone,
        local_rank=_number(environment, local_rank, own),
        local_size=local_size,
        address=address or LOOPBACK,
        port=_number(environment, "MASTER_PORT", _port(cluster[0]) if cluster else PORT),
    )


def _are_set(environment: Mapping[str, str], *names: str) -> bool:
    """Whether all variables are set and not empty: scripts write `MASTER_PORT=$PORT` even if PORT is not set."""
    return all(map(environment.get, names))


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}: got '{text}' from the launcher, expected an integer") from None


def _check(place: Place, environment: Mapping[str, str]) -> None:
    if not 0 <= place.rank < place.size or not 0 <= place.local_rank < place.local_size:
        raise ConfigError(
            f"{place.launcher}: this is process {place.rank} of {place.size}, {place.local_rank} of {place.local_size}"
            " on this host; expected ranks from 0 to one less than the number"
        )
    if not 0 < place.port < 65536:
        raise ConfigError(f"MASTER_PORT: got {environment.get('MASTER_PORT') or place.port}, expected 1 to 65535")
