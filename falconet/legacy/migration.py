"""The originals' options in words: `--help` of each program, and docs/originals/migration.md."""

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence

from falconet.config.commands import COMMANDS
from falconet.config.fields import options_of
from falconet.errors import ConfigError
from falconet.legacy.table import OfModel, Old, Place, Program, Values, expected
from falconet.legacy.translate import PROGRAMS, command_without_options, from_line


def help_of(program: Program, words: Sequence[str] = ()) -> str:
    """The output of `--help`; `words`: the rest of the line, which may name a model with options and defaults."""
    lines = [
        f"usage: {program.script} [options] [--show-translation]",
        "",
        f"{program.about}; a program of an original, run by {command_of(program)}.",
        "",
    ]
    model = _model_typed(program, words)
    first = [option for option in program.rows if model and option.name in model.options]
    others = [option for option in program.rows if not model or option.name not in (*model.options, *model.hidden)]
    if model:
        lines += [f"{model.title}:", *(line for option in first for line in _help(option, program, model)), ""]
        lines += ["every model (defaults are those of this one):"]
    lines += [line for option in others for line in _help(option, program, model)]
    lines += ["", "  -- OPTIONS", "      Falconet's options, not translated: -- --device cpu --image-size 64"]
    lines += [
        "  --show-translation",
        "      prints the canonical command line and notes on what is different, and exits",
    ]
    return "\n".join(lines)


def _model_typed(program: Program, words: Sequence[str]) -> OfModel | None:
    """The model's options and defaults for this line, if the line has no mistake."""
    if program.of_model is None:
        return None
    try:
        given = from_line(program, [word for word in words if word not in ("-h", "--help")])
        if "--model" not in given:
            return None
        known = {option.name: option for option in program.rows}
        return program.of_model(Values(known, {"--dataset": ("imagenet",), **given}, Place()))
    except ConfigError:
        return None


def _help(option: Old, program: Program, model: OfModel | None) -> list[str]:
    """Lines about an option: its default, its meaning, and what it becomes."""
    default = (model.defaults if model else {}).get(option.name, option.default)
    shown = f" (default {default})" if default is not None else ""
    text = f"{becomes_text(option)}: {option.effect}"
    meaning = _meaning(option, program)
    return [
        "  " + ", ".join(option.names) + _value(option) + shown,
        *textwrap.wrap(
            f"{meaning} Here {text}" if meaning else text,
            110,
            initial_indent="      ",
            subsequent_indent="      ",
            break_on_hyphens=False,
        ),
    ]


_AUTOMATIC = re.compile(
    r"; auto:.*?(?=\.( |$))| None removes a stored value\."
)  # values that the originals did not have


def _meaning(option: Old, program: Program) -> str:
    """The meaning of an option: its own text, or that of the first canonical option that it sets."""
    if option.about or not option.new:
        return option.about
    commands = [COMMANDS[name] for name in (command_without_options(program), *COMMANDS) if name in COMMANDS]
    found = next((known[option.new[0]].help for known in map(options_of, commands) if option.new[0] in known), "")
    text = _AUTOMATIC.sub("", found)
    return f"Without it: {text}" if text and option.name.startswith("--no-") else text


def command_of(program: Program) -> str:
    """The canonical command of a program, or commands."""
    if isinstance(program.command, str):
        return f"`falconet {program.command}`"
    return "`falconet`"


def becomes_text(option: Old) -> str:
    """The canonical options that an option becomes, with dashes; variables have none."""
    if not option.new:
        return "no effect here"
    return ", ".join(name if name.isupper() else f"--{name}" for name in option.new)


def _value(option: Old) -> str:
    if option.kind == "flag":
        return ""
    kind = "{" + ",".join(option.choices) + "}" if option.choices else expected(option).split()[-1].upper()
    return {"one": f" {kind}", "some": f" {kind} ...", "maybe": f" [{kind}]"}[option.count]


_IPU = "accepted; there is no IPU to reserve"
_MPI = "use your own mpirun; `falconet` takes rank and size from its variables"

