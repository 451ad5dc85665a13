"""The engine: an old line of one program becomes a canonical one, with a line for whatever is different."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from falconet.config.effects import idle
from falconet.config.load import parse
from falconet.config.options import Option, options_of
from falconet.config.schema import COMMANDS
from falconet.config.settings import LINE, Setting, spelled
from falconet.dialects import named
from falconet.dialects.parse import TITLES, Given, from_line, from_mapping
from falconet.dialects.programs import PROGRAMS, TRAINERS
from falconet.dialects.table import Effect, Old, Place, Program, Say, To, Variable
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

    def line(self, more: Sequence[str] = ()) -> str:
        """The same for a shell, with the variables it needs, and `more` words behind it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(["falconet", *self.argv(), *more])])


def translate(program: str, argv: Sequence[str], *, place: Place = _HERE) -> Translation:
    """A line of one of the originals' programs, such as `tf1:train.py`; its named config comes before what is typed."""
    own = program_named(program)
    typed = from_line(own, argv, others=_others(own))
    return _translated(own, _Asked(typed=typed, config=_config(own, typed, place)), place)


def translate_mapping(program: str, mapping: object, *, source: str, place: Place = _HERE) -> Translation:
    """The same for options of the originals written as YAML or JSON."""
    own = program_named(program)
    return _translated(
        own, _Asked(typed={}, config=from_mapping(own, mapping, source=source, others=_others(own))), place
    )


def program_named(name: str) -> Program:
    if name not in PROGRAMS:
        raise ConfigError(f"'{name}' is not a program of the originals{did_you_mean(name, PROGRAMS)}")
    return PROGRAMS[name]


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Old options that were typed, and those of the named config, which count less."""

    typed: Given
    config: Given

    @property
    def all(self) -> Given:
        return {**self.config, **self.typed}

    def wants(self, option: Old, options: Sequence[Old]) -> bool:
        """Whether the option was asked for, or one that its rule reads."""
        given = self.all
        parts = (part for part in options if part.name in given and part.rule is None)
        return option.name in given or any(set(part.new) & set(option.new) for part in parts)


def _others(own: Program) -> list[Program]:
    """Programs whose options may have been meant: those of the own dialect before others, trainers before the rest."""
    others = (program for program in PROGRAMS.values() if program is not own and program.dialect in TITLES)
    return sorted(others, key=lambda one: (one.dialect != own.dialect, one not in TRAINERS))


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


def _translated(own: Program, asked: _Asked, place: Place) -> Translation:
    values = Values({option.name: option for option in own.rows}, asked.all, place)
    _check_required(own, asked.all)
    command = own.command if isinstance(own.command, str) else own.command(values)
    schema = COMMANDS.get(command)
    known = options_of(schema) if schema else None
    settings: dict[str, Setting] = {}
    notes: list[str] = []
    environment: dict[str, str] = {}
    wanted: set[str] = set()  # canonical options that somebody asked for
    for option, effects in _effects(own, values, asked, command):
        is_wanted = option is not None and asked.wants(option, own.options)
        for effect in effects:
            if isinstance(effect, Say):
                notes.append(effect.text)
            elif isinstance(effect, Variable):
                environment[effect.name] = effect.value
            elif known is not None and not _is_known(effect, known):
                if option is not None and option.name in asked.typed:
                    notes.append(f"{option.name}: has no effect on `falconet {command}`")
            else:
                name = _bare(effect.option)
                settings.pop(name, None)
                settings[name] = Setting(effect.option, effect.values, LINE)
                wanted |= {name} if is_wanted else set()
    if schema and known and _is_whole(own, command):
        typed = [option for option in own.options if option.name in asked.all]
        try:
            settings = _needed(settings, known, command=schema, wanted={name: _askers(name, typed) for name in wanted})
        except ConfigError as error:
            raise ConfigError(_in_old_words(str(error), typed)) from None
    return Translation(
        command=command,
        settings=tuple(settings.values()),
        notes=(*dict.fromkeys(notes), *_idle_in_config(own, asked)),
        environment=environment,
    )


def _effects(
    own: Program, values: Values, asked: _Asked, command: str
) -> Iterator[tuple[Old | None, Iterable[Effect]]]:
    whole = _is_whole(own, command)
    if own.style:
        yield None, [To("log-style", (own.style,))]
    if own.rule and whole:
        yield None, own.rule(values)
    for option in own.rows:
        idle = not option.has_effect and option.name not in asked.typed  # a config's are said in one line
        if option.rule and not idle and (whole or asked.wants(option, own.options)):
            yield option, option.rule(values)


def _idle_in_config(own: Program, asked: _Asked) -> Iterator[str]:
    options = {option.name: option for option in own.options}
    idle = [name for name in asked.config if not options[name].has_effect and name not in asked.typed]
    if idle:
        yield f"of the config, these have no effect here: {', '.join(idle)}"


def _is_whole(own: Program, command: str) -> bool:
    """Whether the line says everything; else a checkpoint's options lie below it."""
    return own.whole and command not in ("restore", "validate", "average")


def _in_old_words(message: str, typed: Sequence[Old]) -> str:
    """A mistake with the name before it that was typed, where the canonical option has another one."""
    name = message.removeprefix("--").partition(":")[0]
    meant = [option for option in typed if name in option.new]
    if any(f"--{name}" in option.names for option in typed) or not meant:
        return message
    return f"{min(meant, key=lambda option: option.new.index(name)).name}: here {message}"


def _askers(name: str, typed: Sequence[Old]) -> list[tuple[str, ...]]:
    """The canonical options of each old one that was typed and means this one, among others maybe."""
    return [option.new for option in typed if name in option.new]


def _needed(
    settings: Mapping[str, Setting],
    known: Mapping[str, Option],
    *,
    command: type[object],
    wanted: Mapping[str, Sequence[tuple[str, ...]]],
) -> dict[str, Setting]:
    """Without what is so anyway, and without what has no effect here: defaults, and parts of options that have one."""
    changed = {
        name: setting
        for name, setting in settings.items()
        if name not in known or not _is_default(setting, known[name])
    }
    there = [setting for name, setting in changed.items() if name in known]
    options = parse(command, there).options
    without_effect = idle(options)
    effective = settings.keys() - without_effect.keys()
    told = {name for name, asked in wanted.items() if not asked or any(not effective & {*new} for new in asked)}
    return {name: setting for name, setting in changed.items() if name in told or name not in without_effect}


def _is_known(effect: To, known: Mapping[str, Option]) -> bool:
    return _bare(effect.option) in known


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
