"""An old line or YAML entry, split into the options of its program, as the originals' argparse would."""

import re
from collections.abc import Iterable, Mapping, Sequence

from falconet.config.options import options_of
from falconet.config.schema import COMMANDS
from falconet.dialects.table import Old, Place, Program
from falconet.dialects.values import Values, check, truth
from falconet.errors import ConfigError, did_you_mean

_NUMBER = re.compile(r"-\.?\d")
Given = dict[str, tuple[str, ...]]  # by the option's first name


def from_line(program: Program, argv: Iterable[str], *, others: Sequence[Program] = ()) -> Given:
    """What was typed; the last of two wins. `others`: programs whose options may have been meant."""
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
            raise ConfigError(f"'{token}': an option was wanted, such as {program.options[0].name}")
    return {option.name: check(option, tuple(values), spelled=spelled) for spelled, option, values in typed}


def _is_full(option: Old, values: Sequence[str]) -> bool:
    """Whether an option takes no further value."""
    return option.kind == "flag" or (option.count != "some" and bool(values))


def from_mapping(program: Program, mapping: object, *, source: str, others: Sequence[Program] = ()) -> Given:
    """What a YAML entry of the originals says: keys with `_` or `-`, text, numbers, booleans and lists."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source}: a mapping of options was wanted, such as `epochs: 10`")
    names = _names(program)
    given: Given = {}
    for key, value in mapping.items():
        spelled = "--" + str(key).replace("_", "-")
        negated = f"--no-{spelled[2:]}"
        if spelled not in names and negated in names:  # argparse keeps --no-validation as `validation`
            spelled, value = negated, {"true": "false", "false": "true"}.get(str(value).lower(), value)
        folded = {name.lower().replace("_", "-"): name for name in names}
        if spelled.lower() not in folded:
            raise _unknown(spelled, names, program, others, where=f"{source}: ", dashes=False)
        option = names[folded[spelled.lower()]]
        values = tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)
        if option.kind == "flag":
            on = truth(values[0]) if len(values) == 1 else None
            if on is None:
                raise ConfigError(f"{source}: {key}: got '{' '.join(values)}', wanted true or false")
            if on:
                given[option.name] = ()
        elif values:  # an empty list leaves the option alone
            given[option.name] = check(option, values, spelled=f"{source}: {key}")
    return given


def _names(program: Program) -> dict[str, Old]:
    return {name: option for option in program.options for name in option.names}


def _full(spelled: str, names: Mapping[str, Old], program: Program, others: Sequence[Program]) -> str:
    """The whole name of an option that may be shortened, as long as it stays clear which one is meant."""
    if spelled in names:
        return spelled
    begun = {names[name].name: name for name in names if spelled.startswith("--") and name.startswith(spelled)}
    if len(begun) == 1:
        return next(iter(begun.values()))
    if len(begun) > 1:
        raise ConfigError(f"{spelled}: could be {' or '.join(sorted(begun.values()))}")
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
        says = f"{where}{shown} is {_whose(other, program)}; {program.script} has no such option"
        more = () if other.dialect == program.dialect else foreign.new
        return ConfigError(says + (_canonical((spelled.lstrip("-"), *more), program) if dashes else ""))
    own = _canonical((spelled.lstrip("-"),), program) if dashes else ""
    return ConfigError(f"{where}unknown option {shown}{own or did_you_mean(spelled, names)}")


def _named_here(foreign: Old, program: Program) -> list[str]:
    """The options of a program that set what another program's sets first."""
    return [option.name for option in program.options if set(option.new) & set(foreign.new[:1])]


def _whose(other: Program, program: Program) -> str:
    return f"{other.script}'s" if other.dialect == program.dialect else f"the {TITLES[other.dialect]} program's"


def _canonical(names: Iterable[str], program: Program) -> str:
    """Where the first of these goes that the command has which the program becomes."""
    schema = COMMANDS.get(_command(program))
    own = [name for name in names if schema and name in options_of(schema)]
    return f"; Falconet's own goes behind a lone --: -- --{own[0]}" if own else ""


def _command(program: Program) -> str:
    """What a program becomes if nothing is typed."""
    if isinstance(program.command, str):
        return program.command
    return program.command(Values({option.name: option for option in program.rows}, {}, Place()))


TITLES = {"pytorch": "PyTorch", "tf1": "TensorFlow", "popart": "PopART", "tool": "benchmark"}
