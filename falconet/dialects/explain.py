"""A program's options in words: its help, and the rows of docs/migration.md."""

import textwrap

from falconet.dialects.table import Old, Program
from falconet.dialects.values import wanted


def help_of(program: Program) -> str:
    """What `--help` prints."""
    lines = [
        f"usage: {program.script} [options] [--show-translation]",
        "",
        f"{program.about}; an original's program, run by {command_of(program)}.",
        "",
    ]
    for option in program.rows:
        lines.append("  " + ", ".join(option.names) + _value(option) + _default(option))
        lines += textwrap.wrap(
            f"{becomes(option)}: {option.effect}", 110, initial_indent="      ", subsequent_indent="      "
        )
    lines += ["", "  -- OPTIONS", "      options of Falconet's own, taken as they are: -- --device cpu --image-size 64"]
    lines += ["  --show-translation", "      prints the canonical command line and what is different, and exits"]
    return "\n".join(lines)


def command_of(program: Program) -> str:
    """The canonical command, or commands."""
    if isinstance(program.command, str):
        return f"`falconet {program.command}`"
    return "`falconet`"


def becomes(option: Old) -> str:
    """The canonical options, spelled; variables have no dashes."""
    if not option.new:
        return "no effect here"
    return ", ".join(name if name.isupper() else f"--{name}" for name in option.new)


def _value(option: Old) -> str:
    if option.kind == "flag":
        return ""
    kind = "{" + ",".join(option.choices) + "}" if option.choices else wanted(option).split()[-1].upper()
    return {"one": f" {kind}", "some": f" {kind} ...", "maybe": f" [{kind}]"}[option.count]


def _default(option: Old) -> str:
    return f" (default {option.default})" if option.default is not None else ""
