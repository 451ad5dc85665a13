"""Ports of a running job: none that another host can reach, none whose content is ever unpickled."""

import contextlib
import datetime
import itertools
import os
import pickle
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

import gloo
import replica_scenarios
from falconet.parallel import network, rendezvous
from runs import LIMIT, begin, finish, standing, updates, wait_for
from tiny import TINY
from watched import descendants

LINE = f"{TINY} --micro-batch-size 4 --logs-per-epoch 4 --checkpoint-save-freq 5000 --collective-timeout 120"
LISTENS = "0A"  # TCP_LISTEN, include/net/tcp_states.h
WAIT = datetime.timedelta(seconds=2)


def listening_at(pids):
    """Address and port of every socket on which one of the processes listens."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.update(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and inode in inodes:
                address, port = local.split(":")
                words = bytes.fromhex(address)  # each of 32 bits, in the order of the machine
                turned = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add((socket.inet_ntop(family, turned), int(port, 16)))
    return found


class Touching:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def attack(found, trace, run_ids, *, timeout=5):
    """Write a pickle to wherever torch's rendezvous reads one, in every store that answers; returns their number.

    By TCPStore's protocol, because its client would wait for ever for an answer from gloo's ports.
    """
    bad = b64encode(pickle.dumps(Touching(trace)))

    def wrote(place, name):
        key = f"/torch.rendezvous.{name}".encode()  # every key of a client starts with a slash
        with contextlib.suppress(OSError), socket.create_connection(place, timeout=timeout) as line:
            line.sendall(VALIDATE + SET + sized(key) + sized(bad) + GET + sized(key))
            return line.recv(1 << 20).endswith(bad)
        return False

    attempts = list(itertools.product(found, run_ids))
    assert attempts
    with ThreadPoolExecutor(max_workers=len(attempts)) as threads:
        return sum(threads.map(lambda attempt: wrote(*attempt), attempts))


VALIDATE, SET, GET = (
    b"\0" + struct.pack("=I", 0x3C85F7CE),
    b"\1",
    b"\3",
)  # torch/csrc/distributed/c10d/TCPStoreBackend.hpp


def sized(content):
    return struct.pack("=Q", len(content)) + content


def is_open_to_others(address):
    return not network.is_loopback(address)


def run_ids(pids):
    """What torch's agent tells its workers."""
    texts = [Path(f"/proc/{pid}/environ").read_bytes() for pid in pids]
    return {name.decode() for text in texts for name in re.findall(rb"TORCHELASTIC_RUN_ID=([^\0]+)", text)}


POPRUN = (sys.executable, "-m", "falconet.legacy.poprun", "--num-replicas=2", sys.executable, "-m", "falconet")
JOBS = {  # and how many stores a port leads to: that of poprun's first worker
    "our launcher": ((sys.executable, "-m", "falconet"), "--replicas 2", 0),
    "poprun": pytest.param(POPRUN, "", 1, marks=pytest.mark.slow),
}


@pytest.mark.dist
@pytest.mark.parametrize(("launcher", "extra", "stores"), JOBS.values(), ids=JOBS.keys())
def test_no_other_host_reaches_a_job_of_one_host_and_no_pickle_is_run(tmp_path, launcher, extra, stores):
    folders = tmp_path / "tmp"
    folders.mkdir()
    line = f"train {LINE} {extra} --device cpu --epoch 5000 --run-dir r"
    variables = {"TMPDIR": str(folders), **standing(tmp_path, update=2)}
    job = begin(line, tmp_path, launcher=launcher, variables=variables)
    wait_for(lambda: updates(tmp_path / "r") or job.poll() is not None, "the first update")
    assert job.poll() is None, job.communicate()
    everyone = [job.pid, *descendants(job.pid)]
    found = listening_at(everyone)
    assert found, "gloo's own, on loopback"
    assert {(address, port) for address, port in found if is_open_to_others(address)} == set()
    private = [path for path in folders.iterdir() if path.name.startswith("falconet-")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o700] * len(private)
    trace, before = tmp_path / "trace", max(updates(tmp_path / "r"))
    assert attack(found, trace, run_ids(everyone)) == stores
    time.sleep(2)  # torch's agent reads its store every 0.1 s, and its rendezvous state every second
    (tmp_path / "go").touch()
    wait_for(lambda: max(updates(tmp_path / "r")) > before + 3, "more updates")
    job.send_signal(signal.SIGINT)
    code, out, err = finish(job)
    assert (code, err) == (130, ""), out
    assert not trace.exists(), "the pickle was run"
    assert list(folders.iterdir()) == [], "files remain"


@pytest.mark.dist
def test_gloo_keeps_to_loopback_where_all_processes_share_a_network():
    assert gloo.in_world(2, replica_scenarios.interfaces) == [["lo", "lo"]] * 2


def test_an_interface_that_was_asked_for_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    network.keep_to_loopback()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth7", "lo")


BOUND = {
    "an address": ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    "another one of the same interface": ("127.0.0.7", "127.0.0.7", "127.0.0.7"),
    "localhost": ("localhost", "127.0.0.1", "127.0.0.1"),
    "a name that means loopback here alone": ("first", "127.0.1.1", "::"),
    "an address in front of this host": ("service", "203.0.113.7", "::"),
}


