"""`poprun`, with the flags of Graphcore's launcher; torchrun starts the processes."""

import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from falconet import exits

with exits.at_once():  # the first 0.3 s
    from falconet.errors import ConfigError, UserError, did_you_mean
    from falconet.exits import DONE, INTERRUPTED, MISTAKE
    from falconet.legacy import hosts
    from falconet.legacy.hosts import Job, Start, is_here, starts
    from falconet.parallel import environment
    from falconet.parallel.division import Asked, Division, over_hosts
    from falconet.report.console import Lines, Say, Screen

YES, NO = ("1", "yes", "true", "on"), ("0", "no", "false", "off")
# Flags of IPU resources, which have no counterpart here; all take one value.
OF_THE_IPU = (
    *("--vipu-server-host", "--vipu-server-port", "--vipu-server-timeout", "--vipu-partition", "--vipu-cluster"),
    *("--vipu-allocation", "--reset-partition", "--update-partition", "--remove-partition", "--num-ilds"),
    *("--sync-type", "--offline-mode"),
)
# mpirun's arguments that have no effect here, and how many values each takes.
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
  --mpi-local-args S     --mca plm_rsh_agent COMMAND; mpirun's other arguments have no effect and are noted
  --only-output-from-instance N
  --executable-cache-path FOLDER   where compiled kernels are kept (TRITON_CACHE_DIR)
  --dry-run              print the command lines and exit
  -v                     print them, and continue

Flags of V-IPU partitions are accepted and have no effect. MASTER_PORT sets the port of the first host (29500).

Example:
  poprun --num-instances 2 --num-replicas 2 falconet train --epoch 2"""


@dataclass(kw_only=True)
class Poprun:
    """The arguments of a poprun line."""

    program: tuple[str, ...] = ()
    replicas: int = 0  # 0: as many as instances
    instances: int = 0  # 0: not given
    stages: int = 1  # processes of one replica
    hosts: tuple[str, ...] = ()
    numa_aware: bool = False
    tagged: bool = False  # each output line starts with the rank
    only_instance: int | None = None
    exported: dict[str, str | None] = field(default_factory=dict)  # None: the value of this process
    network: str | None = None  # a subnet such as 10.1.3.0/24, or an interface
    remote_shell: tuple[str, ...] = ("ssh",)
    dry_run: bool = False
    verbose: bool = False
    help: bool = False
    notes: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a program under poprun's flags; returns the exit code, which is the program's if it ran."""
    say = Screen(Lines(stderr=True, highlight=False, soft_wrap=True)).line
    try:
        asked = read_poprun(sys.argv[1:] if argv is None else argv)
        if asked.help:
            Screen().line(HELP)
            return DONE
        asked.program, forgotten = with_script(asked.program, [path.name for path in Path().iterdir()])
        asked.notes += [forgotten] if forgotten else []
        return _run(asked, say=say)
    except UserError as error:
        say(f"poprun: {error}")
        return MISTAKE
    except KeyboardInterrupt:  # before anything was started
        return INTERRUPTED


def command() -> NoReturn:
    """The entry point of `poprun`."""
    exits.soon(main())


def _run(asked: Poprun, *, say: Say) -> int:
    division, fewer = _division(asked)
    job = job_of(asked, os.environ, division=division)
    each = starts(job)
    for note in (*asked.notes, *fewer, *_notes(asked)):
        say(f"poprun: {note}")
    if asked.dry_run:
        _show(each, Screen().line)
        return DONE
    if asked.verbose:
        _show(each, say)
    if not each[0].remote and not shutil.which(asked.program[0]):
        raise ConfigError(f"{asked.program[0]}: not found; expected a program on the PATH")
    return hosts.run_together(each, variables=job.variables)


def read_poprun(argv: Sequence[str]) -> Poprun:
    """Parse a poprun line; the first word that is not a flag starts the program."""
    asked, words, unused = Poprun(), list(argv), []
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
                unused.append(name)
            else:
                VALUED[name](asked, name, value)
        else:
            raise ConfigError(f"{name}: poprun has no such flag{did_you_mean(name, FLAGS) or '; --help lists them'}")
    asked.program = tuple(words)
    if unused:
        asked.notes.append(f"{', '.join(unused)}: no effect, there is no IPU here")
    _check(asked)
    return asked


