"""A program's options in words: its help, and the rows of docs/migration.md."""

import sys
import textwrap
from collections.abc import Iterator

from falconet.legacy.table import Old, Program, expected
from falconet.legacy.translate import PROGRAMS


def help_of(program: Program) -> str:
    """What `--help` prints."""
    lines = [
        f"usage: {program.script} [options] [--show-translation]",
        "",
        f"{program.about}; an original's program, run by {command_of(program)}.",
        "",
    ]
    for option in program.rows:
        lines.append("  " + ", ".join(option.names) + _value(option) + _default(option))
        lines += textwrap.wrap(
            f"{becomes_text(option)}: {option.effect}", 110, initial_indent="      ", subsequent_indent="      "
        )
    lines += ["", "  -- OPTIONS", "      options of Falconet's own, taken as they are: -- --device cpu --image-size 64"]
    lines += ["  --show-translation", "      prints the canonical command line and what is different, and exits"]
    return "\n".join(lines)


def command_of(program: Program) -> str:
    """The canonical command, or commands."""
    if isinstance(program.command, str):
        return f"`falconet {program.command}`"
    return "`falconet`"


def becomes_text(option: Old) -> str:
    """The canonical options, spelled; variables have no dashes."""
    if not option.new:
        return "no effect here"
    return ", ".join(name if name.isupper() else f"--{name}" for name in option.new)


def _value(option: Old) -> str:
    if option.kind == "flag":
        return ""
    kind = "{" + ",".join(option.choices) + "}" if option.choices else expected(option).split()[-1].upper()
    return {"one": f" {kind}", "some": f" {kind} ...", "maybe": f" [{kind}]"}[option.count]


def _default(option: Old) -> str:
    return f" (default {option.default})" if option.default is not None else ""


_IPU = "accepted; there is no IPU to reserve"
_MPI = "mpirun is your own; `falconet` takes rank and size from its variables"

