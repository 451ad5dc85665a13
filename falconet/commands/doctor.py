"""`falconet doctor`: what this machine has, and with --distributed whether processes work together on it."""

import os
import platform
from collections.abc import Collection, Sequence

import torch

import falconet
from falconet.commands import decoders, selftest
from falconet.config.ranges import value_or
from falconet.config.schema import DoctorOptions
from falconet.config.settings import LINE, Setting
from falconet.errors import ConfigError, DeviceError
from falconet.parallel import environment, resources
from falconet.parallel.environment import Place
from falconet.parallel.world import device_kind, open_world
from falconet.report.words import counted
from falconet.wiring import decoding, speaking
from falconet.wiring.reading import load_options, typed

MEASURED = 1.0  # seconds for each decoder


def run(line: Sequence[Setting]) -> int:
    options, place = load_options(DoctorOptions, line).options, environment.find_place(os.environ)
    _check_effective({setting.option for setting in line if setting.source == LINE}, options)
    if place is None:
        for text in machine():
            speaking.spoken()(text)
    if not options.doctor.distributed:
        if place is None:
            device = torch.device(device_kind(options.machine.device))
            for text in decoders.findings(device, seconds=MEASURED):
                speaking.spoken()(text)
        return 0
    count = processes(options)
    if place is None and count > 1:
        from falconet.parallel.launch import Workers, launch

        workers = Workers(argv=["doctor", *typed(line)], processes=count, restarts=0)
        return launch(workers, progress=lambda: None, say=speaking.spoken())
    return _check(options, place)


def _check_effective(given: Collection[str], options: DoctorOptions) -> None:
    """An option must not seem to be obeyed."""
    for name in ("precision", "deterministic", "no-deterministic"):
        if name in given:
            raise ConfigError(f"--{name}: has no effect on doctor, whose checks have their own")
    if "threads" in given and not options.doctor.distributed:
        raise ConfigError("--threads: has no effect on doctor without --distributed; wanted both")


def machine() -> list[str]:
    """Versions, cores and devices."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = ", ".join(torch.cuda.get_device_name(number) for number in range(count))
    return [
        f"falconet {falconet.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"{counted(resources.cores(), 'CPU core')}, {counted(count, 'CUDA device')}{': ' if devices else ''}{devices}",
        f"photos are decoded by {decoding.decoder()}",
    ]


def processes(options: DoctorOptions) -> int:
    """As asked; else one a CUDA device, or two on a CPU."""
    cuda = device_kind(options.machine.device) == "cuda"
    return value_or(options.doctor.replicas, torch.cuda.device_count() if cuda else 2)


def _check(options: DoctorOptions, place: Place | None) -> int:
    """Every check, told by the first process; one that fails is the user's to know, so the exit code is 2."""
    machine = options.machine
    threads = value_or(machine.threads, resources.cores())
    with open_world(machine.device, threads=threads, deterministic=True, place=place, timeout=120.0) as world:
        say = speaking.screen_of(world).line
        say(f"{counted(world.size, 'process')} on {world.device.type}")
        failed = []
        for finding in selftest.findings(world):
            say(f"{'ok    ' if finding.held else 'FAILED'}  {finding.name}: {finding.words}")
            failed += [] if finding.held else [finding.name]
        if failed:
            raise DeviceError(f"--distributed: {counted(len(failed), 'check')} failed: {', '.join(failed)}")
    return 0
