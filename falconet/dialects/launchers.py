"""poprun's command line, as the originals used it: who runs what, on which hosts. No torch in here."""

import re
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from falconet.errors import ConfigError, did_you_mean

YES, NO = ("1", "yes", "true", "on"), ("0", "no", "false", "off")
# Flags of the IPU's own resources, which have no counterpart here; all take one value.
OF_THE_IPU = (
    *("--vipu-server-host", "--vipu-server-port", "--vipu-server-timeout", "--vipu-partition", "--vipu-cluster"),
    *("--vipu-allocation", "--reset-partition", "--update-partition", "--remove-partition", "--num-ilds"),
    *("--sync-type", "--offline-mode"),
)
# mpirun's arguments without a meaning here, and how many values each takes.
OF_MPIRUN = {
    **dict.fromkeys(("--allow-run-as-root", "--oversubscribe", "--display-map", "--report-bindings"), 0),
    **dict.fromkeys(("--bind-to", "--map-by", "--rank-by"), 1),
}
PYTHONS_OWN = ("--help", "--version", "--help-env", "--help-xoptions", "--help-all", "--check-hash-based-pycs")
FORGOTTEN = "4"  # the TensorFlow README's value of --ipus-per-replica: its mk2_resnet50_bn_16ipus is in 4 stages
CACHE = "TRITON_CACHE_DIR"
NETWORKS = ("btl_tcp_if_include", "oob_tcp_if_include")
HELP = """usage: poprun [flags] PROGRAM [arguments]

Runs a program as several processes, with the flags of Graphcore's poprun, by torchrun.

  --num-replicas N       copies of the model over all hosts
  --num-instances N      must divide the replicas; their number when --num-replicas is missing
  --ipus-per-replica N   processes of one replica: the stages of a pipeline (1; 4 where the value is missing)
  --host A,B             hosts, over ssh, each with this folder and this Python; the first one coordinates
  --numa-aware yes|no    bind each process to a NUMA node
  --mpi-global-args S    --tag-output, -x VAR[=VALUE], -H HOSTS, --mca btl_tcp_if_include NETWORK,
  --mpi-local-args S     --mca plm_rsh_agent COMMAND; the other arguments of mpirun are named and have no effect
  --only-output-from-instance N
  --executable-cache-path FOLDER   where compiled kernels are kept (TRITON_CACHE_DIR)
  --dry-run              print the command lines and exit
  -v                     print them, and go on

Flags of V-IPU partitions are accepted and have no effect. MASTER_PORT sets the port of the first host (29500).

Example:
  poprun --num-instances 2 --num-replicas 2 falconet train --epoch 2"""


@dataclass(kw_only=True)
class Poprun:
    """What poprun was asked for."""

    program: tuple[str, ...] = ()
    replicas: int = 0  # 0: as many as instances
    instances: int = 0  # 0: nobody said
    stages: int = 1  # processes of one replica
    hosts: tuple[str, ...] = ()
    numa_aware: bool = False
    tagged: bool = False  # each line of output with the rank before it
    only_instance: int | None = None
    exported: dict[str, str | None] = field(default_factory=dict)  # None: poprun's own value
    network: str | None = None  # a subnet such as 10.1.3.0/24, or an interface
    remote_shell: tuple[str, ...] = ("ssh",)
    dry_run: bool = False
    verbose: bool = False
    help: bool = False
    notes: list[str] = field(default_factory=list)


def read_poprun(argv: Sequence[str]) -> Poprun:
    """The request that a poprun line makes; the first word that is no flag begins the program."""
    asked, words, idle = Poprun(), list(argv), []
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        if name == "--":
            break
        if name in SWITCHES:
            SWITCHES[name](asked)
        elif name == "--numa-aware":
            if not equals:
                value = words.pop(0) if words and words[0].lower() in YES + NO else "yes"
            asked.numa_aware = _yes(name, value)
        elif name in VALUED or name in OF_THE_IPU:
            if not equals:
                value = _next(name, words, asked)
            if name in OF_THE_IPU:
                idle.append(name)
            else:
                VALUED[name](asked, name, value)
        else:
            raise ConfigError(f"{name}: poprun has no such flag{did_you_mean(name, FLAGS) or '; --help lists them'}")
    asked.program = tuple(words)
    if idle:
        asked.notes.append(f"{', '.join(idle)}: no effect, there is no IPU here")
    _check(asked)
    return asked


def with_script(program: Sequence[str], scripts: Collection[str]) -> tuple[tuple[str, ...], str | None]:
    """A program with train.py where Python is given options of a script and no script, and a line about it.

    One original's README prints its POD128 command so. `scripts`: what lies in the folder where it is typed.
    """
    python, *words = program
    if not re.fullmatch(r"python[\d.]*", python.rpartition("/")[2]) or not words or words[0] in PYTHONS_OWN:
        return tuple(program), None
    if not words[0].startswith("--"):
        return tuple(program), None
    if "train.py" not in scripts:
        raise ConfigError(f"{python} {words[0]}: names no script; wanted `{python} train.py {words[0]} ...`")
    return (python, "train.py", *words), f"{python} {words[0]}: names no script; taken as {python} train.py"


def _next(name: str, words: list[str], asked: Poprun) -> str:
    """The value of a flag: the next word, unless that is a flag; mpirun's arguments begin with a dash themselves."""
    if words and (name in MPI or not words[0].startswith("-")):
        return words.pop(0)
    if name == "--ipus-per-replica":  # as one original's README printed it, of a model in 4 stages
        asked.notes.append(
            f"--ipus-per-replica: has no value; taken as {FORGOTTEN}, which was meant where it is printed so"
        )
        return FORGOTTEN
    raise ConfigError(f"{name}: needs a value")


