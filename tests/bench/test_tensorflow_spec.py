"""Our spec of the TensorFlow program's benchmark page against what its dialect makes of the page's own lines."""

import shlex
from pathlib import Path

import pytest
import yaml

from falconet.bench import spec
from falconet.config.commands import InferOptions, TrainOptions
from falconet.config.fields import options_of, value_of
from falconet.config.load import parse
from falconet.config.settings import from_line
from falconet.legacy.poprun import read_poprun
from falconet.legacy.table import Place
from falconet.legacy.translate import translate

COMMANDS = (Path(__file__).parents[1] / "data/seed_commands.txt").read_text().splitlines()
ENTRIES = yaml.safe_load(spec.find_spec("tensorflow").read_text())
LINES = {  # benchmark -> its line of the originals' pages
    "resnet50_train_real_pod4": 51,
    "resnet50_train_real_pod16": 52,
    "resnext101_train_real_pod4": 53,
    "resnext101_train_real_pod16": 54,
    "efficientnet_b4_train_real_pod4": 55,
    "efficientnet_b4_train_real_pod16": 56,
    "efficientnet_b4_g16_train_real_pod4": 55,
    "efficientnet_b4_g16_train_real_pod16": 56,
    "resnet50_infer_synth_pod1": 57,
    "resnext101_infer_synth_pod1": 58,
    "efficientnet_b0_infer_synth_pod1": 59,
    "resnet50_infer_gen_pod4": 60,
    "resnext101_infer_gen_pod4": 61,
    "efficientnet_b0_infer_gen_pod4": 62,
}
OF_THE_PAGE = {"--group-dim=16": "--group-dim=1", "--expand-ratio=4": "--expand-ratio=6"}  # where its lines say 16
OURS = {
    "logs-per-epoch",  # the runner reads metrics.jsonl, with more points than theirs
    *("checkpoint-save-freq", "checkpoints-kept", "initial-checkpoint"),  # speed is measured
    "dataloader-workers",  # by the machine
    *("iterations", "repeat", "seconds"),  # 200 batches, once, instead of ten passes over 50,000 images
}
WITHOUT_EFFECT = {"batchnorm-momentum"}  # on predictions
AUTOMATIC = {"replicas": 1}  # what auto comes to in one process


def by_dialect(name):
    words, replicas = shlex.split(COMMANDS[LINES[name] - 1].replace("$DATASETS_DIR", "d")), None
    if words[0] == "poprun":
        asked = read_poprun(words[1:])
        words, replicas = list(asked.program), asked.replicas
    if "efficientnet_b4_train" in name:
        words = [OF_THE_PAGE.get(word, word) for word in words]
    return translate(f"tf1:{words[1]}", words[2:], place=Place(replicas=replicas))


@pytest.mark.parametrize("name", LINES)
def test_a_benchmark_does_what_the_original_line_does(name):
    translation = by_dialect(name)
    kind = TrainOptions if translation.command == "train" else InferOptions
    expected = parse(kind, translation.settings).options
    batch = str(expected.data.micro_batch_size)
    words = shlex.split(ENTRIES[f"tensorflow_{name}"]["cmd"].replace("$DATASETS_DIR", "d"))
    assert words[1 : 1 + len(translation.command.split())] == translation.command.split()
    own = [word.replace("{batchsize}", batch) for word in words[1 + len(translation.command.split()) :]]
    found = parse(kind, from_line(own, options_of(kind))).options
    left_out = OURS if kind is TrainOptions else OURS | WITHOUT_EFFECT
    for option in options_of(kind).values():
        if option.name in left_out:
            continue
        theirs = value_of(expected, option)
        theirs = AUTOMATIC.get(option.name, theirs) if theirs == "auto" else theirs
        if option.name == "data-dir":
            assert str(theirs).rstrip("/") == str(value_of(found, option))
        else:
            assert value_of(found, option) == theirs, option.name


def test_every_benchmark_is_compared():
    benchmarks = {name.removeprefix("tensorflow_") for name in ENTRIES if not name.endswith("_options")}
    assert benchmarks == LINES.keys()


def test_norms_match_the_tensorflow_program():
    """Group norm of every G-th channel with the operation's own epsilon, 1e-3 in EfficientNets: inventory 2.2."""
    for name, entry in ENTRIES.items():
        grouped = "resnext101_train" in name or "efficientnet_b4" in name
        if "cmd" in entry:
            assert ("--norm-grouping strided" in entry["cmd"]) is grouped, name
            eps = "1.53e-05" if "resnext101_train" in name else "1e-3" if "efficientnet" in name else None
            assert eps is None or f"--norm-eps {eps}" in entry["cmd"], name