# Program -> option -> (what it becomes, effect). `poprun` itself is read by launchers.py.
OUTSIDE: dict[str, dict[str, tuple[str, str]]] = {
    "launcher:poprun": {
        "--num-instances": ("poprun --num-instances", "must divide the replicas"),
        "--num-replicas": ("poprun --num-replicas", "copies of the model in all; counts more than --replicas"),
        "--ipus-per-replica": ("poprun --ipus-per-replica", "processes of one replica: the stages of its pipeline"),
        "--numa-aware": ("poprun --numa-aware", "binds each process to a NUMA node"),
        "-v / -vv": ("poprun -v", "prints the command lines"),
        "--host": ("poprun --host", "hosts, over ssh"),
        "--mpi-global-args": ("poprun --mpi-global-args", "--tag-output, -x, -H and networks; the rest is named"),
        "--mpi-local-args": ("poprun --mpi-local-args", "the same"),
        "--only-output-from-instance": ("poprun --only-output-from-instance", "the same"),
        "--executable-cache-path": ("TRITON_CACHE_DIR", "where compiled kernels are kept, in every process"),
        "--offline-mode": ("none", "accepted; what is here is used"),
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

Generated from `falconet/dialects/` by `make docs`; a test fails when it is stale. The programs themselves are in
`compat/`: type what you know there, and it runs. `--show-translation` prints the canonical command line with a note for
whatever is different, and exits.

- Defaults are each program's own: what a line leaves out is set as its original did.
- Behind a lone `--` stand options of Falconet's own, which are not translated: `-- --device cpu --image-size 64`.
- Options may be shortened as long as it stays clear which is meant, as the originals allowed (`--pipeline-split`).
- Named configs are read from `configs.yml` beside the script, in the originals' format; yours may stand there too.
  The originals' are also named configs of Falconet itself, in canonical options: docs/configs.md.
- An option of another original is refused with its name here. What only tuned the IPU is accepted, and said to have no
  effect.
- Where documents and code of an original contradict each other, the documents hold: TensorFlow's pipeline schedule is
  grouped if not given, `--initial-loss-scaling` doubles towards `--loss-scaling`, `weight_avg.py` averages.

What is not the same, whatever the options:

- A seed that is not given is 0; the originals drew one.
- Images of CIFAR are standardised one by one for lines of the TensorFlow program (`--normalization image`): on the host
  before they are shifted, as there; with `--eight-bit-io`, on the device, with the black border that the shift leaves.
- For lines of the TensorFlow program on ImageNet, random crops are drawn as its `sample_distorted_bounding_box` drew
  them (`--crop-draw height --crop-area 0.05`) and overlap annotated objects wherever there are boxes
  (`--use-bbox-info-if-there`), as there; for lines of the PyTorch program with `--use-bbox-info` a tenth of the crop is
  to lie in a box (`--object-overlap crop`), as its documents have it; its code found no box.
- New weights are drawn as each original's were, whatever is typed: `--weight-init`, `--zero-init` (docs/numerics.md).
  Unlike there, the convolutions that `--efficientnet-group-dim` changes are drawn as all others are; a fourth channel
  of the images, which is zero, does not count as an input; and batch norm's running variance begins at 1 for lines of
  the PopART program, not at 0: no training sees it, and a validation before the statistics have settled would divide by
  next to nothing.
- Convolutions and poolings that stride pad as TensorFlow's SAME does for lines of its program (`--padding same`), as in
  its SDK 2.1; in SDK 2.0 the strided convolutions of ResNets were padded alike on both sides.
- Photos are resized without antialiasing for lines of the TensorFlow program (`--no-antialias`), between the same
  neighbours as there, and rounded to levels of 0 to 255. A crop of it, mirrored or not, is the same to that rounding;
  JPEG decoders differ by single levels, and its fast one for training is not imitated. The centre that is validated is
  torchvision's, which may lie one pixel further down or right than there.
- Crops are not aligned to the blocks of a JPEG file, to which the PyTorch program's fused decoder rounded them down.
- The PopART program added a zero channel to every image, which changes no number (`--input-image-padding` does it).
- The PopART program validated CIFAR with random shifts and mirrored images; here validation has images as they are.
- Fine-tuning after `--half-res-training` takes its learning rate to 0 over its own epochs; in the PyTorch program the
  cosine had the length of the main training, so that the rate hardly moved.
- SqueezeNet is torchvision's, whose convolutions have biases; the TensorFlow program's had none, padded the first one
  (which makes a map of 55 instead of 54 pixels behind it) and began with smaller weights in the last one (docs/log.md).
  For CIFAR that one had 20 or 200 outputs, of which only the first half were classes.
- Proxy norm divides by its deviation at once; the TensorFlow program did so behind squeeze and excitation, and left it
  out before the classifier, where the weights that follow take its place.
- `upload_run.py` counts steps in updates and logs every row of training.csv; the original's steps were epochs, of which
  it kept those with a validation. The epoch is among the values.
- Batch norm's running statistics move with every micro-batch, as in the PyTorch and the PopART program; for lines of
  the TensorFlow program once an update, by the mean over its micro-batches (`--batchnorm-per-update`), as there.
- The learning rate is that of each update. The TensorFlow program set it once for all updates of a host call.
- The TensorFlow program wrote ckpt-0 again, with other weights, whenever it was restored; here it is written once,
  before the first update. No average that training makes has it, `weight_avg.py` and `validation.py` take it with the
  others.
- `train.py --restore-path RUN` of the TensorFlow program goes on training, as it did, also where its README prints the
  line under the heading of a validation; `validation.py --restore-path RUN` (`falconet validate
  --checkpoint-input-path RUN`) measures the checkpoints.
- Checkpoints are measured by one process, the first, also where `poprun` starts `validation.py` in several; the
  accuracy is that of every image once.
- Of the lines that its README prints with a mistake, `poprun ... --ipus-per-replica` without a value means 4, the
  stages of the model in question, and `poprun ... python3 --config NAME`, without a script, runs the `train.py` of the
  folder it is typed in. Both are said in one line. Python itself, without poprun, refuses the second.
"""


def page() -> str:
    """The whole page."""
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