def _next(name: str, words: list[str], asked: Poprun) -> str:
    """The value of a flag: the next word, unless that is a flag; mpirun's arguments start with a dash too."""
    if words and (name in MPI or not words[0].startswith("-")):
        return words.pop(0)
    if name == "--ipus-per-replica":  # as one original's README prints it, for a model in 4 stages
        asked.notes.append(f"--ipus-per-replica: has no value; using {FORGOTTEN}, as the README that omits it means")
        return FORGOTTEN
    raise ConfigError(f"{name}: needs a value")


def _yes(name: str, value: str) -> bool:
    if value.lower() not in YES + NO:
        raise ConfigError(f"{name}: got '{value}', expected yes or no")
    return value.lower() in YES


def _number(name: str, value: str, least: int = 1) -> int:
    if not re.fullmatch(r"\d+", value) or int(value) < least:
        raise ConfigError(f"{name}: got '{value}', expected a whole number, at least {least}")
    return int(value)


def _hosts(name: str, value: str) -> tuple[str, ...]:
    """The hosts in `a,b` or mpirun's `a:2,b:2`, whose slots are ignored because processes are divided evenly."""
    hosts = tuple(re.sub(r":\d+$", "", host.strip()) for host in value.split(","))
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9_@%][A-Za-z0-9_.:@%-]*", host):
            raise ConfigError(f"{name}: got '{value}', expected names or addresses of hosts, separated by commas")
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"{name}: got '{value}', expected each host once")
    return hosts


