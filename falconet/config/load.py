"""Named configs: stored command lines, in files by family, each with a line on what it is and reaches."""

import contextlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import tyro

from falconet.config import effects, rules
from falconet.config.commands import BenchServeOptions, InferOptions
from falconet.config.fields import Option, options_of, value_of
from falconet.config.help import STYLE
from falconet.config.settings import (
    LINE,
    Setting,
    from_checkpoint,
    from_environment,
    from_file,
    from_line,
    from_mapping,
    is_asked_for,
    read_yaml,
    spelled,
)
from falconet.errors import ConfigError, did_you_mean

ABOUT, DEVIATIONS, EXTENDS = "about", "deviations", "extends"  # the keys of an entry that are not options
Use = Literal["train", "bench infer"]  # the command that a config is for: the originals used some names for both
Entry = Mapping[str, object]


def from_config(name: str, options: Mapping[str, Option], *, use: Use = "train") -> list[Setting]:
    """The settings of a named config, or of a YAML file of the user's; those it extends come first."""
    if name.endswith((".yaml", ".yml")):
        return from_file(Path(name), options)
    settings = []
    for each in _chain(name, use):
        own = {key: value for key, value in all_configs(use)[each].items() if _is_option(key)}
        settings += from_mapping(own, options, source=f"config {each}")
    return settings


def values_of(name: str, *, use: Use = "train") -> dict[str, object]:
    """What a named config says in all, by option as it is typed without dashes; nothing for an unknown name."""
    if name not in all_configs(use):
        return {}
    entries = (all_configs(use)[each] for each in _chain(name, use))
    return {key.replace("_", "-"): value for entry in entries for key, value in entry.items() if _is_option(key)}


def about(name: str, *, use: Use = "train") -> str:
    """The line that says what a named config is, on what it ran, and what it reaches."""
    return " ".join(str(all_configs(use)[name].get(ABOUT, "")).split())


def deviations(name: str, *, use: Use = "train") -> list[str]:
    """What differs from the original's config of this name, itself, without what it extends."""
    stated = all_configs(use)[name].get(DEVIATIONS, [])
    assert isinstance(stated, list)
    return [" ".join(str(line).split()) for line in stated]


def all_configs(use: Use = "train") -> dict[str, Entry]:
    """Every named config for a command, by name, in the order of the files."""
    configs: dict[str, Entry] = {}
    for family, entries in families().items():
        if use_of(family) == use:
            assert not configs.keys() & entries.keys(), f"two configs have a name of {family}.yaml"
            configs |= entries
    return configs


def use_of(family: str) -> Use:
    """The command that the configs of a file are for."""
    return "bench infer" if family == "inference" else "train"


@cache
def families() -> dict[str, dict[str, Entry]]:
    """The files of named configs, by name."""
    found: dict[str, dict[str, Entry]] = {}
    with resources.as_file(resources.files("falconet.configs")) as folder:
        for path in sorted(folder.glob("*.yaml")):
            content = read_yaml(path)
            assert isinstance(content, dict)
            found[path.stem] = content
    return found


def _chain(name: str, use: Use) -> list[str]:
    """What a config extends, from the first on, and itself."""
    configs = all_configs(use)
    if name not in configs:
        raise ConfigError(_unknown(name, use))
    parent = configs[name].get(EXTENDS)
    return [*(_chain(str(parent), use) if parent else []), name]


def _is_option(key: str) -> bool:
    return key not in (ABOUT, DEVIATIONS, EXTENDS)


def _unknown(name: str, use: Use) -> str:
    other: Use = "bench infer" if use == "train" else "train"
    if name in all_configs(other):
        return f"--config: '{name}' is a config for `falconet {other}`, not for `falconet {use}`"
    configs = all_configs(use)
    meant = did_you_mean(name, configs) or f"; `falconet configs` lists all {len(configs)}"
    return f"--config: no config is named '{name}'{meant}"


Options = TypeVar("Options")
INVOCATION = (  # how a run was started, not what it does
    *("config", "plan", "run-dir", "name-suffix", "temporary", "resume", "checkpoint-input-path"),
)
MEANT = {  # words of other programs that are near to a wrong choice here, by option
    "device": {"gpu": "cuda"},
    "precision": {
        **{"fp16": "16.16", "float16": "16.16", "half": "16.16", "amp": "16.32", "mixed": "16.32"},
        **{"fp32": "32.32", "float32": "32.32", "single": "32.32", "bf16": "bf16.32", "bfloat16": "bf16.32"},
    },
}
_PLAIN = re.compile(r"[A-Za-z0-9_./+-][A-Za-z0-9_./:+-]*")


@dataclass(frozen=True)
class Loaded(Generic[Options]):
    """Checked options, and for each one the source of its value."""

    options: Options
    sources: Mapping[str, str]  # option name -> where its value came from

    def table(self) -> dict[str, dict[str, Any]]:
        """Every option with its value and source, for run folders and checkpoints; unset ones are left out."""
        values = {}
        for name, option in options_of(type(self.options)).items():
            value = value_of(self.options, option)
            if value is not None and name not in INVOCATION:
                values[name] = {"value": _plain(value), "source": self.sources.get(name, "default")}
        return values

    def to_yaml(self) -> str:
        """The same as a file that --config takes, the sources as comments."""
        known = options_of(type(self.options))
        lines = []
        for name, entry in self.table().items():
            # What nobody asked for stays open: auto is written as auto, whatever it came to here.
            value = _plain(known[name].default) if entry["source"] == "default" else entry["value"]
            lines.append(f"{name}: {_yaml(value)}  # {entry['source']}")
        return "\n".join(lines) + "\n"