def _yes(name: str, value: str) -> bool:
    if value.lower() not in YES + NO:
        raise ConfigError(f"{name}: got '{value}', wanted yes or no")
    return value.lower() in YES


def _number(name: str, value: str, least: int = 1) -> int:
    if not re.fullmatch(r"\d+", value) or int(value) < least:
        raise ConfigError(f"{name}: got '{value}', wanted a whole number, at least {least}")
    return int(value)


def _hosts(name: str, value: str) -> tuple[str, ...]:
    """`a,b`; with mpirun's `a:2,b:2`, slots are dropped: processes are divided evenly."""
    hosts = tuple(re.sub(r":\d+$", "", host.strip()) for host in value.split(","))
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9_@%][A-Za-z0-9_.:@%-]*", host):
            raise ConfigError(f"{name}: got '{value}', wanted names or addresses of hosts with commas between them")
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"{name}: got '{value}', wanted each host once")
    return hosts


def _mpi(asked: Poprun, name: str, value: str) -> None:
    """mpirun's own arguments, as far as they mean something without it."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ConfigError(f"{name}: got '{value}', which a shell could not read: {error}") from None
    idle = []
    while words:
        flag = "--" + words[0].lstrip("-") if len(words[0].lstrip("-")) > 1 else words[0]
        spelled = words.pop(0)
        takes = OF_MPIRUN.get(flag, MPI_VALUES.get(flag, 0))
        if len(words) < takes:
            raise ConfigError(f"{name}: {spelled} needs {takes} value{'s' if takes > 1 else ''}")
        values = [words.pop(0) for _ in range(takes)]
        if flag in ("--tag-output", "-tag-output"):
            asked.tagged = True
        elif flag == "-x":
            variable, equals, content = values[0].partition("=")
            asked.exported[variable] = content if equals else None
        elif flag in ("-H", "--host"):
            asked.hosts = _hosts(f"{name} {spelled}", values[0])
        elif flag == "--mca" and values[0] in NETWORKS:
            asked.network = values[1]
        elif flag == "--mca" and values[0] == "plm_rsh_agent":
            asked.remote_shell = tuple(shlex.split(values[1])) or ("ssh",)
        elif flag == "--mca" or flag in OF_MPIRUN:
            idle.append(" ".join([spelled, *values]))
        else:
            known = [*OF_MPIRUN, *MPI_VALUES, "--tag-output"]
            meant = did_you_mean(spelled, known) or f"; wanted {', '.join(known)}"
            raise ConfigError(f"{name}: {spelled} is not translated{meant}")
    if idle:
        asked.notes.append(f"{name} {', '.join(idle)}: no effect without mpirun")


def _cache(asked: Poprun, name: str, value: str) -> None:  # noqa: ARG001
    """Their programs were compiled whole; here only Triton's kernels are. Empty: as a variable that is not set."""
    if value:
        asked.exported.setdefault(CACHE, value)


def _check(asked: Poprun) -> None:
    if asked.help:
        return
    asked.replicas = asked.replicas or asked.instances or 1
    if not asked.program:
        raise ConfigError("PROGRAM: is needed after the flags, such as `falconet train`")
    if asked.instances and asked.replicas % asked.instances:
        raise ConfigError(
            f"--num-replicas: got {asked.replicas}, wanted a multiple of --num-instances, which is {asked.instances}"
        )
    if asked.only_instance is not None and asked.only_instance >= (asked.instances or asked.replicas):
        raise ConfigError(
            f"--only-output-from-instance: got {asked.only_instance}, wanted less than the number of instances,"
            f" {asked.instances or asked.replicas}"
        )
    if asked.hosts and asked.replicas % len(asked.hosts):
        raise ConfigError(
            f"--num-replicas: got {asked.replicas}, wanted a multiple of the {len(asked.hosts)} hosts: a replica stays"
            " on one host"
        )


def _set(attribute: str, read: Callable[[str, str], object]) -> Callable[[Poprun, str, str], None]:
    return lambda asked, name, value: setattr(asked, attribute, read(name, value))


def _switch(attribute: str) -> Callable[[Poprun], None]:
    return lambda asked: setattr(asked, attribute, True)


MPI = ("--mpi-global-args", "--mpi-local-args")
MPI_VALUES = {"-x": 1, "-H": 1, "--host": 1, "--mca": 2}
VALUED: dict[str, Callable[[Poprun, str, str], None]] = {
    "--num-instances": _set("instances", _number),
    "--num-replicas": _set("replicas", _number),
    "--ipus-per-replica": _set("stages", _number),
    "--host": _set("hosts", _hosts),
    "--only-output-from-instance": _set("only_instance", lambda name, value: _number(name, value, 0)),
    "--executable-cache-path": _cache,
    **dict.fromkeys(MPI, _mpi),
}
SWITCHES: dict[str, Callable[[Poprun], None]] = {
    **dict.fromkeys(("-v", "-vv", "-vvv", "--v", "--vv", "--vvv", "--verbose"), _switch("verbose")),
    **dict.fromkeys(("-h", "--help"), _switch("help")),
    "--dry-run": _switch("dry_run"),
}
FLAGS = (*VALUED, *SWITCHES, *OF_THE_IPU, "--numa-aware")
