"""The TensorFlow program's options of what is saved, filtered and skipped."""

import pytest

import translations
from falconet.config.commands import RestoreOptions
from falconet.config.load import parse
from falconet.config.settings import Setting
from falconet.errors import ConfigError
from falconet.legacy.translate import translate
from translations import lacking

IMAGENET = "--dataset imagenet --data-dir d"


def settings(line):
    return translations.settings("tf1:train.py", line)


KEEPING = [  # the original's rule: at the offset, then at every interval from there
    (IMAGENET, {"initial-checkpoint": ""}),
    (f"{IMAGENET} --epochs-per-ckpt 4", {"checkpoint-save-freq": "4", "initial-checkpoint": ""}),
    (f"{IMAGENET} --epochs-per-ckpt 4 --ckpt-epochs-offset 1", {"checkpoint-first-epoch": "1"}),
    (f"{IMAGENET} --ckpt-epochs-offset 30", {"checkpoint-first-epoch": "30"}),
    (f"{IMAGENET} --no-logs", {"temporary": ""}),
    (f"{IMAGENET} --no-logs --logs-path x --name-suffix y", {"temporary": ""}),
    ("--dataset ImageNet --data-dir d", {"data": "imagenet", "model": "resnet18"}),
    ("--dataset CiFar-100 --data-dir d", {"data": "cifar100"}),
    ("--dataset IMAGENET --data-dir d --model ResNeXt --model-size 50", {"model": "resnext50"}),
    ("--dataset Cifar-10 --data-dir d --model EfficientNet --model-size cifar", {"model": "efficientnet-cifar"}),
]


def test_kept_checkpoints_and_spellings_are_translated():
    assert lacking(KEEPING, settings) == []


def test_without_checkpoints_the_initial_weights_are_not_saved():
    assert {"initial-checkpoint", "checkpoint-first-epoch"}.isdisjoint(
        settings(f"{IMAGENET} --ckpts-per-epoch 0 --ckpt-epochs-offset 3")
    )


def test_a_run_without_logs_names_no_folder():
    assert "run-dir" not in settings(f"{IMAGENET} --no-logs --logs-path x")


def test_an_unknown_dataset_is_refused_in_lower_case():
    with pytest.raises(
        ConfigError, match="--dataset: got 'imagenett', expected imagenet or cifar-10 or cifar-100; did"
    ):
        settings("--dataset ImageNett --data-dir d")


BETAS = ".*bn1/bias .*bn2/bias .*bn3/bias .*downsample/1/bias"
FILTERED = [
    (f"{IMAGENET} --model-size 50 --variable-filter fc1", {"trainable": "fc", "frozen-batchnorm": "batch"}),
    (f"{IMAGENET} --model-size 50 --batch-norm --variable-filter beta fc1", {"trainable": f"{BETAS} fc"}),
    (f"{IMAGENET} --model-size 50 --variable-filter b4 fc1", {"trainable": "layer4 fc"}),
    (f"{IMAGENET} --variable-filter all/", {"trainable": None, "frozen-batchnorm": None}),  # every variable
    ("--dataset cifar-10 --data-dir d --variable-filter b3/0", {"trainable": "layer3/0"}),
]
LARS = f"{IMAGENET} --model-size 50 --optimiser LARS --abs-learning-rate 10"
SKIPPED = [
    (LARS, {"lars-skip": None, "weight-decay-exclude": None, "weight-decay": "0.0001"}),  # vectors are our default
    (f"{LARS} --lars-skip-list beta gamma bias", {"lars-skip": None, "weight-decay-exclude": None}),
    (f"{LARS} --lars-skip-list bias", {"lars-skip": "fc/bias"}),
    (f"{LARS} --lars-skip-list fc1 b1/0", {"lars-skip": "layer1/0 fc"}),
    (f"{LARS} --lars-skip-list nobody", {"lars-skip": None, "weight-decay-exclude": "nothing"}),
    (f"{LARS} --lars-skip-list fc1 b1 --variable-filter fc1", {"lars-skip": "fc", "trainable": "fc"}),
    (f"{IMAGENET} --lars-skip-list bias", {"lars-skip": None, "weight-decay-exclude": "norms"}),  # not with SGD
]


def test_parts_of_names_become_patterns():
    assert lacking([*FILTERED, *SKIPPED], settings) == []


def test_an_unknown_filter_is_refused_and_an_unknown_skip_is_noted():
    with pytest.raises(ConfigError, match="--variable-filter: 'fc2' is in no variable's name; did you mean 'fc1'"):
        settings(f"{IMAGENET} --model-size 50 --variable-filter b4 fc2")
    notes = translate("tf1:train.py", f"{LARS} --lars-skip-list batch_normm bias".split()).notes
    assert any(note.startswith("--lars-skip-list: 'batch_normm' is in no variable's name") for note in notes)


VALIDATED = [
    ("tf1:train.py", "--data-dir d", {"micro-batch-size": "4", "validation-batch-size": "16"}),
    ("tf1:validation.py", "--data-dir d --restore-path r", {"validation-batch-size": "16"}),
    ("tf1:validation.py", "--synthetic-data", {"micro-batch-size": "16"}),  # measures predictions
]


@pytest.mark.parametrize(("program", "line", "sizes"), VALIDATED)
def test_validation_has_a_separate_batch_size(program, line, sizes):
    translation = translate(program, f"--dataset imagenet {line} --valid-batch-size 16".split())
    found = {setting.option: setting.values[0] for setting in translation.settings if "batch-size" in setting.option}
    assert found == sizes


@pytest.mark.parametrize(("program", "split"), [("tf1:train.py", None), ("tf1:validation.py", "validation")])
def test_a_dataset_benchmark_measures_the_input_alone(program, split):
    translation = translate(program, ["--dataset", "imagenet", "--data-dir", "d", "--dataset-benchmark"])
    found = {setting.option: setting.values for setting in translation.settings}
    assert translation.command == "data bench"
    assert found["passes"] == ("1",)
    assert found.get("split", (None,))[0] == split


@pytest.mark.parametrize("line", ["", "--pipeline --pipeline-splits b1/0/relu --enable-recomputation"])
def test_one_shard_undoes_the_pipeline_of_a_restored_run(line):
    """As in the README, which trains on four and continues on one; it overrides the stages of a config."""
    translation = translate("tf1:train.py", f"--dataset imagenet --restore-path r --shards 1 {line}".split())
    assert ["--pipeline-splits"] in [setting.argv() for setting in translation.settings]
    loaded = parse(RestoreOptions, [Setting("pipeline-splits", ("layer3",), "checkpoint"), *translation.settings])
    assert loaded.options.parallel.pipeline_splits == ()
    kept = translate("tf1:train.py", ["--dataset", "imagenet", "--restore-path", "r"])
    assert "pipeline-splits" not in {setting.option for setting in kept.settings}
