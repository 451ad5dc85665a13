"""The rendezvous of torch's agents, one per host, without unpickling and without a port on every interface.

Torch's c10d rendezvous unpickles the content of a store that any program can write to, and so executes its code.
"""

import json
import pickle
import socket
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from falconet.parallel.environment import LOOPBACK, PORT
from falconet.parallel.network import is_loopback, store_at

ONE_HOST, IN_ORDER, ELASTIC = "falconet-one-host", "falconet-in-order", "falconet-elastic"
ELASTIC_PORT = 29400  # torch's own default


class FixedRendezvous(RendezvousHandler):
    """Hosts whose number and order are known, as in torch's static rendezvous: there is no state to agree on.

    Anything else that agents exchange, torch writes as JSON.
    """

    def __init__(self, params: RendezvousParameters, *, rank: int, open_store: Callable[[], Store]) -> None:
        self._params, self._rank, self._open = params, rank, open_store
        self._host, self._port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
        self._store: Store | None = None

    def get_backend(self) -> str:
        return self._params.backend

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers use the store of the first agent; on one host they open their own."""
        return self._params.backend == IN_ORDER

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = self._store or self._open()
        store = PrefixStore(self._params.run_id, self._store)
        where = RendezvousStoreInfo(self._host, self._port or _free_port())
        return RendezvousInfo(store, self._rank, self._params.max_nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to do: the number of hosts is fixed."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._params.run_id

    def shutdown(self) -> bool:
        return True


def _free_port() -> int:
    """A port for the workers' store on loopback; new for every attempt, because a killed worker's may linger."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def _one_host(params: RendezvousParameters) -> FixedRendezvous:
    """The rendezvous of a single agent, with its store in memory, where no other process can reach it."""
    return FixedRendezvous(params, rank=0, open_store=HashStore)


OPENED: dict[str, Store] = {}  # by run id: stores of hosts that have met before, to agree on what to start


def open_in_order(host: str, port: int, *, rank: int, size: int, wait: timedelta) -> Store:
    """The store of `size` hosts, which the first one holds."""
    if rank == 0:
        return store_at(host, port, size, wait=wait)
    return TCPStore(host, port, size, False, wait)


def _in_order(params: RendezvousParameters) -> FixedRendezvous:
    rank = int(params.config["rank"])
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
    wait = timedelta(seconds=int(params.config["timeout"]))

    def open_store() -> Store:
        if params.run_id in OPENED:
            return OPENED[params.run_id]
        return open_in_order(host, port, rank=rank, size=params.max_nodes, wait=wait)

    return FixedRendezvous(params, rank=rank, open_store=open_store)


def _elastic(params: RendezvousParameters) -> RendezvousHandler:
    """Torch's c10d rendezvous, in which hosts may join and leave, with its state in a store at the endpoint."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=ELASTIC_PORT)
    wait = timedelta(seconds=int(params.get("read_timeout", 60)))
    asked = params.get_as_bool("is_host")
    store: Store | None = None
    if asked or (asked is None and is_own(host)):
        try:
            store = store_at(host, port, None, wait=wait)
        except OSError:
            if asked:
                raise  # otherwise another agent on this host has the port and the store
    store = store or TCPStore(host, port, None, False, wait)
    return create_handler(store, JsonBackend(C10dRendezvousBackend(store, params.run_id), params.run_id), params)


def is_own(host: str) -> bool:
    """Whether a name or address belongs to this host, tested by binding to it."""
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        with socket.create_server(socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)[0][4][:2]):
            return True
    except OSError:
        return False


class JsonBackend(RendezvousBackend):
    """Keeps the state of an elastic rendezvous in the store as JSON.

    Torch's handler exchanges its state as a pickle; here those pickles never leave this process.
    """

    def __init__(self, inner: RendezvousBackend, run_id: str) -> None:
        self._inner, self._run_id = inner, run_id

    @property
    def name(self) -> str:
        return ELASTIC

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._inner.get_state()
        return (self._read(found[0]), found[1]) if found else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._inner.set_state(as_json(pickle.loads(state)), token)
        return (self._read(found[0]), found[1], found[2]) if found else None

    def _read(self, stored: bytes) -> bytes:
        try:
            return pickle.dumps(from_json(stored))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RendezvousStateError(
                f"torch.rendezvous.{self._run_id}: another program wrote to it; expected the JSON of a rendezvous"
            ) from None


def as_json(state: _RendezvousState) -> bytes:
    """Encode a state; a node is its host name, process id and local id."""
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": state.deadline and state.deadline.isoformat(),
            "closed": state.closed,
            "participants": [[*_words(node), rank] for node, rank in state.participants.items()],
            "wait_list": sorted(map(_words, state.wait_list)),
            "redundancy_list": sorted(map(_words, state.redundancy_list)),
            "last_heartbeats": [[*_words(node), at.isoformat()] for node, at in state.last_heartbeats.items()],
        }
    ).encode()


def from_json(stored: bytes) -> _RendezvousState:
    """Decode a state; raises ValueError, KeyError, TypeError or RecursionError for anything else."""
    content: dict[str, Any] = json.loads(stored)
    state = _RendezvousState()
    state.round = int(content["round"])
    state.complete, state.closed = content["complete"] is True, content["closed"] is True
    state.deadline = datetime.fromisoformat(content["deadline"]) if content["deadline"] else None
    state.participants = {_node(*words): int(rank) for *words, rank in content["participants"]}
    state.wait_list = {_node(*words) for words in content["wait_list"]}
    state.redundancy_list = {_node(*words) for words in content["redundancy_list"]}
    state.last_heartbeats = {_node(*words): datetime.fromisoformat(at) for *words, at in content["last_heartbeats"]}
    return state


def _words(node: _NodeDesc) -> tuple[str, int, int]:
    return node.addr, node.pid, node.local_id


def _node(addr: str, pid: int, local_id: int) -> _NodeDesc:
    return _NodeDesc(str(addr), int(pid), int(local_id))


rendezvous_handler_registry.register(ONE_HOST, _one_host)
rendezvous_handler_registry.register(IN_ORDER, _in_order)
rendezvous_handler_registry.register(ELASTIC, _elastic)
