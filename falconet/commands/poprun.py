"""`poprun`: a program as several processes, on this host or over ssh, with the flags of Graphcore's launcher."""

import itertools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from falconet import leaving

with leaving.at_once():  # the first 0.3 s
    from falconet.codes import DONE, INTERRUPTED, MISTAKE
    from falconet.dialects.launchers import HELP, Poprun, read_poprun, with_script
    from falconet.errors import ConfigError, UserError
    from falconet.parallel import environment, prepared, supervise
    from falconet.parallel.division import PROCESSES_PER_CORE, processes_that_fit
    from falconet.parallel.hosts import Job, Start, is_here, starts
    from falconet.report.screen import Lines, Say, Screen
    from falconet.report.words import are

DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # one of them is there where PyTorch may see a device


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
    except KeyboardInterrupt:  # before there is anything to end
        return INTERRUPTED


def _run(asked: Poprun, *, say: Say) -> int:
    processes, fewer = _processes(asked)
    job = job_of(asked, os.environ, processes=processes)
    each = starts(job)
    for note in (*asked.notes, *fewer, *_notes(asked)):
        say(f"poprun: {note}")
    if asked.dry_run:
        _show(each, Screen().line)
        return DONE
    if asked.verbose:
        _show(each, say)
    if not each[0].remote and not shutil.which(asked.program[0]):
        raise ConfigError(f"{asked.program[0]}: not found; wanted a program that can be run here")
    supervise.require_reachable(each, remote_shell=asked.remote_shell)
    return supervise.run_together(each, variables=job.variables)


def job_of(asked: Poprun, variables: Mapping[str, str], *, processes: int) -> Job:
    """The same in torchrun's terms."""
    before = [*(["--numa"] if asked.numa_aware else []), *(["--network", asked.network] if asked.network else [])]
    shown = None
    if asked.only_instance is not None:
        instances = asked.instances or asked.replicas
        first = asked.only_instance * processes // instances
        shown = range(first, max(first + 1, (asked.only_instance + 1) * processes // instances))
    exported = {name: variables.get(name) if value is None else value for name, value in asked.exported.items()}
    return Job(
        program=asked.program,
        processes=processes,
        hosts=asked.hosts,
        port=_port(variables.get("MASTER_PORT")),
        folder=str(Path.cwd()),
        variables={
            environment.REPLICAS: str(asked.replicas),
            environment.STAGES: str(asked.stages),
            environment.TETHERED: "1",
            # Else restarted workers read the addresses of dead ones from the agent's store (pytorch#135712).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # A host that is not there yet is an error to torch's C++, and one that does not come is one of ours.
            "TORCH_CPP_LOG_LEVEL": variables.get("TORCH_CPP_LOG_LEVEL") or "FATAL",
            "OMP_WAIT_POLICY": variables.get("OMP_WAIT_POLICY") or "PASSIVE",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[1,${rank}]:",  # as mpirun's --tag-output
            **{name: value for name, value in exported.items() if value is not None},
        },
        remote_shell=asked.remote_shell,
        tagged=asked.tagged,
        shown=shown,
        prepared=[sys.executable, "-m", "falconet.parallel.prepared", *before] if before else [],
    )


def _processes(asked: Poprun) -> tuple[int, list[str]]:
    """As many as asked for on other hosts; on this one, as many as it has devices for, and a line where that is fewer.

    The program learns the number of replicas that was asked for, and folds the missing ones into accumulation.
    """
    everyone = asked.replicas * asked.stages
    if everyone == 1 or not all(map(is_here, asked.hosts)):
        return everyone, []
    devices, what = _cores() if _is_for_cpu(asked) else _devices()
    fitting = processes_that_fit(asked.replicas, stages=asked.stages, devices=devices)
    if fitting == everyone:
        return everyone, []
    return fitting, [f"{everyone} processes asked for, {what}: {fitting} {'is' if fitting == 1 else 'are'} started"]


def _devices() -> tuple[int, str]:
    if any(map(os.path.exists, DRIVERS)):
        import torch  # takes seconds, which a machine without a driver need not wait for

        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            return count, f"{are(count, 'CUDA device')} here"
    return _cores()


def _cores() -> tuple[int, str]:
    cores = len(os.sched_getaffinity(0))
    return PROCESSES_PER_CORE * cores, f"{are(cores, 'core')} here, for {PROCESSES_PER_CORE} processes each"


def _is_for_cpu(asked: Poprun) -> bool:
    """Whether the program will use no CUDA device, as far as its line says."""
    words = asked.program
    hidden = asked.exported.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return hidden or "--device=cpu" in words or ("--device", "cpu") in itertools.pairwise(words)


def _notes(asked: Poprun) -> list[str]:
    """What was asked for and cannot be had."""
    notes = [f"-x {name}: is not set here" for name, value in asked.exported.items() if _is_missing(name, value)]
    if asked.numa_aware and all(map(is_here, asked.hosts)) and len(prepared.numa_nodes()) < 2:
        notes.append("--numa-aware: no effect, this host has one NUMA node")
    return notes


def _is_missing(name: str, value: str | None) -> bool:
    return value is None and name not in os.environ


def _port(text: str | None) -> int:
    if not text:
        return environment.PORT
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT: got '{text}', wanted 1 to 65535")
    return int(text)


def _show(each: Sequence[Start], line: Say) -> None:
    for start in each:
        line(start.shown)


def command() -> NoReturn:
    """`poprun` as the whole of a process."""
    leaving.soon(main())


if __name__ == "__main__":
    command()