@pytest.mark.parametrize(("asked", "meant", "expected"), BOUND.values(), ids=BOUND.keys())
def test_a_store_listens_at_the_address_that_was_asked_for(monkeypatch, asked, meant, expected):
    def resolved(host, port, *_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (meant, port))]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolved)
        with network.listener(asked, 0) as found:
            everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
            assert found.getsockname()[0] == (everywhere if expected == "::" else expected)
    store = network.store_at("127.0.0.1", 0, 1, wait=WAIT)
    assert {address for address, port in listening_at([os.getpid()]) if port == store.port} == {"127.0.0.1"}


def some_state():
    state, here, there = _RendezvousState(), _NodeDesc("here", 12, 0), _NodeDesc("there", 34, 1)
    now = datetime.datetime.now(datetime.UTC)
    state.round, state.complete, state.deadline = 3, True, now
    state.participants, state.wait_list, state.redundancy_list = {there: 0, here: 1}, {here}, {there}
    state.last_heartbeats = {here: now}
    return state


def test_the_state_of_an_elastic_rendezvous_is_json_and_the_same_after_it():
    state = some_state()
    found = rendezvous.from_json(rendezvous.as_json(state))
    assert vars(found) == vars(state)
    assert list(found.participants) == list(state.participants)
    assert vars(rendezvous.from_json(rendezvous.as_json(_RendezvousState()))) == vars(_RendezvousState())
    assert len(vars(state)) == 8, "torch's state has a part that JSON does not carry"


WRONG = {
    "a pickle": None,
    "no JSON": b"{",
    "another JSON": b"[]",
    "a part is missing": b'{"round": 1}',
    "of another kind": rendezvous.as_json(_RendezvousState()).replace(b'"wait_list": []', b'"wait_list": [3]'),
    "endless": b"[" * 100_000,
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_a_foreign_state_is_refused_in_one_line_and_never_run(tmp_path, content):
    store, trace = HashStore(), tmp_path / "trace"
    backend = rendezvous.JsonBackend(C10dRendezvousBackend(store, "job"), "job")
    assert backend.get_state() is None
    bad = pickle.dumps(Touching(trace)) if content is None else content
    store.set("torch.rendezvous.job", b64encode(bad).decode())
    message = "torch.rendezvous.job: another program wrote to it; expected the JSON of a rendezvous"
    for ask in (backend.get_state, lambda: backend.set_state(pickle.dumps(some_state()), b"no such token")):
        with pytest.raises(RendezvousStateError) as refused:
            ask()
        assert str(refused.value) == message
    assert not trace.exists()


def test_the_store_holds_text(tmp_path):
    store = HashStore()
    backend = rendezvous.JsonBackend(C10dRendezvousBackend(store, "job"), "job")
    state, token, has_set = backend.set_state(pickle.dumps(some_state()))
    assert has_set
    assert vars(pickle.loads(state)) == vars(some_state()) | {
        name: vars(pickle.loads(state))[name] for name in ("deadline", "last_heartbeats")
    }
    assert backend.get_state() == (state, token)
    assert b64encode(rendezvous.as_json(pickle.loads(state))) == store.get("torch.rendezvous.job")


# Two agents of one rendezvous, as on two hosts.
TORCHRUN = "--nnodes=2 --nproc-per-node=1 --rdzv-id=job -m falconet train"


def begin_two(tmp_path, *how):
    line = f"{TORCHRUN} {LINE} --epoch 5000 --run-dir r".split()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "falconet.parallel.torchrun", *(word.format(number) for word in how), *line],
            cwd=tmp_path,
            env=os.environ | standing(tmp_path, update=2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for number in range(2)
    ]


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.slow)])
def test_agents_of_several_hosts_meet_at_the_address_alone_and_run_no_pickle(tmp_path, backend):
    port = gloo.free_port()
    elastic = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    in_order = ["--node-rank={}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = begin_two(tmp_path, *(elastic if backend == "c10d" else in_order))
    wait_for(lambda: updates(tmp_path / "r") or any(agent.poll() is not None for agent in agents), "the first update")
    everyone = [pid for agent in agents for pid in (agent.pid, *descendants(agent.pid))]
    found, trace = listening_at(everyone), tmp_path / "trace"
    assert ("127.0.0.1", port) in found, [agent.communicate() for agent in agents if agent.poll() is not None]
    assert {address for address, _ in found if is_open_to_others(address)} == set()
    assert attack([("127.0.0.1", port)], trace, run_ids(everyone), timeout=LIMIT) > 0
    time.sleep(3)  # torch's agent reads the state every second
    (tmp_path / "go").touch()
    if backend == "static":
        assert [agent.poll() for agent in agents] == [None, None], "the key means nothing there"
        for agent in agents:
            agent.send_signal(signal.SIGINT)
    answers = [finish(agent) for agent in agents]
    assert not trace.exists()
    if backend == "c10d":
        assert "torch.rendezvous.job: another program wrote to it; expected the JSON" in answers[0][2] + answers[1][2]
        assert 1 in {code for code, _, _ in answers}, "the other one may have been stopped by its worker in time"
