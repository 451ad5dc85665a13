"""The words a dialect is written in: an old option, the program it belongs to, and what it becomes here."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from falconet.dialects.values import Values

Kind = Literal["flag", "whole", "number", "text"]
Count = Literal["one", "some", "maybe"]  # a value, one or more, none or one


@dataclass(frozen=True)
class To:
    """A canonical option with its value as text; a switch has none, and is turned off by `no-` before its name."""

    option: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Say:
    """One line for the user: what is different here."""

    text: str


@dataclass(frozen=True)
class Variable:
    """An environment variable that has the old option's effect."""

    name: str
    value: str


Effect = To | Say | Variable
Rule = Callable[[Values], Iterable[Effect]]


@dataclass(frozen=True, kw_only=True)
class Old:
    """One option of an original program."""

    name: str  # as it is typed, with its dashes
    kind: Kind
    effect: str  # one line: what it does here, or why it does nothing
    new: tuple[str, ...] = ()  # canonical options it sets, without dashes; none: no effect here
    rule: Rule | None = None
    aliases: tuple[str, ...] = ()
    count: Count = "one"
    default: str | None = None  # as it would be typed
    choices: tuple[str, ...] = ()
    bare: str | None = None  # the value of a `maybe` option that is given without one
    required: bool = False
    lower: bool = False  # its value is read in small letters
    least: int | None = None  # the smallest number that means something

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def key(self) -> str:
        """Its name in a YAML file; `no-validation` is there as `validation: false` too."""
        return self.name.lstrip("-").replace("_", "-")

    @property
    def has_effect(self) -> bool:
        return bool(self.new)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of the originals."""

    name: str  # as the tables of the originals have it: tf1:train.py
    options: tuple[Old, ...]
    command: str | Callable[[Values], str]  # the canonical command
    about: str
    whole: bool = True  # sets the defaults of its own too; else only what was typed, over what a checkpoint says
    style: str | None = None  # whose lines and files it leaves; None: ours
    rule: Rule | None = None  # what it sets whatever is typed
    word: Old | None = None  # a word that is no option's value, such as a path; none: there are no such words
    renamed: Mapping[str, str] = field(default_factory=dict)  # documented under a name that no release had

    @property
    def rows(self) -> tuple[Old, ...]:
        """Its options, and the word that is none."""
        return (*self.options, self.word) if self.word else self.options

    @property
    def dialect(self) -> str:
        return self.name.partition(":")[0]

    @property
    def script(self) -> str:
        return self.name.partition(":")[2].rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an old line was typed: what it can see besides itself."""

    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None  # of the program
    configs: Path | None = None  # its configs.yml, if it has one
    replicas: int | None = None  # what a launcher asked for, in all
