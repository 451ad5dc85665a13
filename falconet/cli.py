"""Mistakes that names and the file system show: answered before torch is imported, which takes two seconds."""

import importlib.util
import io
import itertools
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from falconet import __version__, exits
from falconet.checkpoint import manifest
from falconet.config import commands, rules
from falconet.config.commands import (
    AverageOptions,
    InferOptions,
    PackOptions,
    RestoreOptions,
    ServeOptions,
    UploadOptions,
    ValidateOptions,
    VerifyOptions,
)
from falconet.config.help import print_help, wrapped
from falconet.config.load import input_path, load_options, parse, read_line
from falconet.config.options import unknown
from falconet.config.settings import Setting
from falconet.errors import (
    NO_ROOM,
    ConfigError,
    DataError,
    Interrupted,
    SaidElsewhereError,
    UserError,
    WorldError,
    did_you_mean,
)
from falconet.exits import DONE, FAILED, INTERRUPTED, MISTAKE
from falconet.parallel.environment import is_first, is_one_of_several, said_here

FROM_CHECKPOINT = (RestoreOptions, ValidateOptions, AverageOptions)  # most of their options are the checkpoint's
OF_ONE_PROCESS = (ValidateOptions, AverageOptions)  # of several, the others do nothing


def check_early(command: type[object], line: Sequence[Setting]) -> None:
    """Refuse a line that its command would refuse for the same reason, with the same words, but later."""
    if command in OF_ONE_PROCESS and not is_first(os.environ):
        return
    given = {setting.option for setting in line}
    if command in FROM_CHECKPOINT or (command is InferOptions and "checkpoint-input-path" in given):
        path = input_path(line)
        if not path.is_file():
            manifest.require_folder(path)
    if command in FROM_CHECKPOINT:
        problem = unknown(parse(command, line).options) if "model" in given else None
        if problem:
            raise ConfigError(problem)
        _check_validated(parse(command, line).options)
    else:
        options = load_options(command, line).options
        _check_words(options)
        _check_data(options)
        _check_validated(options)


def _check_words(options: object) -> None:
    """The folders that the first words of a command name must be there, and what it cannot do without."""
    if isinstance(options, PackOptions):
        if options.pack.source is None or options.pack.target is None:
            raise ConfigError("needs two folders: the one with train/ and val/, and the one for the shards")
        _require_photos(options.pack.source)
    elif isinstance(options, VerifyOptions):
        if options.verify.source is None:
            raise ConfigError("needs the folder with the shards")
        if not options.verify.source.is_dir():
            raise DataError(f"{options.verify.source}: no such folder, wanted one that `falconet data pack` has made")
    elif isinstance(options, UploadOptions):
        if options.upload.source is None:
            raise ConfigError("needs a run folder, as in `falconet upload runs/my-run`")
        if not options.upload.source.is_dir():
            raise ConfigError(f"{options.upload.source}: no such folder, wanted a run folder")
    elif isinstance(options, ServeOptions) and importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("needs aiohttp, which is not installed: pip install 'falconet[serve]'")


