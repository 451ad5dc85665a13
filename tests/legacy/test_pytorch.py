"""What single options of the PyTorch program become: edge values, and options that depend on each other."""

import pytest

from falconet.config import rules
from falconet.config.commands import TrainOptions
from falconet.config.load import parse
from falconet.errors import ConfigError
from falconet.legacy import pytorch_training
from falconet.legacy.table import Place
from falconet.legacy.translate import translate
from falconet.report.profile import trace
from translations import refused, wrong

TRAIN = "pytorch:train.py"
HOST = "pytorch:datasets/host_benchmark.py"
PHASES = "--half-res-training --fine-tune-epoch 1 --fine-tune-first-trainable-layer layer4 --weight-avg-strategy mean"


def translated(program, line, **place):
    """Canonical options as a dictionary, and the notes."""
    translation = translate(program, line.split(), place=Place(**place))
    return {setting.option: " ".join(setting.values) for setting in translation.settings}, translation.notes


REFUSED = {
    "--replicas 0": "--replicas: got '0', expected a whole number, at least 1",
    "--replicas -2": "--replicas: got '-2', expected a whole number, at least 1",
    "--device-iterations 0": "--device-iterations: got '0', expected a whole number, at least 1",
    "--plan": "unknown option --plan; Falconet's option goes after a lone --: -- --plan",
}


def test_a_mistake_names_the_option_that_was_typed():
    assert wrong(REFUSED.items(), lambda line: refused(TRAIN, f"--data generated {line}")) == []


def test_an_option_of_the_same_originals_trainer_is_named_so():
    with pytest.raises(ConfigError, match=r"^--epoch is train.py's; restore.py has no such option; .*: -- --epoch$"):
        translated("pytorch:restore.py", "--checkpoint-input-path run --epoch 3")


@pytest.mark.parametrize(
    ("typed", "option", "value"),
    [("--fine-tune-lr 0", "fine-tune-lr", "0"), ("--fine-tune-lr 0.5", "fine-tune-lr", "0.5")],
)
def test_a_fine_tuning_rate_of_zero_is_kept(typed, option, value):
    assert translated(TRAIN, f"--data generated {PHASES} {typed}")[0][option] == value


def test_a_fine_tuning_batch_of_zero_is_refused():
    with pytest.raises(ConfigError, match="--fine-tune-micro-batch-size: got '0'"):
        translated(TRAIN, f"--data generated {PHASES} --fine-tune-micro-batch-size 0")


def test_compiling_alone_needs_no_images():
    settings, notes = translated(TRAIN, "--data imagenet --use-bbox-info --compile-only")
    assert settings["data"] == "generated"
    assert not {"data-dir", "use-bbox-info"} & settings.keys()
    assert "--compile-only: --data generated instead of imagenet, as in the original" in notes


PLACES = {
    "given": ("--imagenet-data-path here", {"DATA_DIR": "there"}, "here"),
    "variable": ("", {"DATA_DIR": "there"}, None),  # read by `falconet` itself
    "empty": ("", {"DATA_DIR": ""}, "/localdata/datasets/imagenet-raw-data"),
    "neither": ("", {}, "/localdata/datasets/imagenet-raw-data"),
}


@pytest.mark.parametrize("program", [TRAIN, HOST])
def test_imagenet_is_where_the_line_the_variable_or_the_original_says(program):
    def place(typed, environment):
        return translated(program, f"--data imagenet {typed}", environment=environment)[0].get("data-dir")

    assert {name: place(typed, variables) for name, (typed, variables, _) in PLACES.items()} == {
        name: found for name, (*_, found) in PLACES.items()
    }


OF_OTHER_RELEASES = {
    "--model resnext101": ("model", "resnext101"),
    "--model efficientnet-b2": ("model", "efficientnet-b2"),
    "--model resnet50 --normlayer group --groupnorm-group-num 16": ("norm-num-groups", "16"),
    "--half-res-training --fine-tune-epoch 1 --fine-tune-batch-size 6": ("fine-tune-micro-batch-size", "6"),
}


def test_models_and_names_of_other_releases_are_accepted():
    for typed, (option, value) in OF_OTHER_RELEASES.items():
        settings, _ = translated(TRAIN, f"--data generated --weight-avg-strategy mean {typed}")
        assert settings[option] == value


def test_other_models_ignore_the_shape_of_an_efficientnet():
    settings, notes = translated(TRAIN, "--data generated --model resnet50 --efficientnet-group-dim 16")
    assert "efficientnet-group-dim" not in settings
    assert "--efficientnet-group-dim: has no effect on --model resnet50" in notes
    settings, _ = translated(TRAIN, "--data generated --model efficientnet-b0 --efficientnet-group-dim 16")
    assert settings["efficientnet-group-dim"] == "16"


def test_an_empty_checkpoint_folder_is_ignored():
    translation = translate(TRAIN, ["--data", "generated", "--checkpoint-output-path", ""])
    assert "checkpoint-output-path" not in {setting.option for setting in translation.settings}


WORKERS = {"": "32", "--dataloader-worker 4": "4", "--disable-async-loading": "0"}


@pytest.mark.parametrize(("typed", "workers"), WORKERS.items())
def test_the_host_benchmark_may_read_in_the_loop_itself(typed, workers):
    assert translated(HOST, f"--data cifar10 {typed}")[0]["dataloader-workers"] == workers


