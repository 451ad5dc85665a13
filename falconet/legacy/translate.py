"""Translation of an original's command line, parsed as argparse parsed it, into a canonical one."""

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from falconet.config.commands import COMMANDS
from falconet.config.effects import unused
from falconet.config.fields import Option, options_of
from falconet.config.load import parse
from falconet.config.settings import LINE, Setting, Unrepeated, read_yaml, spelled
from falconet.errors import ConfigError, did_you_mean
from falconet.legacy import popart, pytorch, tensorflow
from falconet.legacy.table import (
    Effect,
    Needs,
    Note,
    Old,
    Place,
    Program,
    To,
    Values,
    Variable,
    check_value,
    stored,
    truth,
)

PROGRAMS = {
    program.name: program for program in (*pytorch.PROGRAMS, *tensorflow.PROGRAMS, *popart.PROGRAMS, *pytorch.RUNNERS)
}
# Programs whose options are easily confused.
TRAINERS = tuple(PROGRAMS[name] for name in ("pytorch:train.py", "tf1:train.py", "popart:resnet_main.py"))
TITLES = {"pytorch": "PyTorch", "tf1": "TensorFlow", "popart": "PopART", "tool": "benchmark"}
MOST_NEAR = 3  # suggestions for an unknown name
_NUMBER = re.compile(r"-\.?\d")
_HERE = Place()
Given = dict[str, tuple[str, ...]]  # by the option's first name


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A canonical command line, with notes on the differences."""

    command: str  # one or two words
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    environment: Mapping[str, str]
    needs: tuple[Needs, ...] = ()
    # The old options, as the program's own file had them; None: not all are known.
    stored: Mapping[str, object] | None = None

    def argv(self) -> list[str]:
        """The canonical command line, without the program's name."""
        return [*self.command.split(), *(word for setting in self.settings for word in setting.argv())]

    def line(self, more: Sequence[str] = ()) -> str:
        """The command line for a shell, with its variables before and `more` words after it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(["falconet", *self.argv(), *more])])


def translate(program: str, argv: Sequence[str], *, place: Place = _HERE) -> Translation:
    """Translate a line of an original's program, such as `tf1:train.py`; typed options override its named config."""
    own = program_named(program)
    typed = from_line(own, argv, others=_others(own))
    return _translated(own, _Asked(typed=typed, config=_config(own, typed, place)), place)


def translate_mapping(program: str, mapping: object, *, source: str, place: Place = _HERE) -> Translation:
    """Translate options of an original written as YAML or JSON."""
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
    """Typed options, and those of the named config, which they override."""

    typed: Given
    config: Given

    @property
    def all(self) -> Given:
        return {**self.config, **self.typed}

    def asks_for(self, option: Old, options: Sequence[Old]) -> bool:
        """Whether the option was asked for, or one that its rule reads."""
        given = self.all
        parts = (part for part in options if part.name in given and part.rule is None)
        return option.name in given or any(set(part.new) & set(option.new) for part in parts)


def _others(own: Program) -> list[Program]:
    """The programs whose options may have been meant: first those of the same dialect, trainers before the rest."""
    others = (program for program in PROGRAMS.values() if program is not own and program.dialect in TITLES)
    return sorted(others, key=lambda one: (one.dialect != own.dialect, one not in TRAINERS))


def _translated(own: Program, asked: _Asked, place: Place) -> Translation:
    values = Values({option.name: option for option in own.rows}, asked.all, place)
    _check_required(own, asked.all)
    command = own.command if isinstance(own.command, str) else own.command(values)
    schema = COMMANDS.get(command)
    known = options_of(schema) if schema else None
    settings: dict[str, Setting] = {}
    notes: list[str] = []
    environment: dict[str, str] = {}
    needs: list[Needs] = []
    requested: set[str] = set()  # canonical options that the line asks for
    for option, effects in _effects(own, values, asked, command):
        is_requested = option is not None and asked.asks_for(option, own.options)
        for effect in effects:
            if isinstance(effect, Note):
                notes.append(effect.text)
            elif isinstance(effect, Variable):
                environment[effect.name] = effect.value
            elif isinstance(effect, Needs):
                needs.append(effect)
            elif known is not None and not _is_known(effect, known):
                if option is not None and option.name in asked.typed:
                    notes.append(f"{option.name}: has no effect on `falconet {command}`")
            else:
                name = _bare(effect.option)
                settings.pop(name, None)
                settings[name] = Setting(effect.option, effect.values, LINE)
                requested |= {name} if is_requested else set()
    if schema and known and _is_whole(own, command):
        typed = [option for option in own.options if option.name in asked.all]
        try:
            settings = _needed(
                settings, known, command=schema, requested={name: _askers(name, typed) for name in requested}
            )
        except ConfigError as error:
            raise ConfigError(_in_old_words(str(error), typed)) from None
    return Translation(
        command=command,
        settings=tuple(settings.values()),
        notes=(*dict.fromkeys(notes), *_unused_in_config(own, asked)),
        environment=environment,
        stored=stored(own, values) if _is_whole(own, command) else None,
        needs=tuple(needs),
    )