# Program -> option -> (what it becomes, effect), for programs without a table; poprun.py reads poprun's flags.
OUTSIDE: dict[str, dict[str, tuple[str, str]]] = {
    "launcher:poprun": {
        "--num-instances": ("poprun --num-instances", "must divide the replicas"),
        "--num-replicas": ("poprun --num-replicas", "replicas in all; takes precedence over --replicas"),
        "--ipus-per-replica": ("poprun --ipus-per-replica", "processes of one replica: the stages of its pipeline"),
        "--numa-aware": ("poprun --numa-aware", "binds each process to a NUMA node"),
        "-v / -vv": ("poprun -v", "prints the command lines"),
        "--host": ("poprun --host", "hosts, over ssh"),
        "--mpi-global-args": ("poprun --mpi-global-args", "--tag-output, -x, -H and networks; the rest is noted"),
        "--mpi-local-args": ("poprun --mpi-local-args", "the same"),
        "--only-output-from-instance": ("poprun --only-output-from-instance", "the same"),
        "--executable-cache-path": ("TRITON_CACHE_DIR", "where compiled kernels are kept, in every process"),
        "--offline-mode": ("none", "accepted; the devices of this machine are used"),
        **dict.fromkeys(
            (
                *("--vipu-server-host", "--vipu-server-timeout", "--vipu-partition", "--vipu-cluster"),
                *("--reset-partition", "--update-partition", "--num-ilds", "--remove-partition", "--vipu-server-port"),
                *("--vipu-allocation", "--sync-type"),
            ),
            ("none", _IPU),
        ),
    },
    "launcher:mpirun": dict.fromkeys(
        ("--allow-run-as-root", "--mca", "--tag-output", "-H", "-bind-to none", "-map-by slot", "-x"),
        ("mpirun", _MPI),
    ),
    "tool:gc-profile/gc-info": {
        "gc-profile -d": (
            "FALCONET_RUNS",
            "runs a program whose run folder goes there; its --gc-profile traces updates",
        ),
        "gc-info -l": ("falconet doctor", "lists what this machine has"),
    },
}


