"""The originals' programs: each translates its command line and runs `falconet` with the conventions of its users.

`python -m falconet.legacy.programs pytorch train ...` runs a canonical line in the same way; the other names are
`tensorflow` and `popart`. The workers of a translated run start with `tensorflow:train.py`, then the options that
were typed, as JSON, before the command.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from falconet import exits

with exits.at_once():  # the first 0.3 s of every program
    from falconet import cli
    from falconet.errors import DataError, UserError, did_you_mean
    from falconet.exits import DONE, INTERRUPTED, MISTAKE
    from falconet.legacy.conventions import CONVENTIONS
    from falconet.legacy.migration import help_of
    from falconet.legacy.table import Needs, Place
    from falconet.legacy.translate import program_named, translate
    from falconet.parallel.environment import REPLICAS, find_place
    from falconet.report.folders import RUNS
    from falconet.report.styles import Conventions

SHOW = "--show-translation"


def main(program: str, script: str, argv: Sequence[str] | None = None) -> int:
    """Run one of the originals' programs, whose file `script` is beside its configs.yml; return the exit code."""
    words, ours = _split(list(sys.argv[1:] if argv is None else argv))
    name = Path(script).name if Path(script).stem != "__main__" else Path(script).resolve().parent.name
    cli.show_any_name()
    try:
        if {"-h", "--help"} & set(words):
            _print(help_of(program_named(program), words))
            return DONE
        place = _place(Path(script), os.environ)
        translation = translate(program, [word for word in words if word != SHOW], place=place)
        if SHOW in words:
            _print("\n".join([translation.line(ours), *(f"note: {note}" for note in translation.notes)]))
            return DONE
        if not any(word.startswith("--data") for word in ours):  # which names other images
            _require(translation.needs)
    except UserError as error:
        if _is_first(os.environ):
            print(f"{name}: {error}", file=sys.stderr)  # noqa: T201
        return MISTAKE
    except OSError as error:
        return cli.unwritten(error, name)
    except KeyboardInterrupt:
        return INTERRUPTED
    if _is_first(os.environ):
        for note in (*translation.notes, *_overruled(translation.environment, os.environ)):
            print(f"{name}: note: {note}", file=sys.stderr)  # noqa: T201
    for variable, value in translation.environment.items():
        os.environ[variable] = os.environ.get(variable) or value
    conventions = _conventions(program_named(program).conventions, called=name, stored=translation.stored)
    return cli.main([*translation.argv(), *ours], conventions)


def run(program: str, script: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a program and end the process with its exit code."""
    cli.end(main(program, script, argv))


def gc_info() -> NoReturn:
    """`gc-info -l`, with any flags: list this machine's devices and facts."""
    cli.end(cli.main(["doctor"]))


def gc_profile(argv: Sequence[str] | None = None) -> int:
    """`gc-profile -d DIR -- PROGRAM ...`: run a program whose run folder, and with it the profile, goes to a folder.

    The program replaces this process and gets every signal, so that it has time to save after a Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) < 4 or words[0] != "-d" or words[2] != "--":
        print("usage: gc-profile -d FOLDER -- PROGRAM [arguments]", file=sys.stderr)  # noqa: T201
        return MISTAKE
    try:
        os.execvpe(words[3], words[3:], {**os.environ, RUNS: str(Path(words[1]).absolute())})
    except OSError as error:
        print(f"gc-profile: {words[3]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return MISTAKE


def canonical(argv: Sequence[str] | None = None) -> int:
    """A canonical command line, printed in the conventions that its first word names; returns the exit code."""
    word, *line = list(sys.argv[1:] if argv is None else argv) or [""]
    name, _, called = word.partition(":")
    stored = json.loads(line.pop(0)) if line and line[0].startswith("{") else None
    if name not in CONVENTIONS:
        expected = f"expected {', '.join(CONVENTIONS)}{did_you_mean(name, CONVENTIONS)}"
        print(f"falconet.legacy.programs: got '{name}', {expected}", file=sys.stderr)  # noqa: T201
        return MISTAKE
    return cli.main(line, _conventions(name, called=called or None, stored=stored))


def _conventions(name: str, *, called: str | None, stored: Mapping[str, object] | None) -> Conventions:
    """The conventions of the original that was called, with the typed options; workers get both on their line."""
    known = CONVENTIONS[name]
    if called is not None:
        program = ("-m", "falconet.legacy.programs", f"{name}:{called}")
        known = replace(known, called=called, program=program)
    if stored is None or known.options_file is None:
        return known
    return replace(known, typed=stored, program=(*known.program, json.dumps(stored)))


def _require(needs: Sequence[Needs]) -> None:
    for need in needs:
        if not need.folder.is_dir():
            raise DataError(f"{need.folder}: no such folder; {need.how}")


def _overruled(asked: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[str]:
    """Notes about variables that are already set and so take precedence over the command line."""
    for variable, value in asked.items():
        found = environment.get(variable)
        if found and found != value:
            whose = ", set by `gc-profile -d` or `falconet bench`," if variable == RUNS else ""
            yield f"{variable}={found}{whose} takes precedence over {value}, which this line asks for"


def _print(text: str) -> None:
    if _is_first(os.environ):
        print(text)  # noqa: T201


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The original's words, and after a `--` those of Falconet, which are not translated."""
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _place(script: Path, environment: Mapping[str, str]) -> Place:
    configs = script.resolve().parent / "configs.yml"
    asked = environment.get(REPLICAS, "")
    return Place(
        environment=environment,
        folder=configs.parent,
        configs=configs if configs.exists() else None,
        replicas=int(asked) if asked.isdigit() else None,
    )


def _is_first(environment: Mapping[str, str]) -> bool:
    """Whether this process prints: of several, the first one does."""
    try:
        place = find_place(environment)
    except UserError:
        return True
    return place is None or place.rank == 0


if __name__ == "__main__":
    cli.end(canonical())
