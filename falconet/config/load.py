"""From settings to checked options: defaults < environment < named config < checkpoint < command line."""

import contextlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import tyro

from falconet.config import rules
from falconet.config.help import STYLE
from falconet.config.options import Option, options_of, value_of
from falconet.config.settings import LINE, Setting, is_asked_for, spelled
from falconet.errors import ConfigError, did_you_mean

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
