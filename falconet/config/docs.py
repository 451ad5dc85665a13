"""docs/options.md and docs/configs.md, generated: `python -m falconet.config.docs options > docs/options.md`."""

import re
import sys
from collections.abc import Iterable, Iterator

from falconet.config.commands import COMMANDS, InferOptions, TrainOptions
from falconet.config.fields import Option, options_of, sections_of
from falconet.config.load import EXTENDS, Use, about, all_configs, deviations, families, from_config, parse, use_of
from falconet.config.rules import stages_of
from falconet.config.settings import spelled


def options_page() -> str:
    """The whole page; a section shared by several commands is shown once."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Options"
    yield ""
    yield "Generated from `falconet/config/` by `make docs`; a test fails when it is stale. A switch `--x`"
    yield "has a counterpart `--no-x`. In a YAML config the same names are keys, with `-` or `_`."
    shown: set[type[object]] = set()
    for name, command in COMMANDS.items():
        sections = sections_of(command)
        if not sections:
            continue
        again = [_title(section) for section in sections.values() if section in shown]
        yield ""
        yield f"## falconet {name}"
        yield ""
        yield (command.__doc__ or "").strip()
        if again:
            yield f"Takes the options of {', '.join(again)} as above, and these:"
        for field, section in sections.items():
            if section not in shown:
                shown.add(section)
                options = [option for option in options_of(command).values() if option.path[0] == field]
                yield from _section(section, options)


def _section(section: type[object], options: list[Option]) -> Iterator[str]:
    yield ""
    yield f"### {_title(section)}"
    yield ""
    yield (section.__doc__ or "").strip()
    yield ""
    yield "| option | value | default | meaning |"
    yield "|---|---|---|---|"
    for option in options:
        value = "switch" if option.is_flag else option.wanted()
        yield f"| `--{option.name}` | {value} | {_default(option)} | {option.help} |".replace("<", "&lt;")


def _title(section: type[object]) -> str:
    """`LearningRate` as `Learning rate`."""
    first, *others = re.findall("[A-Z][a-z]*", section.__name__)
    return " ".join([first, *map(str.lower, others)])


def _default(option: Option) -> str:
    if option.default is None or option.default == ():
        return "none"
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return f"`{' '.join(spelled(option.default))}`"


INTRODUCTION = """# Named configs

Generated from `falconet/configs/` by `make docs`; a test fails when it is stale. `--config NAME` takes one, and what is
typed counts more. `falconet configs` lists them.

Those of the originals have the originals' names and mean what the originals' files said: a test compares each with what
the dialects make of `compat/*/configs.yml`, option by option. None of them was run to its end here. Figures after "The
original:" are what its documents, its vendor's page or its public MLPerf logs state, on its hardware; where there are
none, none is known.

- They were made for 1 to 256 devices. On fewer, replicas are folded into accumulation and stages into one process: the
  global batch and the learning rate stay, and a line says so.
- Those on ImageNet need `--data-dir` (or `DATA_DIR`).
- A name that a training and an inference benchmark share is two configs: the command decides.
- Where releases differ under one name, the TensorFlow program's SDK 2.1 counts, then SDK 2.5.
"""


def configs_page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(line for family in families() for line in _family(family))])


def _family(family: str) -> Iterator[str]:
    use, names = use_of(family), families()[family]
    yield f"## {family}"
    yield ""
    yield f"For `falconet {use}`."
    yield ""
    yield from _predicting(names) if use == "bench infer" else _training(names)
    yield ""
    stated = {name: [*_extended(name, use), *deviations(name, use=use)] for name in names}
    if any(stated.values()):
        yield "What differs from the original, and why:"
        yield ""
        for name, lines in stated.items():
            if lines:
                yield f"- `{name}`: {' '.join(lines)}"
        yield ""


def _extended(name: str, use: Use) -> Iterator[str]:
    parent = all_configs(use)[name].get(EXTENDS)
    if parent:
        yield f"as `{parent}`."


def _training(names: Iterable[str]) -> Iterator[str]:
    yield "| config | about | global batch | replicas x stages | epochs | optimizer, peak lr | regime |"
    yield "|---|---|---|---|---|---|---|"
    for name in names:
        options = parse(TrainOptions, from_config(name, options_of(TrainOptions))).options
        micro, accumulation = options.data.micro_batch_size, options.training.gradient_accumulation
        replicas = 1 if options.parallel.replicas == "auto" else options.parallel.replicas
        cells = (
            f"`{name}`",
            about(name),
            f"{micro * accumulation * replicas:,} = {micro} x {accumulation} x {replicas}",
            f"{replicas} x {stages_of(options.parallel)}",
            f"{options.training.epoch}",
            f"{options.optimizer.optimizer}, {options.learning_rate.lr:.6g}",
            options.machine.precision,
        )
        yield f"| {' | '.join(cells)} |"


def _predicting(names: Iterable[str]) -> Iterator[str]:
    yield "| config | about | model | micro-batch | regime |"
    yield "|---|---|---|---|---|"
    for name in names:
        settings = from_config(name, options_of(InferOptions), use="bench infer")
        options = parse(InferOptions, settings).options
        cells = (
            f"`{name}`",
            about(name, use="bench infer"),
            options.model.model,
            f"{options.data.micro_batch_size}",
            options.machine.precision,
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write({"options": options_page, "configs": configs_page}[sys.argv[1]]())
