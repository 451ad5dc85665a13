"""From a benchmark's command as it is written to the words and the environment of a process."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from falconet.bench.spec import Benchmark
from falconet.errors import ConfigError, did_you_mean
from falconet.report.folders import RUNS

_PARAMETER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_TRAINS = ("train.py", "resnet_main.py")  # scripts of the originals


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is started: words, variables on top of the environment, and the folder."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path

    def shown(self) -> str:
        """As one would type it."""
        own = ["falconet", *self.argv[3:]] if self.argv[1:3] == ("-m", "falconet") else self.argv
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(own)])


def build(
    benchmark: Benchmark, parameters: Mapping[str, str], *, wandb: bool, profile: bool, note: Callable[[str], None]
) -> Command:
    """The command of one variant."""
    filled = _with_parameters(benchmark, parameters)
    outside = os.environ | {name: os.path.expandvars(value) for name, value in benchmark.environment.items()}
    try:
        words = [_with_variables(word, outside, note) for word in shlex.split(filled)]
    except ValueError as error:
        raise ConfigError(f"{benchmark.where}: {benchmark.name}: cmd: {str(error).lower()}") from error
    environment = {name: outside[name] for name in benchmark.environment}
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        environment[found[1]] = found[2]
        del words[0]
    if not words:
        raise ConfigError(f"{benchmark.where}: {benchmark.name}: cmd: has no program in it")
    if not (wandb or benchmark.allow_wandb):
        words = _without_wandb(words)
    if profile and _trains(words):
        words.append("--profile")
    return Command(argv=tuple(_program(words)), environment=environment, folder=benchmark.folder)


def child_environment(command: Command, runs: Path) -> dict[str, str]:
    """This process's environment with the command's; programs of this Python come first, runs go to `runs`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH") or os.defpath])
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", RUNS: str(runs)} | dict(command.environment)


def _with_parameters(benchmark: Benchmark, parameters: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in parameters:
            meant = did_you_mean(name, parameters) or "; wanted it among the parameters"
            raise ConfigError(f"{benchmark.where}: {benchmark.name}: cmd: nothing is known of {{{name}}}{meant}")
        return parameters[name]

    return _PARAMETER.sub(value, benchmark.command)


def _with_variables(word: str, environment: Mapping[str, str], note: Callable[[str], None]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environment.get(name):
            note(f"note: ${name} is {'empty' if name in environment else 'not set; taken as empty'}")
        return environment.get(name, "")

    return _VARIABLE.sub(value, word)


def _without_wandb(words: list[str]) -> list[str]:
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--wandb"):
            dropping = word != "--wandb" and "=" not in word
        elif dropping and not word.startswith("-"):
            dropping = False
        else:
            dropping = False
            kept.append(word)
    return kept


def _trains(words: list[str]) -> bool:
    return words[:2] == ["falconet", "train"] or any(Path(word).name in _TRAINS for word in words)


def _program(words: list[str]) -> list[str]:
    """Falconet and Python are those that run this, wherever the shell would look."""
    if words[0] == "falconet":
        return [sys.executable, "-m", "falconet", *words[1:]]
    return [sys.executable, *words[1:]] if words[0] in ("python", "python3") else words