def _effects(
    own: Program, values: Values, asked: _Asked, command: str
) -> Iterator[tuple[Old | None, Iterable[Effect]]]:
    whole = _is_whole(own, command)
    if own.rule and whole:
        yield None, own.rule(values)
    for option in own.rows:
        unused = not option.has_effect and option.name not in asked.typed  # a config's are noted in one line
        if option.rule and not unused and (whole or asked.asks_for(option, own.options)):
            yield option, option.rule(values)


def _unused_in_config(own: Program, asked: _Asked) -> Iterator[str]:
    options = {option.name: option for option in own.options}
    unused = [name for name in asked.config if not options[name].has_effect and name not in asked.typed]
    if unused:
        yield f"of the config, these have no effect here: {', '.join(unused)}"


def _is_whole(own: Program, command: str) -> bool:
    """Whether the line sets every option; otherwise a checkpoint's options come first."""
    return own.whole and command not in ("restore", "validate", "average")


def _in_old_words(message: str, typed: Sequence[Old]) -> str:
    """An error, preceded by the typed name if the canonical option has another one."""
    name = message.removeprefix("--").partition(":")[0]
    meant = [option for option in typed if name in option.new]
    if any(f"--{name}" in option.names for option in typed) or not meant:
        return message
    return f"{min(meant, key=lambda option: option.new.index(name)).name}: here {message}"


def _askers(name: str, typed: Sequence[Old]) -> list[tuple[str, ...]]:
    """The canonical options of each typed option that sets this one."""
    return [option.new for option in typed if name in option.new]


def _needed(
    settings: Mapping[str, Setting],
    known: Mapping[str, Option],
    *,
    command: type[object],
    requested: Mapping[str, Sequence[tuple[str, ...]]],
) -> dict[str, Setting]:
    """The settings without defaults and without parts of options that have no effect here."""
    changed = {
        name: setting
        for name, setting in settings.items()
        if name not in known or not _is_default(setting, known[name])
    }
    there = [setting for name, setting in changed.items() if name in known]
    options = parse(command, there).options
    without_effect = unused(options)
    effective = settings.keys() - without_effect.keys()
    noted = {name for name, asked in requested.items() if not asked or any(not effective & {*new} for new in asked)}
    return {name: setting for name, setting in changed.items() if name in noted or name not in without_effect}


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
            raise ConfigError(f"{option.name}: is required by {own.script}")


def _bare(option: str) -> str:
    return option.removeprefix("no-")


def from_line(program: Program, argv: Iterable[str], *, others: Sequence[Program] = ()) -> Given:
    """The typed options; the last of two wins. `others`: programs whose options may have been meant."""
    names = _names(program)
    typed: list[tuple[str, Old, list[str]]] = []
    for token in argv:
        if token.startswith("-") and token != "-" and not _NUMBER.match(token):
            spelled, equals, value = token.partition("=")
            option = names[_full(spelled, names, program, others)]
            typed.append((spelled, option, [value] if equals else []))
        elif program.word is not None and (not typed or _is_full(typed[-1][1], typed[-1][2])):
            typed.append((token, program.word, [token]))
        elif typed and typed[-1][1].kind != "flag":
            typed[-1][2].append(token)
        elif typed:
            raise ConfigError(f"{typed[-1][0]}: is a switch and takes no value, got '{token}'")
        else:
            raise ConfigError(f"got '{token}', expected an option, such as {program.options[0].name}")
    return {option.name: check_value(option, tuple(values), spelled=spelled) for spelled, option, values in typed}


def _is_full(option: Old, values: Sequence[str]) -> bool:
    """Whether an option takes no further values."""
    return option.kind == "flag" or (option.count != "some" and bool(values))