def _mpi(asked: Poprun, name: str, value: str) -> None:
    """Parse mpirun's arguments, as far as they mean something without mpirun."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ConfigError(f"{name}: got '{value}', which is not a shell line: {error}") from None
    unused = []
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
            unused.append(" ".join([spelled, *values]))
        else:
            known = [*OF_MPIRUN, *MPI_VALUES, "--tag-output"]
            meant = did_you_mean(spelled, known) or f"; expected {', '.join(known)}"
            raise ConfigError(f"{name}: {spelled} is not supported{meant}")
    if unused:
        asked.notes.append(f"{name} {', '.join(unused)}: no effect without mpirun")


def _cache(asked: Poprun, name: str, value: str) -> None:  # noqa: ARG001
    """Set the folder of compiled kernels; the originals compiled whole programs. Empty: an unset shell variable."""
    if value:
        asked.exported.setdefault(CACHE, value)


def _check(asked: Poprun) -> None:
    if asked.help:
        return
    asked.replicas = asked.replicas or asked.instances or 1
    if not asked.program:
        raise ConfigError("PROGRAM: required after the flags, such as `falconet train`")
    if asked.instances and asked.replicas % asked.instances:
        raise ConfigError(
            f"--num-replicas: got {asked.replicas}, expected a multiple of --num-instances, which is {asked.instances}"
        )
    if asked.only_instance is not None and asked.only_instance >= (asked.instances or asked.replicas):
        raise ConfigError(
            f"--only-output-from-instance: got {asked.only_instance}, expected less than the number of instances,"
            f" {asked.instances or asked.replicas}"
        )
    if asked.hosts and asked.replicas % len(asked.hosts):
        raise ConfigError(
            f"--num-replicas: got {asked.replicas}, expected a multiple of the {len(asked.hosts)} hosts, because a"
            " replica stays on one host"
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


def with_script(program: Sequence[str], scripts: Collection[str]) -> tuple[tuple[str, ...], str | None]:
    """Add train.py to a line in which Python has a script's options but no script, and note that.

    One original's README prints its POD128 command like this. `scripts`: the files in the current folder.
    """
    python, *words = program
    if not re.fullmatch(r"python[\d.]*", python.rpartition("/")[2]) or not words or words[0] in PYTHONS_OWN:
        return tuple(program), None
    if not words[0].startswith("--"):
        return tuple(program), None
    if "train.py" not in scripts:
        raise ConfigError(f"{python} {words[0]}: names no script; expected `{python} train.py {words[0]} ...`")
    return (python, "train.py", *words), f"{python} {words[0]}: names no script; running {python} train.py"


def job_of(asked: Poprun, variables: Mapping[str, str], *, division: Division) -> Job:
    """The arguments in torchrun's terms."""
    processes = division.processes
    before = [*(["--numa"] if asked.numa_aware else []), *(["--network", asked.network] if asked.network else [])]
    shown = None
    if asked.only_instance is not None:
        instances = asked.instances or asked.replicas
        first = asked.only_instance * processes // instances
        shown = range(first, max(first + 1, (asked.only_instance + 1) * processes // instances))
    return Job(
        program=asked.program,
        processes=processes,
        hosts=asked.hosts,
        port=_port(variables.get("MASTER_PORT")),
        folder=str(Path.cwd()),
        variables={
            environment.REPLICAS: str(asked.replicas),
            environment.STAGES: str(asked.stages),
            **({environment.RUNNING: str(division.stages)} if asked.stages > 1 else {}),
            environment.TETHERED: "poprun",
            # Otherwise, restarted workers read the addresses of dead ones from the agent's store (pytorch#135712).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # torch's C++ logs hosts that are late as errors; hosts that never come are reported here.
            "TORCH_CPP_LOG_LEVEL": variables.get("TORCH_CPP_LOG_LEVEL") or "FATAL",
            "OMP_WAIT_POLICY": variables.get("OMP_WAIT_POLICY") or "PASSIVE",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[1,${rank}]:",  # as mpirun's --tag-output
            **_exported(asked, variables),
        },
        remote_shell=asked.remote_shell,
        tagged=asked.tagged,
        shown=shown,
        prepared=[sys.executable, "-m", "falconet.legacy.hosts", *before] if before else [],
    )


def _port(text: str | None) -> int:
    if not text:
        return environment.PORT
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT: got '{text}', expected 1 to 65535")
    return int(text)


def _division(asked: Poprun) -> tuple[Division, list[str]]:
    """The division that is started, which all hosts have devices for, and a note if it is less than requested.

    The program knows the requested number of replicas, and folds the missing ones into accumulation.
    """
    recipe = Asked(replicas=asked.replicas, accumulation=1, stages=asked.stages)
    whole = Division(asked.replicas, 1, asked.stages)
    remote = [host for host in asked.hosts if not is_here(host)]
    if (recipe.processes == 1 and not remote) or (asked.dry_run and remote):
        return whole, []
    is_for_cpu, count = _is_for_cpu(asked), max(1, len(asked.hosts))
    devices, what = hosts.cores() if is_for_cpu else hosts.devices()
    if remote:
        counted = _counted(asked, remote, "--cores" if is_for_cpu else "--devices")
        fewest = min(remote, key=lambda host: counted[host])
        if len(remote) == count or counted[fewest] < devices:
            devices, what = counted[fewest], f"{fewest} has devices for {counted[fewest]} on each host"
    division = over_hosts(recipe, hosts=count, devices=devices, what=what)
    if division.processes == recipe.processes:
        return whole, []
    are_started = "1 is started" if division.processes == 1 else f"{division.processes} are started"
    return division, [f"{recipe.processes} processes requested, {what}: {are_started}"]


def _counted(asked: Poprun, remote: Sequence[str], what: str) -> dict[str, int]:
    variables = [f"{name}={value}" for name, value in _exported(asked, os.environ).items()]
    counting = ["env", *variables, sys.executable, "-m", "falconet.legacy.hosts", what]
    found = hosts.devices_of(remote, counting=counting, folder=str(Path.cwd()), remote_shell=asked.remote_shell)
    return dict(zip(remote, found, strict=True))


def _exported(asked: Poprun, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables to carry to the hosts, if they are set."""
    exported = {name: variables.get(name) if value is None else value for name, value in asked.exported.items()}
    return {name: value for name, value in exported.items() if value is not None}


def _is_for_cpu(asked: Poprun) -> bool:
    """Whether the program's line rules out CUDA devices."""
    words = asked.program
    hidden = asked.exported.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return hidden or "--device=cpu" in words or ("--device", "cpu") in itertools.pairwise(words)


def _notes(asked: Poprun) -> list[str]:
    """Notes about arguments without an effect."""
    notes = [f"-x {name}: not set here" for name, value in asked.exported.items() if _is_missing(name, value)]
    if asked.numa_aware and all(map(is_here, asked.hosts)) and len(hosts.numa_nodes()) < 2:
        notes.append("--numa-aware: no effect, this host has one NUMA node")
    return notes


def _is_missing(name: str, value: str | None) -> bool:
    return value is None and name not in os.environ


def _show(each: Sequence[Start], line: Say) -> None:
    for start in each:
        line(start.shown)


if __name__ == "__main__":
    command()
