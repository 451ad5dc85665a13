"""One process before it becomes its program: bound to a NUMA node, and told which network to use. No torch in here."""

import fcntl
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from falconet.errors import DeviceError
from falconet.parallel import environment

NODES = Path("/sys/devices/system/node")
ADDRESS_OF = 0x8915  # SIOCGIFADDR, linux/sockios.h
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def numa_nodes(folder: Path = NODES) -> list[set[int]]:
    """The CPUs of each NUMA node that has any; none where the system does not tell."""
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [cpus for cpus in (_cpus(path.read_text()) for path in lists) if cpus]


def _cpus(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def own_cpus(nodes: Sequence[set[int]], allowed: set[int], *, local_rank: int, local_size: int) -> set[int]:
    """The CPUs of this process's node, of those it may use: neighbours share a node, so that a replica does."""
    usable = [node & allowed for node in nodes if node & allowed]
    return usable[local_rank * len(usable) // local_size] if usable else set(allowed)


def interface_of(network: str) -> str:
    """The interface of this host that lies in `network`: a subnet, or an interface's own name."""
    names = [name for _, name in socket.if_nameindex()]
    if network in names:
        return network
    try:
        subnet = ipaddress.ip_network(network, strict=False)
    except ValueError:
        raise DeviceError(f"'{network}': is neither a subnet nor one of {', '.join(names)}") from None
    for name in names:
        address = _address(name)
        if address and ipaddress.ip_address(address) in subnet:
            return name
    raise DeviceError(f"'{network}': no interface of {socket.gethostname()} lies in it; it has {', '.join(names)}")


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode())
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), ADDRESS_OF, request)[20:24])
        except OSError:
            return None  # an interface without an address


def bind(variables: Mapping[str, str]) -> bool:
    """Bind this process to its node, if there are several; its memory follows, as Linux allocates where it runs."""
    nodes = numa_nodes()
    if len(nodes) < 2:
        return False
    rank, size = int(variables["LOCAL_RANK"]), int(variables["LOCAL_WORLD_SIZE"])
    os.sched_setaffinity(0, own_cpus(nodes, os.sched_getaffinity(0), local_rank=rank, local_size=size))
    return True


def main(argv: Sequence[str]) -> int:
    """`[--numa] [--network N] PROGRAM ...`: does not return, but where it fails."""
    words = list(argv)
    try:
        while words[0].startswith("--"):
            if words.pop(0) == "--numa":
                if bind(os.environ):
                    os.environ[environment.BOUND] = "1"
            else:
                name = interface_of(words.pop(0))
                for variable in INTERFACES:
                    os.environ[variable] = os.environ.get(variable) or name
        os.execvp(words[0], words)
    except DeviceError as error:
        sys.stderr.write(f"poprun: btl_tcp_if_include: {error}\n")
    except FileNotFoundError:
        sys.stderr.write(f"poprun: {words[0]}: not found on {socket.gethostname()}; wanted a program\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
