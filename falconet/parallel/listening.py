"""Where a process listens: at the one address that was asked for, on loopback when all are on one host."""

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from falconet.parallel.environment import INTERFACES, LOOPBACK

BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


def store_at(address: str, port: int, size: int | None, *, wait: timedelta) -> TCPStore:
    """The store that other processes come to, at that address alone; torch's own would listen on every interface."""
    server = listener(address, port)
    own, port = server.getsockname()[:2]
    reached = LOOPBACK if own in ("0.0.0.0", "::") else own  # by ourselves
    return TCPStore(reached, port, size, True, wait, master_listen_fd=server.detach())


def listener(address: str, port: int) -> socket.socket:
    """A socket that listens there, and on no other interface.

    Two addresses cannot be listened at, and then it is all interfaces here too: one that is not of this host (a
    service's, in front of it), and a name that means loopback here alone (Debian's 127.0.1.1), where others would
    knock in vain.
    """
    found = [(each[0], str(each[4][0])) for each in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)]
    family, own = next((each for each in found if each[0] == socket.AF_INET), found[0])
    if _is_loopback(own) and not is_loopback(address):
        return _everywhere(port)
    try:
        return socket.create_server((own, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return _everywhere(port)


def is_loopback(address: str) -> bool:
    """Whether an address means this host to every host, by itself: a name may mean another thing to each."""
    return address == "localhost" or _is_loopback(address)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def network() -> str:
    """The same text in every process that shares this one's network, and so its loopback; containers have their own."""
    try:
        return f"{BOOT.read_text().strip()} {NETWORK.readlink()}"
    except OSError:
        return ""  # not told: then nothing is taken to be shared


def keep_to_loopback() -> None:
    """Let gloo and NCCL listen there alone, unless another interface was asked for."""
    if "lo" not in (name for _, name in socket.if_nameindex()):
        return  # a network without one: gloo takes what there is
    for variable in INTERFACES:
        os.environ[variable] = os.environ.get(variable) or "lo"
