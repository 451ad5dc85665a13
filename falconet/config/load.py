"""A command's options, parsed once and checked once; each value comes with its source.

A later source overrides an earlier one: defaults, the environment, the checkpoint, the recipe, the command line. A
recipe overrides a checkpoint because it is named on the line.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from falconet.config import effects, rules, synonyms
from falconet.config.commands import (
    BenchServeOptions,
    Command,
    DoctorOptions,
    InferOptions,
    SearchOptions,
    TrainOptions,
)
from falconet.config.fields import Option, options_of, sections_of, value_of
from falconet.config.recipes import PHOTOS_CONFIG, Use, from_config, source_of
from falconet.config.settings import (
    CHECKPOINT,
    DEFAULT,
    LINE,
    WEIGHTS,
    Setting,
    apart,
    from_checkpoint,
    from_environment,
    from_line,
    is_asked_for,
    is_option,
    refuse_assignment,
    spelled,
)
from falconet.errors import ConfigError, did_you_mean

OptionsT = TypeVar("OptionsT")
OptionsT_co = TypeVar("OptionsT_co", covariant=True)
INVOCATION = (  # how a run was started, not what it does
    *("config", "plan", "run-dir", "name-suffix", "temporary", "resume", "checkpoint-input-path", "checkpoint"),
)
IMPLIED = "implied by --data-dir"
LOWERED = ("micro-batch-size", "warmup-epoch")  # the config for photos states the most; the start of a run settles it
MEASURED = ("lr",)  # options whose auto a new run measures; a run that continues keeps the number
_PLAIN = re.compile(r"[A-Za-z0-9_./+-][A-Za-z0-9_./:+-]*")


@dataclass(frozen=True)
class Loaded(Generic[OptionsT_co]):
    """Checked options, the source of each value, and what they were loaded from."""

    options: OptionsT_co
    sources: Mapping[str, str]  # by option name; defaults are not listed
    line: tuple[Setting, ...] = ()  # the recipe's settings, then those that were typed
    checkpoint: Path | None = None  # the checkpoint that supplied what the line does not set

    def over(self, table: Mapping[str, Mapping[str, object]]) -> "Loaded[OptionsT_co]":
        """Load the same line over the options in a checkpoint, which settle the recipe's automatic ones."""
        settled = unsettled(self.line) & table.keys()
        if table.get("model", {}).get("source") == WEIGHTS and not self.chooses("model"):
            settled |= {"model"}
        return load_options(type(self.options), [each for each in self.line if each.bare not in settled], table)

    def chooses(self, name: str) -> bool:
        """Whether the user chose a value that weights may also state; the photos config's model counts as a default."""
        source = self.sources.get(name)
        return is_asked_for(source) and (name, source) != ("model", source_of(PHOTOS_CONFIG))

    def table(self) -> dict[str, dict[str, Any]]:
        """Every option with its value and source, for run folders and checkpoints; unset ones are left out."""
        values = {}
        for name, option in options_of(type(self.options)).items():
            value = value_of(self.options, option)
            if value is not None and name not in INVOCATION:
                values[name] = {"value": _plain(value), "source": self.sources.get(name, DEFAULT)}
        return values

    def rooted(self) -> "Loaded[OptionsT_co]":
        """The same options, with absolute paths where a checkpoint supplies them: it is used from other folders too."""
        options: Any = self.options
        for option in options_of(type(options)).values():
            value, (section, field) = value_of(options, option), option.path
            if isinstance(value, Path) and option.origin and not option.is_local:
                options = replace(options, **{section: replace(getattr(options, section), **{field: value.absolute()})})
        return replace(self, options=options)

    def to_yaml(self, kept: Mapping[str, Mapping[str, Any]] | None = None) -> str:
        """The options as a file for --config, with sources as comments; `kept`: options that the checkpoint states."""
        known = options_of(type(self.options))
        lines, first = [], {name: {**entry, "source": CHECKPOINT} for name, entry in (kept or {}).items()}
        for name, entry in (self.table() | first).items():
            # A default stays open: auto is written as auto, whatever it stood for in this run.
            value = _plain(known[name].default) if entry["source"] == DEFAULT else entry["value"]
            lines.append(f"{name}: {_yaml(value)}  # {entry['source']}")
        return "\n".join(lines) + "\n"


LoadedTraining = Loaded[TrainOptions]


