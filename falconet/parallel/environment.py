"""What a launcher says in the environment: torchrun, mpirun, MPICH, SLURM, TF_CONFIG, or nobody. No torch in here."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from falconet.errors import ConfigError

LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # where gloo and NCCL listen
PORT = 29500  # torch's own default
SLURM_PORTS = range(20_000, 40_000)  # two jobs of one user on one host get two of them
WAITING = 3.0  # seconds in which the first process opens its port, or has said what is wrong and is gone
ATTEMPT = "FALCONET_ATTEMPT"  # how often our own launcher has started the workers again
OWN = "FALCONET_LAUNCHER"  # the process number of our own launcher
MEETING = "FALCONET_MEETING"  # the private folder in which the workers of our own launcher meet, instead of at a port
FIRST = "first"  # a file in it: the first worker is there
BOUND = "FALCONET_BOUND"  # poprun bound this process to a NUMA node
TETHERED = "FALCONET_TETHERED"  # poprun holds our standard input open while it lives
REPLICAS, STAGES = "FALCONET_REPLICAS", "FALCONET_STAGES"  # what poprun was asked for


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands among those that somebody started."""

    launcher: str
    rank: int
    size: int
    local_rank: int  # among the processes of this host
    local_size: int
    address: str = LOOPBACK  # of the first process
    port: int = PORT


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher gave this process; None when there is no launcher, or one of a single process."""
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
        return False  # and it has met nobody


def said_here(environment: Mapping[str, str], message: str) -> str | None:
    """What this process prints of a mistake: the first one all of it, any other what concerns itself alone."""
    try:
        place = find_place(environment)
    except ConfigError:
        return message  # who we are is the very mistake
    if place is None or place.rank == 0 or message.startswith(f"rank {place.rank}: "):
        return message
    # Before there is a world: the first process has not made the same mistake if it waits for us.
    of_the_agent = has_agent_store(environment)  # who is there in any case
    return f"rank {place.rank}: {message}" if not of_the_agent and _is_waiting(place, environment) else None


def has_agent_store(environment: Mapping[str, str]) -> bool:
    """Whether torchrun holds the store itself, at the very port that it tells us."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_waiting(place: Place, environment: Mapping[str, str]) -> bool:
    """Whether the first process waits for the others, or begins to within a while."""
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
    """Whether this is the first process: it alone speaks, and it alone does what several cannot share."""
    place = find_place(environment)
    return place is None or place.rank == 0