def _require_photos(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder, expected one with train/ and val/")


def _check_data(options: Any) -> None:
    """Photos that are trained on must be there; a plan may do without ImageNet."""
    if hasattr(options, "data") and options.data.data in rules.PHOTOS and not rules.only_planned(options):
        _require_photos(options.data.data_dir)


def _check_validated(options: Any) -> None:
    """Checkpoints to measure after training must be there before it, unless they are the run's own."""
    path = options.validation.validate_checkpoints if hasattr(options, "validation") else None
    run_dir = options.run.run_dir if path else None
    own = () if run_dir in (None, "auto") else (run_dir, run_dir / "checkpoints")
    if path and path not in (*own, options.checkpoints.checkpoint_output_path):
        manifest.require_folder(path)


class Command(NamedTuple):
    """What is said of a command: one line about it, and one example that works."""

    about: str
    example: str
    words: tuple[str, ...] = ()  # options that words before the first option give, in this order
    first: tuple[str, ...] = ()  # options that a newcomer needs


COMMANDS = {  # as in the schema, which has their options
    "train": Command(
        "train from scratch; with no option at all, the built-in digits",
        "falconet train --data cifar10 --data-dir data --model resnet20-cifar --epoch 100 --micro-batch-size 128",
        first=("config", "model", "data", "data-dir", "epoch", "micro-batch-size", "lr", "run-dir", "plan"),
    ),
    "restore": Command(
        "continue a run exactly where a checkpoint left it",
        "falconet restore --checkpoint-input-path runs/my-run",
        first=("checkpoint-input-path", "epoch", "run-dir", "plan"),
    ),
    "validate": Command(
        "accuracy of a checkpoint, or of each one in a folder",
        "falconet validate --checkpoint-input-path runs/my-run",
        first=("checkpoint-input-path", "data-dir", "micro-batch-size"),
    ),
    "average": Command(
        "average the checkpoints of a run into one",
        "falconet average --checkpoint-input-path runs/my-run --weight-avg-N 3 --validate",
        first=("checkpoint-input-path", "weight-avg-strategy", "weight-avg-N", "validate"),
    ),
    "bench": Command(
        "run benchmark specs, and compare with an earlier run",
        "falconet bench --spec smoke --repeat 3 --compare earlier/results.json",
    ),
    "bench infer": Command(
        "throughput and latency of a model that predicts",
        "falconet bench infer --model resnet50 --data generated --micro-batch-size 64 --iterations 200",
        first=("model", "checkpoint-input-path", "data", "micro-batch-size", "precision", "iterations"),
    ),
    "serve": Command(
        "answer over HTTP with a checkpoint's model, as Triton does",
        "falconet serve --checkpoint-input-path runs/my-run --port 8000",
        first=("checkpoint-input-path", "port", "host", "max-batch", "precision"),
    ),
    "bench serve": Command(
        "throughput and latency of a server, ours or Triton's",
        "falconet bench serve --model resnet50 --data generated --clients 8 --request-type ASYNC --iterations 50",
        first=("model", "url", "clients", "request-type", "micro-batch-size", "iterations"),
    ),
    "doctor": Command(
        "what this machine has, and whether it works",
        "falconet doctor --distributed --replicas 2",
    ),
    "data bench": Command(
        "images a second of each stage of the input, and which one limits",
        "falconet data bench --data folder --data-dir photos --model resnet50",
        first=("data", "data-dir", "model", "dataloader-workers"),
    ),
    "data pack": Command(
        "class folders into checksummed shards that decode faster",
        "falconet data pack photos photos-packed",
        words=("source", "target"),
    ),
    "data verify": Command(
        "check every image of packed shards against its checksum",
        "falconet data verify photos-packed",
        words=("source",),
    ),
    "upload": Command(
        "the metrics of a finished run to Weights & Biases",
        "falconet upload runs/my-run --name baseline --wandb-project classifiers",
        words=("source",),
    ),
    "models": Command("what there is to train: names, parameters, input sizes", "falconet models"),
    "configs": Command("named configs, and what each reaches", "falconet configs"),
}
GROUPS = frozenset(name.split()[0] for name in COMMANDS if " " in name)  # first words of commands of two words
HELP = ("-h", "--help", "help")
BEGIN = "New here? `falconet doctor`, then `falconet train`: 20 seconds on two cores."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    show_any_name()
    # Idle OpenMP threads that spin take the core from the loader's threads; before torch is imported, or never.
    os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY") or "PASSIVE"
    name, rest = command_name(words)
    try:
        return _run(name, rest)
    except SaidElsewhereError:
        return MISTAKE
    except UserError as error:
        prefix = f"falconet {name}" if name in COMMANDS else "falconet"
        said = said_here(os.environ, str(error))
        if said is not None:
            print(f"{prefix}: {said}", file=sys.stderr)  # noqa: T201
        return MISTAKE
    except WorldError as error:
        print(f"falconet {name}: {error}", file=sys.stderr)  # noqa: T201
        return FAILED
    except (Interrupted, KeyboardInterrupt):
        return INTERRUPTED
    except OSError as error:
        return unwritten(error, f"falconet {name}")


def unwritten(error: OSError, who: str) -> int:
    """The exit code where a file is in the way, or the reader of our output went away (`--help | head`): no error."""
    if isinstance(error, BrokenPipeError):
        return DONE
    said = _to_be_mended(error)
    if said is None:
        raise error
    print(f"{who}: {said}", file=sys.stderr)  # noqa: T201
    return MISTAKE


def _to_be_mended(error: OSError) -> str | None:
    """What the user can do about a file, in one line; whoever had more to say has caught it before."""
    if found := NO_ROOM.get(error.errno or 0):
        where = f" ({error.filename})" if error.filename else ""
        return f"{found.why}{where}; {found.helps}; what was saved before is whole"
    if isinstance(error, PermissionError) and error.filename:
        return f"{error.filename}: {error.strerror}; wanted one that you may read and write"
    return None


def show_any_name() -> None:
    """Let standard output escape what it cannot show, as standard error does: a file's name may be any bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def command_name(words: list[str]) -> tuple[str, list[str]]:
    """The command of a line, which may be of two words, and what follows it."""
    two = " ".join(words[:2])
    if two in COMMANDS or (words and words[0] in GROUPS and words[0] not in COMMANDS):
        return two, words[2:]
    return (words[0], words[1:]) if words else ("--help", [])


def _run(name: str, rest: list[str]) -> int:
    if name in HELP and rest and rest != ["help"]:
        name, rest = command_name(rest)[0], ["--help"]
    group, _, second = name.partition(" ")
    if name in HELP or (group in GROUPS and name not in COMMANDS and second in ("", *HELP)):
        print(_overview(group if group in GROUPS else ""))  # noqa: T201
        return DONE
    if name == "--version":
        print(f"falconet {__version__}")  # noqa: T201
        return DONE
    if name.startswith("-"):
        raise UserError(f"{name}: a command was wanted before it, such as `falconet train {name}`")
    if name not in COMMANDS:
        raise UserError(
            f"'{name}' is not a command{did_you_mean(name, [*COMMANDS, *GROUPS]) or '; wanted ' + ', '.join(COMMANDS)}"
        )
    longer = [command for command in COMMANDS if command.startswith(f"{name} ")]
    command, options = COMMANDS[name], commands.COMMANDS[name]
    if {"-h", "--help"} & set(rest) or rest == ["help"]:
        usage = " ".join([f"falconet {name}", *(word.upper() for word in command.words)])
        examples = [command.example, *(f"falconet {other} --help" for other in longer)]
        listed = options is commands.ListOptions
        about = f"{command.about[0].upper()}{command.about[1:]}. " if listed else ""
        print_help(
            options,
            usage=usage,
            about=about + (options.__doc__ or ""),
            examples=examples,
            first=[f"--{option}" for option in command.first],
        )
        return DONE
    if longer and rest and not rest[0].startswith("-"):
        meant = did_you_mean(f"{name} {rest[0]}", longer) or f"; wanted {', '.join(longer)}"
        raise UserError(f"'{name} {rest[0]}' is not a command{meant}")
    with exits.at_once():
        line = read_line(options, _named(command, rest))
        parse(options, line)
        check_early(options, line)
        # Only now torch: everything that is wrong with the line itself is answered in a fraction of a second.
        module = import_module(f"falconet.commands.{name.replace(' ', '_')}")
    code: int = module.run(line)
    return code


def end(code: int) -> NoReturn:
    """End the process with a command's exit code; at once, where somebody waits for it or it was one of several."""
    if code == INTERRUPTED or is_one_of_several(os.environ):
        exits.now(code)
    exits.soon(code)


def _named(command: Command, rest: list[str]) -> list[str]:
    """The words before the first option as the options that they give."""
    bare = list(itertools.takewhile(lambda word: not word.startswith("-"), rest))
    given = [token for name, word in zip(command.words, bare, strict=False) for token in (f"--{name}", word)]
    return given + rest[min(len(bare), len(command.words)) :]


def _overview(group: str) -> str:
    """Every command, or those of one group."""
    shown = {name: command for name, command in COMMANDS.items() if not group or name.startswith(f"{group} ")}
    width = max(map(len, shown))
    rows = [
        line
        for name, command in shown.items()
        for line in wrapped(f"  {name.ljust(width)}  {command.about}", indent=" " * (width + 4))
    ]
    usage = f"{group} COMMAND" if group else "COMMAND"
    return "\n".join(
        [
            f"usage: falconet {usage} [options]",
            "",
            "Convolutional image classifiers with PyTorch, from a laptop to a cluster.",
            "",
            *rows,
            "",
            f"`falconet {usage} --help` lists its options.",
            *([] if group else [BEGIN]),
        ]
    )
