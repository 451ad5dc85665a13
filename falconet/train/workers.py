"""The workers of a run: whether it needs any, started and waited for."""

import contextlib
import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import falconet
from falconet.checkpoint.manifest import Checkpoint
from falconet.config.load import LoadedTraining, typed
from falconet.config.settings import Setting
from falconet.errors import WorldError
from falconet.parallel import environment
from falconet.parallel.world import World
from falconet.report.console import Screen, counted
from falconet.train import interruption, run_folder
from falconet.train.preparation import Launch

if TYPE_CHECKING:
    from falconet.parallel.launch import Hosts  # torch.distributed takes a second to import


def must_start(launch: Launch) -> bool:
    """Whether workers are needed that no launcher has started."""
    return launch.place is None and launch.division.processes > 1 and not launch.loaded.options.run.plan


def start(command: str, line: Sequence[Setting], launch: Launch) -> int:
    """Start the workers of a run and wait for them; returns the exit code."""
    from falconet.parallel.launch import Workers  # torch.distributed takes a second to import
    from falconet.parallel.launch import launch as run_workers

    options = launch.loaded.options
    argv = [command, *typed(line)]
    if launch.hosts is not None:
        return _start_on_host(argv, launch, launch.hosts)
    home = run_folder.claim(options, launch.conventions)
    if options.run.run_dir == "auto":
        argv += ["--no-temporary", "--run-dir", str(home)]  # chosen here, so that another attempt finds it
    say, saved = Screen(words=launch.conventions.words).line, run_folder.checkpoints(home, options)
    if options.run.temporary:
        say(run_folder.temporary_line(home))
    workers = Workers(
        argv=argv,
        program=launch.conventions.program,
        processes=launch.division.processes,
        restarts=options.parallel.max_restarts,
    )
    try:
        code = run_workers(workers, progress=lambda: _names(saved), say=say)
    except WorldError as error:
        raise WorldError(f"{error}; {interruption.how_to_continue(home, saved)}") from None
    finally:
        if run_folder.is_named_anew(options, launch.conventions):
            with contextlib.suppress(OSError):
                home.rmdir()  # works only if it is empty: stopped before it started
    if options.run.temporary and (code == 0 or not any(home.iterdir())):  # empty: stopped before it started
        run_folder.remove_temporary(home, say)
    return code


def _start_on_host(argv: Sequence[str], launch: Launch, hosts: "Hosts") -> int:
    """Start this host's share of the workers, of which the first of all chooses the run folder."""
    from falconet.parallel.launch import Workers
    from falconet.parallel.launch import launch as run_workers

    own, say = launch.division.processes // hosts.size, Screen(words=launch.conventions.words).line
    if hosts.rank > 0:
        say(_as_worker(hosts.rank, hosts.size, own))
    for note in launch.division.notes if hosts.rank == 0 else ():
        say(f"note: {note}")
    workers = Workers(
        argv=argv,
        program=launch.conventions.program,
        processes=own,
        restarts=0,
        hosts=hosts,
        stages=launch.division.stages,
    )
    try:
        return run_workers(workers, progress=lambda: None, say=say)
    except WorldError as error:
        raise WorldError(f"{error}; to continue, start the same line with --resume on every worker") from None


def introduction(launch: Launch) -> str | None:
    """What a worker of TF_CONFIG that was started by hand prints, because the first one prints the rest."""
    place = launch.place
    if place is None or place.launcher != environment.TF_CONFIG or place.rank == 0:
        return None
    return _as_worker(place.rank, place.size, 1)


def _as_worker(rank: int, size: int, own: int) -> str:
    where = f"worker {rank} of {size} on {socket.gethostname()}"
    return f"{where}: {counted(own, 'process')} here; worker 0 prints what is trained, and saves"


def check_alike(world: World, loaded: LoadedTraining, restored: Checkpoint | None) -> None:
    """Every process must run the same program with the same options from the same checkpoint."""
    world.agree("the version of falconet and torch", f"{falconet.__version__} and {torch.__version__}")
    world.agree("the options", hashlib.sha256(loaded.to_yaml().encode()).hexdigest()[:16])
    world.agree("the checkpoint", restored.folder.name if restored else "none")


def _names(folder: Path) -> set[str]:
    """The checkpoints in a folder; unfinished ones start with a dot, and are not progress."""
    return {path.name for path in folder.glob("[!.]*")}