def cores_of(environment: Mapping[str, str], *, host: int, own: int, expected: int = 1) -> int:
    """Cores for this process, of the `host`'s cores and of its `own` affinity.

    A launcher that binds gives each process its own, or those of a socket to several; else all share what each sees.
    `expected`: processes that are to share them, where no launcher has started any yet.
    """
    place = find_place(environment)
    beside = place.local_size if place else expected
    return max(1, min(own, host // beside) if place and is_bound(environment) else own // beside)


def is_bound(environment: Mapping[str, str]) -> bool:
    """Whether the launcher gave each process an affinity of its own."""
    if environment.get(BOUND) or environment.get("OMPI_MCA_orte_bound_at_launch") == "1":
        return True
    if environment.get("HYDRA_USER_PROVIDED_BINDING") == "1":
        return True
    return environment.get("SLURM_CPU_BIND_TYPE", "none").rstrip(":") not in ("", "none")


def asked_of_poprun(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Replicas, and processes of each, that poprun was asked for; it may have started fewer."""
    if not _are_set(environment, REPLICAS, STAGES):
        return None
    return _number(environment, REPLICAS), _number(environment, STAGES)


def attempt(environment: Mapping[str, str]) -> int:
    """How often this run has been started again after a worker died: by our launcher or by torchrun."""
    return max(int(environment.get(name) or 0) for name in (ATTEMPT, "TORCHELASTIC_RESTART_COUNT"))


def _torchrun(environment: Mapping[str, str]) -> Place | None:
    if not _are_set(environment, "RANK", "WORLD_SIZE"):
        return None
    return _place(environment, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


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
    """Within `srun` alone: a batch script has a SLURM_PROCID as well, but nobody beside it."""
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
    """The first name of a SLURM node list: `gpu[03-05,9],cpu1` begins with gpu03."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def _tf_config(environment: Mapping[str, str]) -> Place | None:
    """TensorFlow's variable: the chief first, then the workers, each as host:port."""
    text = environment.get("TF_CONFIG")
    if not text:
        return None
    try:
        content: Any = json.loads(text)
        cluster, task = content.get("cluster", {}), content.get("task", {})
        chiefs, workers = cluster.get("chief", []), cluster.get("worker", [])
        everyone = [*chiefs, *workers]
        if not everyone:
            return None
        rank = int(task["index"]) + (len(chiefs) if task["type"] == "worker" else 0)
        hosts = [address.rsplit(":", 1)[0] for address in everyone]
        host, port = everyone[0].rsplit(":", 1)
        own = [number for number, name in enumerate(hosts) if name == hosts[rank]]
        place = Place(
            launcher="TF_CONFIG",
            rank=rank,
            size=len(everyone),
            local_rank=own.index(rank),
            local_size=len(own),
            address=host,
            port=int(port),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            "TF_CONFIG: cannot be read; wanted JSON such as {'cluster': {'worker': ['host:port', ...]}, 'task':"
            f" {{'type': 'worker', 'index': 0}}}} ({type(error).__name__}: {error})"
        ) from error
    return place


def _place(environment: Mapping[str, str], launcher: str, rank: str, size: str, local_rank: str, local: str) -> Place:
    """A place of four variables; without the local ones, all processes are taken to be on this host."""
    own, everyone = _number(environment, rank), _number(environment, size)
    local_size = _number(environment, local, everyone)
    first, port = _first_of_cluster(environment)
    address = environment.get("MASTER_ADDR") or first
    if environment.get(local) and local_size == everyone and not has_agent_store(environment):
        address = LOOPBACK  # all are on this host, for sure: no other one needs to reach the first process
    if not address and local_size < everyone:
        raise ConfigError(f"MASTER_ADDR: is needed under {launcher} on several hosts: the address of the first process")
    return Place(
        launcher=launcher,
        rank=own,
        size=everyone,
        local_rank=_number(environment, local_rank, own),
        local_size=local_size,
        address=address or LOOPBACK,
        port=_number(environment, "MASTER_PORT", port),
    )


def _first_of_cluster(environment: Mapping[str, str]) -> tuple[str | None, int]:
    """Where TF_CONFIG says the first process is: mpirun's users gave all processes the same one, without an index."""
    try:
        cluster = json.loads(environment.get("TF_CONFIG") or "{}").get("cluster", {})
        host, port = [*cluster.get("chief", []), *cluster.get("worker", [])][0].rsplit(":", 1)
        return host, int(port)
    except (ValueError, AttributeError, IndexError):
        return None, PORT


def _are_set(environment: Mapping[str, str], *names: str) -> bool:
    """An empty variable is none: scripts write `MASTER_PORT=$PORT` where nobody has set PORT."""
    return all(map(environment.get, names))


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}: got '{text}' from the launcher, wanted a whole number") from None


def _check(place: Place, environment: Mapping[str, str]) -> None:
    if not 0 <= place.rank < place.size or not 0 <= place.local_rank < place.local_size:
        raise ConfigError(
            f"{place.launcher}: says process {place.rank} of {place.size}, {place.local_rank} of {place.local_size} on"
            " this host; wanted numbers from 0 to one less than there are"
        )
    if not 0 < place.port < 65536:
        raise ConfigError(f"MASTER_PORT: got {environment.get('MASTER_PORT') or place.port}, wanted 1 to 65535")
