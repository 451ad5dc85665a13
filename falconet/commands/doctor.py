"""`falconet doctor`: report what this machine has, what limits training on it, and whether processes work together."""

import os
from collections.abc import Collection
from pathlib import Path

import torch

from falconet.config.commands import DoctorOptions
from falconet.config.fields import options_of, value_or
from falconet.config.load import Loaded, typed
from falconet.config.options import Machine
from falconet.config.settings import LINE
from falconet.config.tool_options import Doctor
from falconet.data import input
from falconet.doctor import bottleneck, decoders, disk_speed, machine_facts, selftest
from falconet.doctor.advice import Advice
from falconet.errors import ConfigError, DeviceError
from falconet.parallel import environment, host
from falconet.parallel.environment import Place
from falconet.parallel.world import cores, device_kind, open_world
from falconet.report import console
from falconet.report.console import Say, counted

TIMEOUT = 120.0  # seconds that a process waits for another
OF_THE_MACHINE = (Machine, Doctor)  # sections that do not describe a training run


def run(loaded: Loaded[DoctorOptions]) -> int:
    options, line, place = loaded.options, loaded.line, environment.find_place(os.environ)
    given = {setting.option for setting in line if setting.source == LINE}
    of_training = [name for name in given if _is_of_training(name)]
    _check_effective(given, of_training, options)
    say = console.spoken()
    if options.doctor.distributed:
        return _distributed(loaded, place)
    if place is not None and place.rank:
        return 0
    for text in machine_facts.lines():
        say(text)
    if of_training:
        return _examine(loaded, say)
    say(_disk(Path.cwd()))
    for text in decoders.findings(torch.device(device_kind(options.machine.device)), seconds=decoders.MEASURED):
        say(text)
    return 0


def _is_of_training(name: str) -> bool:
    """Whether an option, with or without no- before it, describes a training run."""
    known = options_of(DoctorOptions)
    option = known.get(name) or known.get(name.removeprefix("no-"))
    return name == "config" or (option is not None and option.section not in OF_THE_MACHINE and name != "replicas")


def _check_effective(given: Collection[str], of_training: Collection[str], options: DoctorOptions) -> None:
    """Refuse options that would have no effect."""
    if options.doctor.distributed:
        for name in of_training:
            raise ConfigError(f"--{name}: has no effect with --distributed, which trains nothing")
    elif "replicas" in given:
        raise ConfigError(f"--replicas {options.parallel.replicas}: needs --distributed, which starts processes")
    if of_training:
        return
    for name in ("precision", "deterministic", "no-deterministic"):
        if name in given:
            raise ConfigError(f"--{name}: has no effect on doctor without a training run: its own checks set it")
    if "threads" in given and not options.doctor.distributed:
        raise ConfigError("--threads: has no effect on doctor without --distributed or a training run")


def _examine(loaded: Loaded[DoctorOptions], say: Say) -> int:
    """Measure a training run with these options, and print what limits it."""
    data = loaded.options.data
    if data.data_dir is not None and data.data_dir.is_dir():
        say(_disk(data.data_dir))
    say("measuring reading, decoding, copying and computing of this configuration ...")
    free = host.available()
    found = bottleneck.find(loaded, free=free)
    decoder = input.decoder("cuda" if found.options.data.decode_device == "cuda" else "cpu")
    for text in Advice(found=found, free=free, cores=cores(), decoder=decoder).lines():
        say(text)
    return 0


def _disk(folder: Path) -> str:
    try:
        return disk_speed.measure(folder).line(folder)
    except OSError as error:
        return f"disk of {folder}: not measured, because no file can be made there: {error.strerror or error}"


# Processes.


def _distributed(loaded: Loaded[DoctorOptions], place: Place | None) -> int:
    options = loaded.options
    if place is None:
        for text in machine_facts.lines():
            console.spoken()(text)
    count = processes(options)
    if place is None and count > 1:
        from falconet.parallel.launch import Workers, launch

        workers = Workers(argv=["doctor", *typed(loaded.line)], processes=count, restarts=0)
        return launch(workers, progress=lambda: None, say=console.spoken())
    return _check_processes(options, place)


def processes(options: DoctorOptions) -> int:
    """The number of processes to check: --replicas, or else one per CUDA device, or two on a CPU."""
    cuda = device_kind(options.machine.device) == "cuda"
    return value_or(options.parallel.replicas, torch.cuda.device_count() if cuda else 2)


def _check_processes(options: DoctorOptions, place: Place | None) -> int:
    """Run every check and report it on the first process; exit code 2 if one fails."""
    threads = value_or(options.machine.threads, cores())
    with open_world(options.machine.device, threads=threads, deterministic=True, place=place, timeout=TIMEOUT) as world:
        say = console.screen_of(world).line
        say(f"{counted(world.size, 'process')} on {world.device.type}")
        failed = []
        for finding in selftest.findings(world):
            say(f"{'ok    ' if finding.held else 'FAILED'}  {finding.name}: {finding.words}")
            failed += [] if finding.held else [finding.name]
        if failed:
            raise DeviceError(f"--distributed: {counted(len(failed), 'check')} failed: {', '.join(failed)}")
    return 0