def left_out(loaded: Loaded[Any], table: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """The local options that a checkpoint's run had and this one has not, each with what naming it again would do."""
    known = options_of(type(loaded.options))
    found = {}
    for name, option in known.items():
        if not option.is_local or name not in table or is_asked_for(loaded.sources.get(name)):
            continue
        if option.origin and option.origin.again and table[name]["value"] != _plain(option.default):
            found[name] = option.origin.again
    return found


def load(command: type[Options], settings: Iterable[Setting]) -> Loaded[Options]:
    """The options of a command, checked; a later setting overrides an earlier one of the same option."""
    loaded = parse(command, settings)
    rules.check(loaded.options)
    return loaded


def parse(command: type[Options], settings: Iterable[Setting]) -> Loaded[Options]:
    """The same before the rules: each value has its type and range, and nothing is said about combinations."""
    final: dict[str, Setting] = {}
    known = options_of(command)
    for setting in settings:
        final[_bare(setting.option, known)] = setting
    for name, setting in final.items():
        if known[name].takes_path and "" in setting.values:  # of a shell's variable that is not set
            raise _wrong_value(setting, f"{known[name].wanted()}; '.' is this folder")
    options = _parse(command, final)
    for name, option in known.items():
        wanted = option.out_of_range(value_of(options, option))
        if wanted:
            raise _wrong_value(final[name], wanted)
    return Loaded(options, {name: setting.source for name, setting in final.items()})


def _parse(command: type[Options], final: Mapping[str, Setting]) -> Options:
    parsed = _try(command, [token for setting in final.values() for token in setting.argv()])
    if parsed is not None:
        return parsed
    for name, setting in final.items():
        if _try(command, setting.argv()) is None:
            option = options_of(command)[name]
            raise _wrong_value(setting, option.wanted(), _meant(name, setting.values, option.choices()))
    raise AssertionError("every setting parses alone, so all of them do")


def _try(command: type[Options], argv: list[str]) -> Options | None:
    """Parse with tyro, whose own error boxes are not shown: ours name the source as well."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(command, args=argv, config=STYLE, console_outputs=False)
    except SystemExit:
        return None


def _meant(name: str, values: tuple[str, ...], choices: tuple[str, ...]) -> str:
    if not values:
        return ""
    word = MEANT.get(name, {}).get(values[-1].lower())
    return f"; did you mean '{word}'?" if word else did_you_mean(values[-1], choices)


def _wrong_value(setting: Setting, wanted: str, meant: str = "") -> ConfigError:
    name = f"--{setting.option}" if setting.source == LINE else f"{setting.source}: {setting.option}"
    return ConfigError(f"{name}: got '{' '.join(setting.values)}', wanted {wanted}{meant}")


def _bare(name: str, options: Mapping[str, Option]) -> str:
    return name if name in options else name.removeprefix("no-")


def _plain(value: object) -> object:
    """A value that JSON and YAML can hold, spelled as it would be typed."""
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


def read_line(command: type[Options], argv: Sequence[str]) -> list[Setting]:
    """The settings of a command line, with those of its --config before them."""
    options = options_of(command)
    line = from_line(argv, options)
    named = [setting.values[0] for setting in line if setting.option == "config"]
    use: Use = "bench infer" if command in (InferOptions, BenchServeOptions) else "train"
    return (from_config(named[-1], options, use=use) if named else []) + line


def load_options(
    command: type[Options], line: Sequence[Setting], checkpoint: Mapping[str, Mapping[str, object]] | None = None
) -> Loaded[Options]:
    """Checked options: environment, then the checkpoint's, then the line's."""
    options = options_of(command)
    stored = from_checkpoint(checkpoint, options) if checkpoint else []
    return load(command, [*from_environment(os.environ, options), *stored, *line])


def idle_lines(options: object, line: Sequence[Setting]) -> list[str]:
    """One note for each option of the line that has no effect; `options` are those that came of it."""
    sources = {setting.option.removeprefix("no-"): setting.source for setting in line}
    return [f"note: {note}" for note in effects.notes(options, sources)]


def typed(line: Sequence[Setting]) -> list[str]:
    """What was typed, for another process of the same command; it reads the config itself."""
    return [word for setting in line if setting.source == LINE for word in setting.argv()]


def of_command(command: type[object], line: Sequence[Setting]) -> list[Setting]:
    """The settings of another command's line that this one knows too."""
    known = options_of(command)
    return [setting for setting in line if setting.option.removeprefix("no-") in known]


def input_path(line: Sequence[Setting]) -> Path:
    """--checkpoint-input-path, which is needed before the rest can be read."""
    paths = [setting.values[0] for setting in line if setting.option == "checkpoint-input-path"]
    if not paths:
        raise ConfigError("--checkpoint-input-path: is needed: a checkpoint, a folder of them, or a run folder")
    return Path(paths[-1])
