"""The command line that starts the processes of one host, for each host: torchrun's, and ssh's around it. No torch."""

import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from falconet.errors import ConfigError

RENDEZVOUS = 120  # seconds in which the hosts must meet
HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program in `processes` processes, divided evenly over the hosts; no hosts: this one."""

    program: Sequence[str]
    processes: int
    hosts: Sequence[str] = ()
    port: int  # of the first host, where the others come
    folder: str
    variables: Mapping[str, str] = field(default_factory=dict)
    remote_shell: Sequence[str] = ("ssh",)
    tagged: bool = False
    shown: Sequence[int] | None = None  # ranks whose output is shown; None: all
    prepared: Sequence[str] = ()  # what each process does before it becomes the program


@dataclass(frozen=True, kw_only=True)
class Start:
    """One host and what is run for it; the variables are in the line already if it is another host."""

    host: str
    argv: Sequence[str]
    remote: bool
    shown: str  # the line as a person would type it


def starts(job: Job) -> list[Start]:
    """What to run for each host, the first one first."""
    hosts = list(job.hosts) or ["localhost"]
    if len(hosts) > 1 and hosts[0] in HERE:
        raise ConfigError(f"--host: the first is {hosts[0]}, which means another host to {hosts[1]}; wanted its name")
    here = [host for host in hosts if is_here(host)]
    if len(here) > 1:
        raise ConfigError(f"--host: {' and '.join(here)} are both this host; wanted each host once")
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
    """`falconet.parallel.torchrun` takes torchrun's arguments, and ends as the program did."""
    each = job.processes // len(hosts)
    meet = ["--standalone"]
    if len(hosts) > 1:
        meet = [f"--nnodes={len(hosts)}", f"--node-rank={number}", f"--master-addr={hosts[0]}"]
        meet += [f"--master-port={job.port}", f"--rdzv-conf=timeout={RENDEZVOUS}"]
    own = range(number * each, (number + 1) * each)
    shown = [str(rank - own.start) for rank in job.shown if rank in own] if job.shown is not None else []
    # A rank that is not there: nothing of this host is shown.
    only = [f"--local-ranks-filter={','.join(shown) or each}"] if job.shown is not None else []
    tee = ["--tee=3", *only] if job.tagged or only else []
    called = [sys.executable, "-m", "falconet.parallel.torchrun"]
    return [*called, *meet, f"--nproc-per-node={each}", *tee, "--no-python", "--", *job.prepared, *job.program]


def is_here(host: str) -> bool:
    return host in HERE or host == socket.gethostname()
