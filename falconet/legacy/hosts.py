"""The processes of a program on several hosts, by torchrun on each, over ssh if needed. Does not import torch.

Each process first runs `python -m falconet.legacy.hosts [--numa] [--network N] PROGRAM ...`: it binds itself to
a NUMA node or a network, and becomes the program. With `--devices` or `--cores`, it prints how many processes fit here.
"""

import fcntl
import ipaddress
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from falconet.errors import ConfigError, DeviceError
from falconet.exits import DONE, FAILED, INTERRUPTED, MISTAKE
from falconet.parallel import environment
from falconet.parallel.division import over_cores
from falconet.report.console import are

RENDEZVOUS = 120  # seconds in which the hosts must meet
REACHING = 15.0  # seconds in which a host must answer
COUNTING = 60.0  # seconds in which it must count its devices, which may import torch
UNREACHED = 255  # ssh's exit code where it is not that of the command
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # one of them exists where PyTorch may find a device
GRACE = 60.0  # seconds from the end of one host to that of all; torch's agent gives its workers 30 of them
EVERY = 0.1  # seconds between two checks
HERE = ("localhost", "127.0.0.1", "::1")
NODES = Path("/sys/devices/system/node")
ADDRESS_OF = 0x8915  # SIOCGIFADDR, linux/sockios.h


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program in `processes` processes, divided evenly over the hosts; no hosts means this host."""

    program: Sequence[str]
    processes: int
    hosts: Sequence[str] = ()
    port: int  # of the first host, to which the others connect
    folder: str
    variables: Mapping[str, str] = field(default_factory=dict)
    remote_shell: Sequence[str] = ("ssh",)
    tagged: bool = False
    shown: Sequence[int] | None = None  # ranks whose output is shown; None: all
    prepared: Sequence[str] = ()  # what each process does before it becomes the program


@dataclass(frozen=True, kw_only=True)
class Start:
    """One host and its command line; for another host, the line sets the variables itself."""

    host: str
    argv: Sequence[str]
    remote: bool
    shown: str  # the line as a person would type it


def starts(job: Job) -> list[Start]:
    """The command lines of all hosts, in order."""
    hosts = list(job.hosts) or ["localhost"]
    if len(hosts) > 1 and hosts[0] in HERE:
        raise ConfigError(f"--host: the first is {hosts[0]}, which means another host to {hosts[1]}; expected its name")
    here = [host for host in hosts if is_here(host)]
    if len(here) > 1:
        raise ConfigError(f"--host: {' and '.join(here)} are both this host; expected each host once")
    assert job.processes % len(hosts) == 0, "a replica stays on one host"
    return [_start(job, hosts, number) for number in range(len(hosts))]


def _start(job: Job, hosts: Sequence[str], number: int) -> Start:
    argv, host = _torchrun(job, hosts, number), hosts[number]
    assignments = [f"{name}={value}" for name, value in job.variables.items()]
    line = shlex.join(["env", *assignments, *argv])
    if is_here(host):
        return Start(host=host, argv=argv, remote=False, shown=line)
    over = [*job.remote_shell, host, f"cd {shlex.quote(job.folder)} && exec {line}"]
    return Start(host=host, argv=over, remote=True, shown=shlex.join(over))


def _torchrun(job: Job, hosts: Sequence[str], number: int) -> list[str]:
    """`falconet.parallel.torchrun` takes torchrun's arguments, and exits as the program did."""
    each = job.processes // len(hosts)
    meet = ["--standalone"]
    if len(hosts) > 1:
        meet = [f"--nnodes={len(hosts)}", f"--node-rank={number}", f"--master-addr={hosts[0]}"]
        meet += [f"--master-port={job.port}", f"--rdzv-conf=timeout={RENDEZVOUS}"]
    own = range(number * each, (number + 1) * each)
    shown = [str(rank - own.start) for rank in job.shown if rank in own] if job.shown is not None else []
    # A rank that does not exist hides everything of this host.
    only = [f"--local-ranks-filter={','.join(shown) or each}"] if job.shown is not None else []
    tee = ["--tee=3", *only] if job.tagged or only else []
    called = [sys.executable, "-m", "falconet.parallel.torchrun"]
    return [*called, *meet, f"--nproc-per-node={each}", *tee, "--no-python", "--", *job.prepared, *job.program]


def is_here(host: str) -> bool:
    return host in HERE or host == socket.gethostname()


def devices_of(hosts: Sequence[str], *, counting: Sequence[str], folder: str, remote_shell: Sequence[str]) -> list[int]:
    """The number that `counting` prints on each host; a host that does not answer is refused by name.

    `counting`: this module with --devices or --cores, after the words that set the variables.
    """
    if hosts and not shutil.which(remote_shell[0]):
        raise ConfigError(f"--host: cannot reach {hosts[0]}: {remote_shell[0]} is not installed here")
    over, line = [*remote_shell, *_patient(remote_shell)], f"cd {shlex.quote(folder)} && {shlex.join(counting)}"
    asked = [(host, _begin([*over, host, line])) for host in hosts]
    answers = [(host, *_answer(process)) for host, process in asked]
    for host, code, _, errors in answers:
        if code:
            reason = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {code}"
            what = f"cannot reach {host} by {remote_shell[0]}" if code == UNREACHED else f"cannot run Python on {host}"
            raise ConfigError(f"--host: {what}: {reason}")
    for host, _, count, _ in answers:
        if not count.strip().isdigit():
            raise ConfigError(f"--host: cannot count the devices of {host}: got '{count.strip()[:80]}'")
    return [int(count) for _, _, count, _ in answers]


