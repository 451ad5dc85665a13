"""Interfaces on which processes listen: a single address, and loopback if all are on one host."""

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
    """Open a store that listens on one address only; torch's would listen on every interface."""
    server = listener(address, port)
    own, port = server.getsockname()[:2]
    reached = LOOPBACK if own in ("0.0.0.0", "::") else own  # from this host
    return TCPStore(reached, port, size, True, wait, master_listen_fd=server.detach())


def listener(address: str, port: int) -> socket.socket:
    """Open a socket that listens on one address.

    For two kinds of address it must listen on all interfaces: one that does not belong to this host (that of a service
    in front of it), and a name that means loopback only here (Debian's 127.0.1.1), where others could not connect.
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
    """Whether an address is loopback on every host; a name may mean something else on each."""
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


def namespace() -> str:
    """An id shared by all processes with the same network namespace, and so the same loopback."""
    try:
        return f"{BOOT.read_text().strip()} {NETWORK.readlink()}"
    except OSError:
        return ""  # unknown: assume that nothing is shared


def keep_to_loopback() -> None:
    """Let gloo and NCCL listen on loopback only, unless another interface was chosen."""
    if "lo" not in (name for _, name in socket.if_nameindex()):
        return  # without loopback, gloo takes any interface
    for variable in INTERFACES:
        os.environ[variable] = os.environ.get(variable) or "lo"
