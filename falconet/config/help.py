"""The help of a command: a worked example, the most used options first, the rest under headings."""

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from falconet.config import options, tool_options
from falconet.config.commands import Command, DoctorOptions, SearchOptions, TrainOptions
from falconet.config.fields import Option, options_of, sections_of
from falconet.config.recipes import PHOTOS_CONFIG, values_of
from falconet.config.settings import spelled

WIDEST = 120  # columns
LEFT = 28  # columns for an option and its value; longer ones have a line to themselves
EVERYTHING = "--help-all"
CONTINUED = " \\"  # at the end of a shell's line


def overview(commands: dict[str, type[Command]], *, usage: str) -> list[str]:
    """The overview: every command on a line."""
    width = max(map(len, commands))
    rows = (_row(name, _about(command), width=width) for name, command in commands.items())
    return [
        f"usage: falconet {usage} [options]",
        "",
        "Train convolutional image classifiers with PyTorch, from a laptop to a cluster.",
        "",
        *(line for row in rows for line in row),
        "",
        f"`falconet {usage} --help` lists its options.",
    ]


def help_lines(name: str, command: type[Command], *, others: Sequence[str] = (), everything: bool = False) -> list[str]:
    """The help of one command; `others`: longer commands that start with its name."""
    known = options_of(command)
    words = {argument: argument.upper() for argument in command.arguments}
    arguments = [f"[{word}]" if argument in command.optional else word for argument, word in words.items()]
    usage = ["usage: falconet", name, *arguments, *(["[options]"] if known else [])]
    examples = [command.example, *(f"falconet {other} --help" for other in others)]
    lines = [" ".join(usage), "", *wrapped(_about(command)), "", "Examples:" if others else "Example:"]
    lines += [line for example in examples for line in _typed(example)]
    if everything or not command.common:
        for section in sections_in_order(command):
            lines += ["", f"{title(section)}:", *_rows(_of(section, command), for_photos(command))]
    else:
        headings = sections_in_order(command)
        common = [known[option] for option in command.common]
        lines += ["", "Common options:", *_rows(common, for_photos(command))]
        lines += ["", *wrapped(f"`falconet {name} {EVERYTHING}` lists all {len(known)} options, under these headings:")]
        width = max(len(title(section)) for section in headings)
        lines += [line for section in headings for line in _row(title(section), _about(section), width=width)]
    if any(option.is_flag for option in known.values()):
        lines += ["", *wrapped("A switch has no value; --no- before its name turns it off.")]
    return lines


def sections_in_order(command: type[object]) -> list[type[object]]:
    """The sections of a command as they are declared: a checkpoint's table keeps another order."""
    order = [*vars(options), *vars(tool_options)]
    return sorted(sections_of(command).values(), key=lambda section: order.index(section.__name__))


def title(section: type[object]) -> str:
    """`LearningRate` as `Learning rate`."""
    first, *others = re.findall("[A-Z][a-z]*", section.__name__)
    return " ".join([first, *map(str.lower, others)])


def default_of(option: Option) -> str:
    """An option's default as it would be typed, or `none` if it is unset or empty."""
    if option.default is None or option.default == ():
        return "none"
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return " ".join(spelled(option.default))


def for_photos(command: type[object]) -> dict[str, str]:
    """The defaults, by option, that differ where a run trains on photos."""
    if command not in (TrainOptions, SearchOptions, DoctorOptions):
        return {}
    known = options_of(command)
    stated = {name: str(value) for name, value in values_of(PHOTOS_CONFIG).items()}
    return {name: text for name, text in stated.items() if text != default_of(known[name])}


def wrapped(text: str, *, indent: str = "") -> list[str]:
    """The lines of a text on this terminal; those after the first start with `indent`."""
    return textwrap.wrap(
        text, width=_columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _of(section: type[object], command: type[object]) -> list[Option]:
    return [option for option in options_of(command).values() if option.section is section]


def _rows(options: Sequence[Option], photos: Mapping[str, str]) -> Iterator[str]:
    for option in options:
        on = option.is_flag and bool(option.default)
        name = f"--[no-]{option.name}" if on else f"--{option.name}"
        left = name if option.is_flag else f"{name} {option.metavar()}"
        unset = not option.choices and default_of(option) in ("none", "off") and option.name not in photos
        also = f", for photos {photos[option.name]}" if option.name in photos else ""
        text = option.help if unset else f"{option.help.removesuffix('.')} (default: {default_of(option)}{also})."
        yield from _row(left, text, width=LEFT)


def _row(left: str, text: str, *, width: int) -> list[str]:
    """Two columns; a left one that is too long has its line to itself."""
    indent = " " * (width + 4)
    if len(left) > width:
        return [*wrapped(f"  {left}", indent="      "), *wrapped(indent + text, indent=indent)]
    return wrapped(f"  {left.ljust(width)}  {text}", indent=indent)


def _about(cls: type[object]) -> str:
    return (cls.__doc__ or "").strip()


def _typed(example: str) -> list[str]:
    """A command line; where the terminal is too narrow it continues on the next line, as a shell reads it."""
    parts = textwrap.wrap(example, width=_columns() - 8, break_long_words=False, break_on_hyphens=False)
    return ("  " + f"{CONTINUED}\n      ".join(parts)).split("\n")


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST)