def devices() -> tuple[int, str]:
    """The number of processes for the devices of this host, and a phrase that says so."""
    if any(map(os.path.exists, DRIVERS)):
        import torch  # takes seconds: not on a machine without a driver

        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            return count, f"{are(count, 'CUDA device')} available"
    return cores()


def cores() -> tuple[int, str]:
    """The number of processes for this host's cores, and a phrase that says so."""
    return over_cores(len(os.sched_getaffinity(0)))


def _patient(remote_shell: Sequence[str]) -> Sequence[str]:
    """Options that keep ssh from asking questions and from waiting forever."""
    return ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={REACHING:.0f}") if remote_shell[0] == "ssh" else ()


def _begin(argv: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace")


def _answer(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        answer, errors = process.communicate(timeout=COUNTING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return UNREACHED, "", "does not answer"
    return process.returncode, answer, errors


def run_together(starts: Sequence[Start], *, variables: Mapping[str, str]) -> int:
    """Run all to their end and return the exit code; when one fails, or on a signal, all end."""
    environment = os.environ | dict(variables)
    with _signals() as received:
        # Each in a new session: a terminal's Ctrl-C reaches this process alone, and the workers once.
        running = [
            subprocess.Popen(start.argv, env=environment, stdin=subprocess.PIPE, start_new_session=True)
            for start in starts
        ]
        deadline, by_themselves = float("inf"), set[int]()
        while any(process.poll() is None for process in running):
            failed = {process.returncode for process in running if process.returncode}
            if (failed or received) and deadline == float("inf"):
                deadline, by_themselves = time.monotonic() + GRACE, failed
                for process in running:
                    _let_go(process)
            if time.monotonic() > deadline:
                for process in running:
                    process.kill()
            time.sleep(EVERY)
    for process in running:
        _let_go(process)
    codes = {process.returncode for process in running}
    if received or INTERRUPTED in (by_themselves or codes):  # those ended from here also exit as interrupted
        return INTERRUPTED
    if MISTAKE in codes:
        return MISTAKE
    return FAILED if codes - {DONE} else DONE


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Close the process's standard input, which asks it to end; ssh passes that on to the other host."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that asked this process to end; empty until the first one."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []  # else `nohup`
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, *hang_up)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str]) -> int:
    """Replace this process by the program; returns only if that fails."""
    words = list(argv)
    if words[0] in COUNTS:
        sys.stdout.write(f"{COUNTS[words[0]]()[0]}\n")
        return DONE
    try:
        while words[0].startswith("--"):
            if words.pop(0) == "--numa":
                if bind(os.environ):
                    os.environ[environment.BOUND] = "1"
            else:
                name = interface_of(words.pop(0))
                for variable in environment.INTERFACES:
                    os.environ[variable] = os.environ.get(variable) or name
        os.execvp(words[0], words)
    except DeviceError as error:
        sys.stderr.write(f"poprun: btl_tcp_if_include: {error}\n")
    except FileNotFoundError:
        sys.stderr.write(f"poprun: {words[0]}: not found on {socket.gethostname()}; expected a program\n")
    return 2


def bind(variables: Mapping[str, str]) -> bool:
    """Bind this process to its NUMA node, if there are several; Linux allocates memory where a process runs."""
    nodes = numa_nodes()
    if len(nodes) < 2:
        return False
    rank, size = int(variables["LOCAL_RANK"]), int(variables["LOCAL_WORLD_SIZE"])
    os.sched_setaffinity(0, own_cpus(nodes, os.sched_getaffinity(0), local_rank=rank, local_size=size))
    return True


def numa_nodes(folder: Path = NODES) -> list[set[int]]:
    """The CPUs of each NUMA node that has any; empty if the system does not list them."""
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [cpus for cpus in (_cpus(path.read_text()) for path in lists) if cpus]


def _cpus(text: str) -> set[int]:
    """The numbers in a list such as `0-3,8`."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def own_cpus(nodes: Sequence[set[int]], allowed: set[int], *, local_rank: int, local_size: int) -> set[int]:
    """The CPUs of this process's node that it may use; neighbouring ranks share a node, so that a replica does."""
    usable = [node & allowed for node in nodes if node & allowed]
    return usable[local_rank * len(usable) // local_size] if usable else set(allowed)


def interface_of(network: str) -> str:
    """The interface of this host in `network`, which is a subnet or the name of an interface."""
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
    raise DeviceError(f"'{network}': no interface of {socket.gethostname()} is in it; it has {', '.join(names)}")


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode())
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), ADDRESS_OF, request)[20:24])
        except OSError:
            return None  # an interface without an address


COUNTS = {"--devices": devices, "--cores": cores}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
