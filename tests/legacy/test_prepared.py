"""A process binds itself to its NUMA node and its network before it becomes its program."""

import os
import socket
import subprocess
import sys

import pytest

from falconet.errors import DeviceError
from falconet.legacy import hosts
from falconet.parallel import environment


def test_nodes_are_read_in_the_order_of_their_numbers(tmp_path):
    for number, cpus in {0: "0-3,8", 10: "12\n", 2: "4-5,6", 3: "\n"}.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
    assert hosts.numa_nodes(tmp_path) == [{0, 1, 2, 3, 8}, {4, 5, 6}, {12}]
    assert hosts.numa_nodes(tmp_path / "nothing") == []


TWO = [{0, 1, 2, 3}, {4, 5, 6, 7}]
OWN = {
    "two on two nodes": (range(8), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
    "neighbours share": (range(8), 4, [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}]),
    "of those allowed": ([2, 3, 4], 2, [{2, 3}, {4}]),
    "one node allowed": ([2, 3], 2, [{2, 3}, {2, 3}]),
    "one process": (range(8), 1, [{0, 1, 2, 3}]),
}


@pytest.mark.parametrize(("allowed", "size", "expected"), OWN.values(), ids=OWN.keys())
def test_each_process_has_the_cpus_of_one_node(allowed, size, expected):
    found = [hosts.own_cpus(TWO, set(allowed), local_rank=rank, local_size=size) for rank in range(size)]
    assert found == expected


def test_binding_changes_the_affinity(monkeypatch):
    before = os.sched_getaffinity(0)
    nodes = [{cpu} for cpu in sorted(before)]
    monkeypatch.setattr(hosts, "numa_nodes", lambda: nodes)
    try:
        assert hosts.bind({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == (len(nodes) > 1)
        assert os.sched_getaffinity(0) == nodes[0]
    finally:
        os.sched_setaffinity(0, before)


def test_a_subnet_or_a_name_becomes_an_interface():
    assert hosts.interface_of("127.0.0.0/8") == "lo"
    assert hosts.interface_of("lo") == "lo"
    with pytest.raises(DeviceError, match=r"'203.0.113.0/24': no interface of .* is in it; it has .*lo"):
        hosts.interface_of("203.0.113.0/24")
    with pytest.raises(DeviceError, match=r"'nosuch': is neither a subnet nor one of .*lo"):
        hosts.interface_of("nosuch")


def run(*words):
    line = [sys.executable, "-m", "falconet.legacy.hosts", *words]
    env = {name: value for name, value in os.environ.items() if name not in environment.INTERFACES}
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=env)


def test_the_program_replaces_the_process():
    program = "import os; print(os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'])"
    assert run("--network", "127.0.0.0/8", sys.executable, "-c", program).stdout == "lo lo\n"


MISTAKES = {
    ("--network", "203.0.113.0/24", "true"): "poprun: btl_tcp_if_include: '203.0.113.0/24': no interface",
    ("--network", "lo", "no-such-program"): "poprun: no-such-program: not found on " + socket.gethostname(),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.items())
def test_a_mistake_is_one_line(words, message):
    found = run(*words)
    assert found.returncode == 2
    assert found.stderr.startswith(message)
    assert found.stderr.count("\n") == 1
