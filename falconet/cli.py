"""The command line: find the command, load its options once, run it; a mistake is one line and exit code 2."""

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import NoReturn

from falconet import __version__, exits, inputs
from falconet.config import synonyms
from falconet.config.commands import (
    COMMANDS,
    AverageOptions,
    BenchOptions,
)
from falconet.config.help import EVERYTHING, help_lines, overview
from falconet.config.load import read_line
from falconet.errors import (
    NO_ROOM,
    SHORTAGES,
    Interrupted,
    SaidElsewhereError,
    UserError,
    WorldError,
    did_you_mean,
    memory_shortage,
    printable,
)
from falconet.exits import DONE, FAILED, INTERRUPTED, MISTAKE
from falconet.parallel.environment import is_first, is_one_of_several, said_here
from falconet.report.styles import FALCONET, Conventions

GROUPS = frozenset(name.split()[0] for name in COMMANDS if " " in name)  # first words of commands of two words
CONVENTIONAL = ("train", "restore", "validate", "bench infer", "bench serve")  # commands that take conventions
HELP = ("-h", "--help", EVERYTHING)
UNUSABLE = (errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR)  # a path that the user named, or something at its place
ONE_PROCESS = (AverageOptions, BenchOptions)  # only the first of several processes runs them
START = "New here? `falconet doctor`, then `falconet train`: 20 seconds on two cores."


def main(argv: Sequence[str] | None = None, conventions: Conventions = FALCONET) -> int:
    """Run one command and return its exit code; `conventions`: those of the program that the user started."""
    words = list(sys.argv[1:] if argv is None else argv)
    show_any_name()
    # OpenMP threads that spin while they wait would take cores from the loader; must be set before torch is imported.
    os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY") or "PASSIVE"
    if is_one_of_several(os.environ):  # torch's C++ code logs late processes as errors; ours report them in one line
        os.environ["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL") or "FATAL"
    name, rest = command_name(words)
    called = conventions.called or f"falconet {name if name in COMMANDS else ''}".rstrip()
    try:
        return _run(name, rest, conventions)
    except SaidElsewhereError as error:
        return error.code
    except UserError as error:
        message = said_here(os.environ, str(error))
        if message is not None:
            _complain(conventions.words(message), called)
        return error.code
    except WorldError as error:
        _complain(conventions.words(str(error)), called)
        return FAILED
    except (Interrupted, KeyboardInterrupt):
        return INTERRUPTED
    except SHORTAGES as error:
        short = memory_shortage(error)
        if short is not None:
            _complain(f"{short}; expected a smaller batch, a smaller model or more memory", called)
            return MISTAKE
        if isinstance(error, OSError):
            return unwritten(error, called)
        raise


def _run(name: str, rest: list[str], conventions: Conventions) -> int:
    if name in (*HELP, "help") and rest and rest != ["help"]:  # `falconet help train`
        name, rest = command_name(rest)[0], ["--help"]
    group, _, second = name.partition(" ")
    if name in (*HELP, "help") or (group in GROUPS and name not in COMMANDS and second in ("", *HELP, "help")):
        _print(_overview(group if group in GROUPS else ""))
        return DONE
    if name == "--version":
        _print([f"falconet {__version__}"])
        return DONE
    if name.startswith("-"):
        raise UserError(f"{name}: expected a command before it, such as `falconet train {name}`")
    if name not in COMMANDS:
        word = synonyms.command_meant(name, COMMANDS)
        meant = f"; did you mean 'falconet {word}'?" if word else did_you_mean(name, [*COMMANDS, *GROUPS])
        meant = meant or f"; expected {', '.join(COMMANDS)}"
        raise UserError(f"'{name}' is not a command{meant}")
    command, longer = COMMANDS[name], [other for other in COMMANDS if other.startswith(f"{name} ")]
    if set(HELP) & set(rest) or rest == ["help"]:
        _print(help_lines(name, command, others=longer, everything=EVERYTHING in rest))
        return DONE
    if longer and rest and not rest[0].startswith("-"):
        meant = did_you_mean(f"{name} {rest[0]}", longer) or f"; expected {', '.join(longer)}"
        raise UserError(f"'{name} {rest[0]}' is not a command{meant}")
    if command in ONE_PROCESS and not is_first(os.environ):
        return DONE
    with exits.at_once():
        photos = conventions.photos_config
        loaded = inputs.load(command, read_line(command, rest, photos=photos))
    from falconet.report.console import NOTICE, Noticed  # imports rich, which help and mistakes do not need

    # torch takes two seconds to import, timm another three: every mistake in the line has been reported by now.
    loading = Noticed("torch", f"falconet {__version__}: loading PyTorch ...")
    with exits.at_once(NOTICE.end), loading if is_first(os.environ) else nullcontext():
        module = import_module(f"falconet.commands.{name.replace(' ', '_')}")
    given = {"conventions": conventions} if name in CONVENTIONAL else {}
    try:
        code: int = module.run(loaded, **given)
    finally:
        NOTICE.end()
    return code


def command_name(words: list[str]) -> tuple[str, list[str]]:
    """The command of a line, which may be two words, and the words after it."""
    two = " ".join(words[:2])
    if two in COMMANDS or (words and words[0] in GROUPS and words[0] not in COMMANDS):
        return two, words[2:]
    return (words[0], words[1:]) if words else ("--help", [])


def _overview(group: str) -> list[str]:
    """Every command, or those of one group."""
    if not group:
        return [*overview(COMMANDS, usage="COMMAND"), START]
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(f"{group} ")}
    return overview(shown, usage=f"{group} COMMAND")


def unwritten(error: OSError, program: str) -> int:
    """Explain a failed write and return the exit code; a reader that stopped reading (`--help | head`) is no error."""
    if isinstance(error, BrokenPipeError):
        return DONE
    where = f" ({error.filename})" if error.filename else ""
    if found := NO_ROOM.get(error.errno or 0):
        message = f"{found.why}{where}; {found.helps}; everything saved before is intact"
    elif (isinstance(error, PermissionError) or error.errno in UNUSABLE) and error.filename:
        message = f"{error.filename}: {error.strerror}; expected a file or folder that you may read and write"
    else:
        raise error
    print(printable(f"{program}: {message}"), file=sys.stderr)  # noqa: T201
    return MISTAKE


def show_any_name() -> None:
    """Let stdout escape characters that it cannot encode, as stderr does: a file's name may be any bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def end(code: int) -> NoReturn:
    """End the process with a command's exit code; at once after an interruption, or as one of several processes."""
    if code == INTERRUPTED or is_one_of_several(os.environ):
        exits.now(code)
    exits.soon(code)


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines))  # noqa: T201


def _complain(message: str, program: str) -> None:
    print(printable(f"{program}: {message}"), file=sys.stderr)  # noqa: T201