INTRODUCTION = """# From the originals to Falconet

Generated from `falconet/legacy/` by `make docs`; a test fails when it is stale. The originals' programs are in
`compat/`: run them there as before. `--show-translation` prints the equivalent `falconet` command line, with a note on
every difference, and exits.

- Defaults are those of each program: an option that a command line omits has its original's value.
- Log lines, files and folder names are those of the original ([output.md](output.md) lists them). The canonical
  command line that `--show-translation` prints does the same work, with the log lines, files and names of Falconet.
- Falconet's options go after a lone `--` and are not translated: `-- --device cpu --image-size 64`.
- Options may be shortened as long as they are unambiguous, as in the originals (`--pipeline-split`).
- Named configs are read from `configs.yml` beside the script, in the originals' format; add yours there. The
  originals' are also named configs of Falconet itself, in canonical options: [configs.md](../knowing/configs.md).
- An option of another original is refused, with its equivalent. An option that only tuned the IPU is accepted, with a
  note that it has no effect.
- If the documents and the code of an original contradict each other, the documents apply: TensorFlow's pipeline
  schedule is grouped by default, `--initial-loss-scaling` doubles towards `--loss-scaling`, `weight_avg.py` averages.

These differences do not depend on options:

- The default seed is 0; the originals drew one at random.
- For lines of the TensorFlow program, images of CIFAR are standardised one by one (`--normalization image`): on the
  host before they are shifted, as in the original; with `--eight-bit-io`, on the device, with the black border of the
  shift.
- For lines of the TensorFlow program on ImageNet, random crops are drawn as by its `sample_distorted_bounding_box`
  (`--crop-draw height --crop-area 0.05`) and overlap annotated objects if there are boxes
  (`--use-bbox-info-if-there`). For lines of the PyTorch program with `--use-bbox-info`, a tenth of the crop must be
  in a box (`--object-overlap crop`), as documented; its code found no box.
- Initial weights are drawn as in each original: `--weight-init`, `--zero-init` (docs/knowing/numerics.md). There are
  three exceptions: convolutions that `--efficientnet-group-dim` changes are drawn like all others; a fourth channel of
  zeros in images does not count as an input; and batch norm's running variance starts at 1 for lines of the
  PopART program, not at 0: training does not use it, and a validation before the statistics have settled would divide
  by almost zero.
- For lines of the TensorFlow program, strided convolutions and pools pad like TensorFlow's SAME (`--padding
  same`), as in its SDK 2.1; in SDK 2.0 the strided convolutions of ResNets were padded equally on both sides.
- For lines of the TensorFlow program, photos are resized without antialiasing (`--no-antialias`), from the same
  neighbouring pixels, and rounded to levels of 0 to 255. A crop, mirrored or not, is the same up to that rounding; JPEG
  decoders differ by single levels, and the original's fast decoder for training is not imitated. The centre crop for
  validation is torchvision's, which may be one pixel further down or right.
- Crops are not aligned to the blocks of a JPEG file; the PyTorch program's fused decoder rounded them down to blocks.
- The PopART program added a zero channel to every image, which changes no number (`--input-image-padding` does it).
- The PopART program validated CIFAR with random shifts and mirrored images; here validation uses the images
  unchanged.
- Fine-tuning after `--half-res-training` takes its learning rate to 0 over its own epochs; in the PyTorch program the
  cosine had the length of the main training, so that the rate hardly changed.
- SqueezeNet is torchvision's, whose convolutions have biases. The TensorFlow program's had none, padded the first
  convolution (which makes its output 55 instead of 54 pixels wide) and started with smaller weights in the last one
  (docs/maintaining/log.md). For CIFAR the TensorFlow program's had 20 or 200 outputs, only half of them classes.
- Proxy norm divides by its deviation at once; the TensorFlow program did so after squeeze and excitation, and left it
  out before the classifier, whose weights make up for it.
- `upload_run.py` counts steps in updates and logs every row of training.csv; the original's steps were epochs, of
  which it kept those with a validation. The epoch is one of the logged values.
- `--generated-data` of the TensorFlow program validates as many images as its dataset has, 50,000 or 10,000; with
  `--iterations` alone, a tenth of the images that are trained on.
- `restore.py` with a checkpoint that is not the newest of its run continues in a new run folder.
- Batch norm's running statistics move with every micro-batch, as in the PyTorch and PopART programs; for lines of the
  TensorFlow program once per update, by the mean over its micro-batches (`--batchnorm-per-update`), as in the
  original.
- The learning rate changes with each update. The TensorFlow program set it once for all updates of a host call.
- The TensorFlow program wrote ckpt-0 again, with other weights, whenever it was restored; here it is written once,
  before the first update. Averages made by training exclude it; `weight_avg.py` and `validation.py` include it.
- `train.py --restore-path RUN` of the TensorFlow program continues training, as it did, even where its README prints
  the line under the heading of a validation; `validation.py --restore-path RUN` (`falconet validate
  RUN --checkpoint all`) validates the checkpoints.
- One process, the first, validates checkpoints, even where `poprun` starts `validation.py` in several; every image
  counts exactly once.
- Two lines of the README contain mistakes: `poprun ... --ipus-per-replica` without a value means 4, the stages of the
  model in question, and `poprun ... python3 --config NAME`, without a script, runs the `train.py` of the current
  folder. Both are noted. Python itself, without poprun, refuses the second.
"""


def page() -> str:
    """The whole migration page."""
    lines = [line for program in PROGRAMS.values() for line in _program(program)]
    return "\n".join([INTRODUCTION, *lines, *_outside()])


def _outside() -> Iterator[str]:
    for program, options in OUTSIDE.items():
        yield f"## {program.replace(':', ': ')}"
        yield ""
        yield "| old | new | effect |"
        yield "|---|---|---|"
        for option, (new, effect) in options.items():
            yield f"| `{option}` | {new if new == 'none' else f'`{new}`'} | {effect} |"
        yield ""


def _program(program: Program) -> Iterator[str]:
    yield f"## {program.name.replace(':', ': ')}"
    yield ""
    command = f"`falconet {program.command}`" if isinstance(program.command, str) else program.about
    yield f"{program.about[0].upper()}{program.about[1:]}." + (
        "" if command == program.about else f" Becomes {command}."
    )
    yield ""
    yield "| old | new | effect |"
    yield "|---|---|---|"
    for option in program.rows:
        names = ", ".join(f"`{name}`" for name in option.names)
        new = f"`{becomes_text(option)}`" if option.new else "none"
        yield f"| {names} | {new} | {option.effect} |".replace("<", "&lt;")
    yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