def test_the_host_benchmark_uses_boxes_if_there_is_a_file_of_them(tmp_path):
    line = f"--imagenet-data-path {tmp_path}"
    assert "use-bbox-info" not in translated(HOST, line)[0]
    (tmp_path / "imagenet_2012_bounding_boxes.csv").touch()
    assert "use-bbox-info" in translated(HOST, line)[0]


INFER = "pytorch:inference/run_benchmark.py"


@pytest.mark.parametrize(
    ("typed", "option"),
    [("--half-partial", "half-partial"), ("--profile", "profile"), ("--compile-only", "plan")],
)
def test_options_that_the_inference_benchmark_shares_with_training_have_an_effect(typed, option):
    settings, notes = translated(INFER, f"--data generated {typed}")
    assert option in settings
    assert not any("no effect" in note for note in notes)


SHARES = {
    "--available-memory-proportion 0.16": "0.16",
    "--pipeline-splits layer3/0 --available-memory-proportion 0.1 0.2": "0.1 0.2",
}


@pytest.mark.parametrize(("typed", "shares"), SHARES.items())
def test_a_share_of_memory_is_kept(typed, shares):
    assert translated(TRAIN, f"--data generated {typed}")[0]["available-memory-proportion"] == shares


def test_shares_of_memory_are_one_or_as_many_as_the_stages():
    translation = translate(TRAIN, ["--data", "generated", "--available-memory-proportion", "0.1", "0.2"])
    with pytest.raises(
        ConfigError, match="--available-memory-proportion: got 2 values, expected one, because there is one"
    ):
        rules.check(parse(TrainOptions, translation.settings).options)


TF = "--dataset imagenet --data-dir d --model-size 50 --pipeline --shards 2 --pipeline-splits b3/0/relu"
TF_SHARES = {
    f"{TF} --available-memory-proportion 0.6 0.5 0.2 0.1": "0.6 0.2",  # convolutions and products by turns
    f"{TF} --available-memory-proportion 0.6": "0.6",
}


@pytest.mark.parametrize(("line", "shares"), TF_SHARES.items())
def test_tensorflows_memory_shares_of_convolutions_are_used(line, shares):
    assert translated("tf1:train.py", line)[0]["available-memory-proportion"] == shares


def test_rmsprop_keeps_the_programs_precision():
    translation = translate(TRAIN, ["--data", "generated", "--optimizer", "rmsprop", "--loss-scaling", "128"])
    options = parse(TrainOptions, translation.settings).options
    rules.check(options)
    assert (options.optimizer.optimizer, options.machine.precision) == ("rmsprop", "16.16")


ENDS = {
    "--checkpoint-input-path d": ({"validate-checkpoints": "d", "validation-mode": "after"}, None),
    "--checkpoint-input-dir d --validation-mode after": ({"validate-checkpoints": "d"}, None),
    "--checkpoint-output-path c --checkpoint-input-path c --weight-avg-strategy mean": (
        {"validate-checkpoints": "c", "weight-avg-strategy": "mean"},
        None,
    ),
    "--checkpoint-output-path c --checkpoint-input-path d --weight-avg-strategy mean": (
        {"validate-checkpoints": "d"},
        "this run's checkpoints are averaged; `falconet average` averages others",
    ),
    "--checkpoint-input-path d --validation-mode during": (
        {"validate-checkpoints": None},
        "--checkpoint-input-path: has no effect without --validation-mode after or a --weight-avg-strategy",
    ),
    "": ({"validate-checkpoints": None, "validation-mode": "after", "updates": None}, None),
    "--profile": (
        {"profile": "", "updates": "6", "validation-mode": "none"},
        "--profile: ends after 6 updates, the last two of them traced; nothing is validated",
    ),
    "--profile --checkpoint-input-path d": ({"validate-checkpoints": None, "updates": "6"}, "ends after 6 updates"),
    "--profile --initial-loss-scaling 2 --loss-scaling 8": (
        {"profile": "", "updates": None, "validation-mode": "after"},
        "training continues after them, because --half-res-training and --initial-loss-scaling need whole epochs",
    ),
}


def test_a_run_ends_when_the_original_did():
    for typed, (expected, noted) in ENDS.items():
        translation = translate(TRAIN, ["--data", "generated", *typed.split()])
        settings = {setting.option: " ".join(setting.values) for setting in translation.settings}
        assert {name: settings.get(name) for name in expected} == expected, typed
        notes = [note for note in translation.notes if "--checkpoint-input-path" in note or "--profile" in note]
        assert len(notes) == (1 if noted else 0), typed
        assert all(noted in note for note in notes), typed
        rules.check(parse(TrainOptions, translation.settings).options)


def test_a_profiled_training_ends_with_the_last_traced_update():
    assert pytorch_training.TRACED_UPDATES == trace.BEFORE + trace.TRACED


def test_the_inference_benchmark_uses_published_weights_if_available():
    assert translated(INFER, "--data generated")[0]["weights"] == "auto"
    settings, notes = translated(INFER, "--data generated --random-weights")
    assert settings.get("weights", "random") == "random"
    assert not notes


def test_splits_of_the_inference_benchmark_are_stages():
    settings, notes = translated(INFER, "--data generated --pipeline-splits layer2/0 layer3/0")
    assert settings["pipeline-splits"] == "layer2/0 layer3/0"
    assert not notes