def left_out(loaded: Loaded[Any], table: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Local options that the checkpoint's run had and this one lacks, each with what typing it again would do."""
    found = {}
    for name, option in options_of(type(loaded.options)).items():
        if not option.is_local or name not in table or is_asked_for(loaded.sources.get(name)):
            continue
        is_lost = table[name]["value"] not in (_plain(option.default), _plain(value_of(loaded.options, option)))
        if option.origin and option.origin.again and is_lost:
            found[name] = option.origin.again
    return found


def read_line(command: type[Command], argv: Sequence[str], *, photos: str | None = None) -> list[Setting]:
    """The settings of a command line, after those of its --config; `photos`: the default config for photos."""
    options = options_of(command)
    line = from_line(_with_names(command, argv), options)
    named = [setting.values[0] for setting in line if setting.option == "config"]
    if not named and photos and command in (TrainOptions, SearchOptions, DoctorOptions) and _names_photos(line):
        named = [photos]
    use: Use = "bench infer" if command in (InferOptions, BenchServeOptions) else "train"
    return (from_config(named[-1], options, use=use) if named else []) + line


def _with_names(command: type[Command], argv: Sequence[str]) -> Sequence[str]:
    """The line with names for the options that were given by position, wherever they are."""
    if not command.arguments:
        return argv
    words, named = apart(argv, options_of(command))
    for word in words:
        if not os.path.exists(word):  # noqa: PTH110, Path's raises where it may not look
            refuse_assignment(word, options_of(command))
    given = {word.lstrip("-").partition("=")[0].replace("_", "-") for word in named if is_option(word)}
    taken = {*given, *(argument for option, argument in command.instead.items() if option in given)}
    left = [name for name in command.arguments if name not in taken]
    if len(words) > len(left) and left[-1:] == ["data-dir"]:
        raise _too_many(words[len(left) - 1 :])
    first = [token for name, word in zip(left, words, strict=False) for token in (f"--{name}", word)]
    return [*first, *words[len(left) :], *named]  # the last one gets the rest, and refuses it if it takes one value


def _too_many(folders: Sequence[str]) -> ConfigError:
    parents = {str(Path(each).parent) for each in folders}
    is_meant = parents != {"."} or all(map(os.path.isdir, folders))  # else a word is a slip, not a class
    meant = f"; did you mean '{parents.pop()}'?" if is_meant and len(parents) == 1 else ""
    return ConfigError(
        f"got '{' '.join(folders)}', expected one folder with all photos, in train/ and val/ if they are divided{meant}"
    )


def _names_photos(line: Sequence[Setting]) -> bool:
    """Whether a line's data is a folder of photos, as a data folder alone implies."""
    stated = {setting.option: setting.values for setting in line}
    return stated.get("data", ("folder",) if "data-dir" in stated else ()) == ("folder",)


def load_options(
    command: type[OptionsT], line: Sequence[Setting], checkpoint: Mapping[str, Mapping[str, object]] | None = None
) -> Loaded[OptionsT]:
    """Load and check the options of a line; `checkpoint`: the options that a checkpoint stores."""
    options = options_of(command)
    stored = from_checkpoint(checkpoint, options) if checkpoint else []
    implied = [Setting("data", ("folder",), IMPLIED)] if "data" in options and _names_photos([*stored, *line]) else []
    loaded = load(command, [*from_environment(os.environ, options), *implied, *stored, *line])
    return Loaded(loaded.options, loaded.sources, tuple(line))


def load(command: type[OptionsT], settings: Iterable[Setting]) -> Loaded[OptionsT]:
    """Parse and check settings; a later one overrides an earlier one of the same option."""
    loaded = parse(command, settings)
    is_lowered = loaded.sources.get("warmup-epoch") == source_of(PHOTOS_CONFIG)
    rules.check(loaded.options, but=[rules.warmup_ends_before_training] if is_lowered else [])
    return loaded


def parse(command: type[OptionsT], settings: Iterable[Setting]) -> Loaded[OptionsT]:
    """Parse settings: each value has its type and range, but combinations are not checked."""
    known, sections, line = options_of(command), sections_of(command), tuple(settings)
    final = dict[str, Setting]()
    for setting in line:
        final.pop(setting.bare, None)  # in the order in which they were stated last, which `effects.notes` reads
        final[setting.bare] = setting
    values: dict[str, dict[str, object]] = {section: {} for section in sections}
    for name, setting in final.items():
        section, field = known[name].path
        values[section][field] = _value(known[name], setting)
    options = command(**{section: cls(**values[section]) for section, cls in sections.items()})
    return Loaded(options, {name: setting.source for name, setting in final.items()}, line)


def _value(option: Option, setting: Setting) -> object:
    if option.is_flag:
        return setting.option == option.name
    if option.takes_path and "" in setting.values:  # from an unset shell variable
        raise _wrong_value(setting, f"{option.expected()}; '.' is this folder")
    try:
        return option.value(setting.values)
    except ValueError:
        raise _wrong_value(setting, option.expected(), _meant(option, setting.values)) from None


def _meant(option: Option, values: tuple[str, ...]) -> str:
    if not values:
        return ""
    word, why_not = synonyms.choice_meant(option.name, values[-1]), synonyms.why_not(option.name, values[-1])
    return f"{why_not}; did you mean '{word}'?" if word else did_you_mean(values[-1], option.choices)


def _wrong_value(setting: Setting, expected: str, meant: str = "") -> ConfigError:
    return ConfigError(f"{setting.where}: got '{' '.join(setting.values)}', expected {expected}{meant}")


def _plain(value: object) -> object:
    """The value as JSON and YAML can hold it, spelled as it would be typed."""
    if isinstance(value, bool):
        return value
    texts = spelled(value)
    return list(texts) if isinstance(value, tuple) else texts[0]


def _yaml(value: object) -> str:
    """A scalar or a list on one line, quoted where YAML would misread it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def unused_notes(options: object, line: Sequence[Setting]) -> list[str]:
    """A note for each option of the line that has no effect; `options`: what the line led to."""
    sources = {setting.bare: setting.source for setting in line}
    return [f"note: {note}" for note in effects.notes(options, sources)]


def unsettled(line: Sequence[Setting]) -> set[str]:
    """Options that a recipe, or --lr auto, leaves to the start of the run, which settles them."""
    final = {setting.bare: setting for setting in line}
    automatic = {name for name, each in final.items() if each.values == ("auto",)}
    open_ = {name for name in automatic if final[name].source != LINE or name in MEASURED}
    return open_ | {name for name in LOWERED if name in final and final[name].source == source_of(PHOTOS_CONFIG)}


def typed(line: Sequence[Setting]) -> list[str]:
    """What was typed, for another process that runs the same command and reads the config itself."""
    return [word for setting in line if setting.source == LINE for word in setting.argv()]


def of_command(command: type[object], line: Sequence[Setting]) -> list[Setting]:
    """The settings of a line that another command has too."""
    known = options_of(command)
    return [setting for setting in line if setting.bare in known]
