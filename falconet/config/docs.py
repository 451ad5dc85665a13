"""The generated pages docs/knowing/options.md and docs/knowing/configs.md; `make docs` writes them."""

import sys
from collections.abc import Iterable, Iterator

from falconet.config.commands import COMMANDS, InferOptions, TrainOptions
from falconet.config.facts import stages_of
from falconet.config.fields import Option, options_of
from falconet.config.help import default_of, sections_in_order, title
from falconet.config.load import parse
from falconet.config.recipes import EXTENDS, Use, about, all_configs, deviations, families, from_config, use_of


def options_page() -> str:
    """The page of all options; a section shared by several commands is shown once."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Options"
    yield ""
    yield "Generated from `falconet/config/` by `make docs`; a test fails when it is stale. `--no-x` turns the switch"
    yield "`--x` off. In a YAML config the same names are keys, with `-` or `_`."
    shown: set[type[object]] = set()
    for name, command in COMMANDS.items():
        sections = sections_in_order(command)
        if not sections:
            continue
        again = [title(section) for section in sections if section in shown]
        yield ""
        yield f"## falconet {name}"
        yield ""
        yield (command.__doc__ or "").strip()
        if again:
            yield f"Takes the options of {', '.join(again)} as above, and these:"
        for section in sections:
            if section not in shown:
                shown.add(section)
                yield from _section(section, [each for each in options_of(command).values() if each.section is section])


def _section(section: type[object], options: list[Option]) -> Iterator[str]:
    yield ""
    yield f"### {title(section)}"
    yield ""
    yield (section.__doc__ or "").strip()
    yield ""
    yield "| option | value | default | meaning |"
    yield "|---|---|---|---|"
    for option in options:
        value = "switch" if option.is_flag else option.expected()
        default = default_of(option)
        plain = option.is_flag or default == "none"
        cells = f"| `--{option.name}` | {value} | {default if plain else f'`{default}`'} | {option.help} |"
        yield cells.replace("<", "&lt;")


INTRODUCTION = """# Named configs

Generated from `falconet/configs/` by `make docs`; a test fails when it is stale. Use one with `--config NAME`; options
on the command line override it. `falconet configs` lists them.

The originals' configs keep their names and their meaning: a test compares each one, option by option, with the
translation of `compat/*/configs.yml`. None of them has been trained to the end here. What an original "reached" comes
from its documents, its vendor's page or its public MLPerf logs, on its hardware; no figure means that none is known.

- They were made for 1 to 256 devices. On fewer, replicas are folded into accumulation and stages into one process; the
  global batch and the learning rate stay the same, and a note reports the change.
- Configs on ImageNet need `--data-dir` (or `DATA_DIR`).
- Where a training and an inference config share a name, the command decides which one is meant.
- Where releases of the TensorFlow program differ under one name, SDK 2.1 takes precedence over SDK 2.5.
"""


def configs_page() -> str:
    """The page of all named configs."""
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
        yield "Differences from the original, and why:"
        yield ""
        for name, lines in stated.items():
            if lines:
                yield f"- `{name}`: {' '.join(lines)}"
        yield ""


def _extended(name: str, use: Use) -> Iterator[str]:
    parent = all_configs(use)[name].get(EXTENDS)
    if parent:
        yield f"extends `{parent}`."


def _training(names: Iterable[str]) -> Iterator[str]:
    yield "| config | about | global batch | replicas x stages | epochs | optimizer, peak lr | regime |"
    yield "|---|---|---|---|---|---|---|"
    for name in names:
        options = parse(TrainOptions, from_config(name, options_of(TrainOptions))).options
        micro, accumulation = options.data.micro_batch, options.training.gradient_accumulation
        replicas = 1 if options.parallel.replicas == "auto" else options.parallel.replicas
        cells = (
            f"`{name}`",
            about(name),
            f"{micro * accumulation * replicas:,} = {micro} x {accumulation} x {replicas}",
            f"{replicas} x {stages_of(options.parallel)}",
            f"{options.training.epoch}",
            f"{options.optimizer.optimizer}, {options.learning_rate.peak:.6g}",
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
            f"{options.data.micro_batch}",
            options.machine.precision,
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write({"options": options_page, "configs": configs_page}[sys.argv[1]]())
