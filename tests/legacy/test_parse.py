"""An old line is split as the originals' argparse would, and a mistake is answered in one line."""

from falconet.legacy.translate import PROGRAMS, TRAINERS, from_line, from_mapping
from translations import refusal, unlike, wrong

PYTORCH, TENSORFLOW, POPART = TRAINERS


def parsed(line, program=TENSORFLOW):
    return from_line(program, line.split(), others=[each for each in TRAINERS if each is not program])


SPELLINGS = {
    "--epochs 5": {"--epochs": ("5",)},
    "--epochs=5": {"--epochs": ("5",)},
    "--epoch 5": {"--epochs": ("5",)},
    "--pipeline-split a b": {"--pipeline-splits": ("a", "b")},
    "--enable-recompute": {"--enable-recomputation": ()},
    "--xla-recompute": {"--enable-recomputation": ()},
    "--eight-bit": {"--eight-bit-io": ()},
    "--base-learning-rate -11": {"--base-learning-rate": ("-11",)},
    "--base-learning-rate-exponent=-9.5": {"--base-learning-rate": ("-9.5",)},
    "--gc-profile": {"--gc-profile": ("IPU_PROFILE",)},
    "--gc-profile TILE_PROFILE": {"--gc-profile": ("TILE_PROFILE",)},
    "--batch-size 2 --batch-size 4": {"--batch-size": ("4",)},
}


def test_a_line_is_read_as_argparse_read_it():
    assert wrong(SPELLINGS.items(), parsed) == []


MISTAKES = [
    (PYTORCH, "--optimiser momentum", "--optimiser is the TensorFlow program's; here it is --optimizer"),
    (
        PYTORCH,
        "--gradient-accumulation-count 8",
        "--gradient-accumulation-count is the TensorFlow program's; here it is --gradient-accumulation",
    ),
    (PYTORCH, "--model-size 50", "--model-size is the TensorFlow program's; here it is --model"),
    (PYTORCH, "--base-learning-rate -6", "--base-learning-rate is the TensorFlow program's; here it is --lr"),
    (PYTORCH, "--shards 4", "--shards is the TensorFlow program's; here it is --pipeline-splits"),
    (PYTORCH, "--replication-factor 2", "--replication-factor is the PopART program's; here it is --replicas"),
    (
        PYTORCH,
        "--scheduling-algorithm x",
        "--scheduling-algorithm is the TensorFlow program's; train.py has no such option",
    ),
    (TENSORFLOW, "--lr 0.1", "--lr: could be --lr-decay-rate or --lr-drops or --lr-schedule"),
    (
        TENSORFLOW,
        "--imagenet-data-path x",
        "--imagenet-data-path is the PyTorch program's; here it is --dataset or --data-dir",
    ),
    (TENSORFLOW, "--enable-stochastic-rounding", "--enable-stochastic-rounding is the PyTorch program's; here it is"),
    (TENSORFLOW, "--size 50", "--size is the PopART program's; here it is --model or --model-size"),
    (POPART, "--micro-batch-size 4", "--micro-batch-size is the PyTorch program's; here it is --batch-size"),
    (TENSORFLOW, "--optimizr momentum", "unknown option --optimizr; did you mean '--optimiser'?"),
    (TENSORFLOW, "--epochs five", "--epochs: got 'five', expected a number"),
    (TENSORFLOW, "--batch-size 2.5", "--batch-size: got '2.5', expected a whole number"),
    (TENSORFLOW, "--batch-size", "--batch-size: needs a value, a whole number"),
    (TENSORFLOW, "--batch-size 2 4", "--batch-size: takes one value, got '2 4'"),
    (TENSORFLOW, "--pipeline=yes", "--pipeline: is a switch and takes no value, got 'yes'"),
    (TENSORFLOW, "--optimiser Momentum", "--optimiser: got 'Momentum', expected SGD or RMSprop"),
    (TENSORFLOW, "train --pipeline", "got 'train', expected an option, such as --restore-path"),
    (TENSORFLOW, "--pipeline yes", "--pipeline: is a switch and takes no value, got 'yes'"),
    (TENSORFLOW, "--lo x", "--lo: could be --log-all-instances or"),
]


def test_a_mistake_is_answered_in_one_line():
    cases = [((line, program), message) for program, line, message in MISTAKES]
    assert unlike(cases, lambda case: refusal(lambda: parsed(*case))) == []


def test_a_yaml_entry_has_the_same_options_as_the_line():
    entry = {"batch_size": "4", "pipeline_splits": ["a", "b"], "BN_decay": "0.9", "pipeline": "true", "rts": "false"}
    found = from_mapping(TENSORFLOW, {**entry, "validation": "false", "ckpts-per-epoch": "2"}, source="config c")
    assert found == {
        "--batch-size": ("4",),
        "--pipeline-splits": ("a", "b"),
        "--BN-decay": ("0.9",),
        "--pipeline": (),
        "--no-validation": (),
        "--ckpts-per-epoch": ("2",),
    }


YAML_MISTAKES = {
    "config c: unknown option gradient-accumulation; did you mean": {"gradient_accumulation": "64"},
    "config c: unknown option micro-batch-sise": {"micro_batch_sise": "4"},
    "config c: pipeline: got 'maybe', expected true or false": {"pipeline": "maybe"},
    "config c: epochs: got 'x', expected a number": {"epochs": "x"},
}


def test_a_mistake_in_a_yaml_entry_names_the_entry():
    cases = [(entry, message) for message, entry in YAML_MISTAKES.items()]
    assert unlike(cases, lambda entry: refusal(lambda: from_mapping(TENSORFLOW, entry, source="config c"))) == []


def test_the_names_of_a_program_do_not_clash_with_its_prefixes():
    """An exact name counts more than those it begins: --pipeline, --pipeline-splits."""
    for program in PROGRAMS.values():
        for option in program.options:
            values = () if option.kind == "flag" or option.count == "maybe" else (option.choices or ("1",))[:1]
            assert option.name in from_line(program, [option.name, *values])
