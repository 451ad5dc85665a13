"""The engine: an old line of one program becomes a canonical one, with a line for whatever is different."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from falconet.config import rules
from falconet.config.load import parse
from falconet.config.options import Option, options_of
from falconet.config.settings import LINE, Setting, spelled
from falconet.dialects import named
from falconet.dialects.commands import SCHEMAS
from falconet.dialects.parse import Given, from_line, from_mapping
from falconet.dialects.programs import PROGRAMS, TRAINERS
from falconet.dialects.table import Effect, Old, Place, Program, Say, Variable
from falconet.dialects.values import Values
from falconet.errors import ConfigError, did_you_mean

_HERE = Place()


@dataclass(frozen=True, kw_only=True)
class Translation:
    """What an old line means here."""

    command: str  # one or two words
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    environment: Mapping[str, str]

    def argv(self) -> list[str]:
        """The canonical command line, without the program's name."""
        return [*self.command.split(), *(word for setting in self.settings for word in setting.argv())]

    def line(self) -> str:
        """The same for a shell, with the variables it needs."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(["falconet", *self.argv()])])


def translate(program: str, argv: Sequence[str], *, place: Place = _HERE) -> Translation:
    """A line of one of the originals' programs, such as `tf1:train.py`; its named config comes before what is typed."""
    own = program_named(program)
    typed = from_line(own, argv, others=_others(own))
    return _translated(own, {**_config(own, typed, place), **typed}, place)


def translate_mapping(program: str, mapping: object, *, source: str, place: Place = _HERE) -> Translation:
    """The same for options of the originals written as YAML or JSON."""
    own = program_named(program)
    return _translated(own, from_mapping(own, mapping, source=source, others=_others(own)), place)


def program_named(name: str) -> Program:
    if name not in PROGRAMS:
        raise ConfigError(f"'{name}' is not a program of the originals{did_you_mean(name, PROGRAMS)}")
    return PROGRAMS[name]


def _others(own: Program) -> list[Program]:
    return [program for program in TRAINERS if program.dialect != own.dialect]


def _config(own: Program, typed: Given, place: Place) -> Given:
    """The options of the named config, as far as this program has one."""
    if "--config" not in typed:
        return {}
    name = typed["--config"][-1]
    path = typed.get("--config-path", (place.configs,))[-1]
    if path is None:
        raise ConfigError(f"--config {name}: no configs.yml is known here; wanted --config-path")
    entry = named.entry(name, Path(path))
    return from_mapping(own, entry, source=f"config {name}", others=_others(own))


def _translated(own: Program, given: Given, place: Place) -> Translation:
    values = Values({option.name: option for option in own.options}, given, place)
    _check_required(own, given)
    command = own.command if isinstance(own.command, str) else own.command(values)
    known = options_of(SCHEMAS[command]) if SCHEMAS.get(command) else None
    settings: dict[str, Setting] = {}
    notes: list[str] = []
    environment: dict[str, str] = {}
    typed: set[str] = set()  # canonical options that somebody asked for
    for option, effects in _effects(own, values, given, command):
        for effect in effects:
            if isinstance(effect, Say):
                notes.append(effect.text)
            elif isinstance(effect, Variable):
                environment[effect.name] = effect.value
            elif known is not None and _bare(effect.option) not in known:
                if option and option.name in given:
                    notes.append(f"{option.name}: has no effect on `falconet {command}`")
            else:
                name = _bare(effect.option)
                settings.pop(name, None)
                settings[name] = Setting(effect.option, effect.values, LINE)
                if option and option.name in given:
                    typed.add(name)
    if known is not None and _is_whole(own, command):
        settings = _needed(settings, known, command=SCHEMAS[command], typed=typed)
    return Translation(
        command=command,
        settings=tuple(settings.values()),
        notes=tuple(dict.fromkeys(notes)),
        environment=environment,
    )


def _effects(own: Program, values: Values, given: Given, command: str) -> Iterator[tuple[Old | None, Iterable[Effect]]]:
    whole = _is_whole(own, command)
    if own.rule and whole:
        yield None, own.rule(values)
    for option in own.options:
        if option.rule and (whole or option.name in given):
            yield option, option.rule(values)


def _is_whole(own: Program, command: str) -> bool:
    """Whether the line says everything; else a checkpoint's options lie below it."""
    return own.whole and command not in ("restore", "validate", "average")


def _needed(
    settings: Mapping[str, Setting], known: Mapping[str, Option], *, command: type[object], typed: set[str]
) -> dict[str, Setting]:
    """Without what is so anyway, and without defaults of the old program that have no effect here."""
    changed = {name: setting for name, setting in settings.items() if not _is_default(setting, known[name])}
    options = parse(command, changed.values()).options
    if "learning_rate" not in vars(options):
        return changed
    idle = {name for name, _, holds in rules.EFFECTIVE_WHEN if name in changed and not holds(options)}  # type: ignore[arg-type]
    return {name: setting for name, setting in changed.items() if name in typed or name not in idle}


def _is_default(setting: Setting, option: Option) -> bool:
    if option.is_flag:
        return bool(option.default) is not setting.option.startswith("no-")
    return setting.values == (() if option.default is None else spelled(option.default)) or _same_number(
        setting.values, option.default
    )


def _same_number(values: tuple[str, ...], default: object) -> bool:
    if len(values) != 1 or isinstance(default, bool) or not isinstance(default, int | float):
        return False
    try:
        return float(values[0]) == float(default)
    except ValueError:
        return False


def _check_required(own: Program, given: Given) -> None:
    for option in own.options:
        if option.required and option.name not in given:
            raise ConfigError(f"{option.name}: is needed by {own.script}")


def _bare(option: str) -> str:
    return option.removeprefix("no-")