def from_mapping(program: Program, mapping: object, *, source: str, others: Sequence[Program] = ()) -> Given:
    """The options of a YAML entry: keys with `_` or `-`, values as text, numbers, booleans and lists."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source}: expected options, such as `epochs: 10`")
    names = _names(program)
    given: Given = {}
    for key, value in mapping.items():
        if value is None:  # neither typed nor a default
            continue
        spelled = "--" + str(key).replace("_", "-")
        if key == "profile" and spelled not in names:  # the TensorFlow program stored --gc-profile so
            spelled = "--gc-profile"
        negated = f"--no-{spelled[2:]}"
        if spelled not in names and negated in names:  # argparse stores --no-validation as `validation`
            spelled, value = negated, {"true": "false", "false": "true"}.get(str(value).lower(), value)
        folded = {name.lower().replace("_", "-"): name for name in names}
        if spelled.lower() not in folded:
            raise _unknown(spelled, names, program, others, where=f"{source}: ", dashes=False)
        option = names[folded[spelled.lower()]]
        values = tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)
        if option.kind == "flag":
            on = truth(values[0]) if len(values) == 1 else None
            if on is None:
                raise ConfigError(f"{source}: {key}: got '{' '.join(values)}', expected true or false")
            if on:
                given[option.name] = ()
        elif values:  # an empty list sets nothing
            given[option.name] = check_value(option, values, spelled=f"{source}: {key}")
    return given


def _names(program: Program) -> dict[str, Old]:
    return {name: option for option in program.options for name in option.names}


def _full(spelled: str, names: Mapping[str, Old], program: Program, others: Sequence[Program]) -> str:
    """The full name of an option, which may be shortened as long as it is unambiguous."""
    if spelled in names:
        return spelled
    longer = {names[name].name: name for name in names if spelled.startswith("--") and name.startswith(spelled)}
    if len(longer) == 1:
        return next(iter(longer.values()))
    if len(longer) > 1:
        raise ConfigError(f"{spelled}: could be {' or '.join(sorted(longer.values()))}")
    raise _unknown(spelled, names, program, others, where="", dashes=True)


def _unknown(
    spelled: str, names: Mapping[str, Old], program: Program, others: Sequence[Program], *, where: str, dashes: bool
) -> ConfigError:
    shown = spelled if dashes else spelled[2:]
    meant = [(other, _names(other)[spelled]) for other in others if spelled in _names(other)]
    for other, foreign in meant:
        if other.dialect != program.dialect and (here := _named_here(foreign, program)):
            return ConfigError(f"{where}{shown} is {_whose(other, program)}; here it is {' or '.join(here)}")
    for other, foreign in meant[:1]:
        text = f"{where}{shown} is {_whose(other, program)}; {program.script} has no such option"
        more = () if other.dialect == program.dialect else foreign.new
        return ConfigError(text + (_canonical((spelled.lstrip("-"), *more), program) if dashes else ""))
    own = _canonical((spelled.lstrip("-"),), program) if dashes else ""
    return ConfigError(f"{where}unknown option {shown}{own or did_you_mean(spelled, names)}")


def _named_here(foreign: Old, program: Program) -> list[str]:
    """The options of a program that set the same canonical option as another program's option."""
    return [option.name for option in program.options if set(option.new) & set(foreign.new[:1])]


def _whose(other: Program, program: Program) -> str:
    return f"{other.script}'s" if other.dialect == program.dialect else f"the {TITLES[other.dialect]} program's"


def _canonical(names: Iterable[str], program: Program) -> str:
    """The canonical spelling of the first of these options that the program's command has."""
    schema = COMMANDS.get(command_without_options(program))
    own = [name for name in names if schema and name in options_of(schema)]
    return f"; Falconet's option goes after a lone --: -- --{own[0]}" if own else ""


def command_without_options(program: Program) -> str:
    """The command of a program without options."""
    if isinstance(program.command, str):
        return program.command
    return program.command(Values({option.name: option for option in program.rows}, {}, Place()))


class _Texts(Unrepeated, yaml.SafeLoader):
    """Keeps scalars as text, so that 16.16 stays 16.16, but merges `<<`, because the originals' files use it."""

    yaml_implicit_resolvers = {  # noqa: RUF012, PyYAML's own way
        "<": [("tag:yaml.org,2002:merge", re.compile("<<"))]
    }


def _config(own: Program, typed: Given, place: Place) -> Given:
    """The options of the named config, if the line names one."""
    if "--config" not in typed:
        return {}
    name = typed["--config"][-1]
    path = typed.get("--config-path", (place.configs,))[-1]
    if path is None:
        raise ConfigError(f"--config {name}: there is no configs.yml here; expected --config-path")
    entry = config_entry(name, Path(path))
    return from_mapping(own, entry, source=f"config {name}", others=_others(own))


def config_entry(name: str, path: Path) -> Mapping[str, object]:
    """One config of a file."""
    configs = read_configs(path)
    found = configs.get(name)
    if name in configs and not isinstance(found, Mapping):
        raise ConfigError(f"--config: {path}: {name}: expected options below it, such as `epochs: 10`")
    if not isinstance(found, Mapping):
        known = [str(key) for key, entry in configs.items() if isinstance(entry, Mapping)]
        there = _meant(name, known) or f"; expected {', '.join(known)}"
        raise ConfigError(f"--config: no config is named '{name}' in {path}{there}")
    return found


def _meant(name: str, known: Sequence[str]) -> str:
    """The nearest names: first those that start with this one, then those of similar spelling."""
    longer = [one for one in known if name and one.startswith(name)]
    near = list(dict.fromkeys([*longer, *difflib.get_close_matches(name, known, n=MOST_NEAR, cutoff=0.5)]))
    *others, last = [f"'{one}'" for one in near[:MOST_NEAR]] or [""]
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


def read_configs(path: Path) -> Mapping[str, object]:
    """A file of named configs."""
    try:
        content = read_yaml(path, loader=_Texts)
    except ConfigError as error:
        raise ConfigError(f"--config: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config: {path}: expected named configs, such as `my_config:` with options below it")
    return content
