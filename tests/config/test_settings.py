"""Settings from every source: precedence, spelling, and one-line answers to typos and wrong values."""

import subprocess
import sys

import pytest

from falconet.config.commands import PackOptions, TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import load, load_options, read_line
from falconet.config.recipes import from_config
from falconet.config.settings import from_checkpoint, from_environment, from_line, from_mapping
from falconet.errors import ConfigError

OPTIONS = options_of(TrainOptions)


def loaded(line):
    return load(TrainOptions, from_line(line.split(), OPTIONS))


MISTAKES = {
    "--updates 2.5": "--updates: got '2.5', expected a whole number, at least 1",
    "--updates=0": "--updates: got '0', expected a whole number, at least 1",
    "--updates": "--updates: got no value, expected a whole number, at least 1",
    "--epoch 0": "--epoch: got '0', expected a number, more than 0, or auto",
    "--epoch nan": "--epoch: got 'nan', expected a number, more than 0, or auto",
    "--epoch 2.5 --half-res-training": "--epoch 2.5: does not work with --half-res-training, whose phases are whole",
    "--epoch 2.5 --initial-loss-scaling 2 --precision 16.16": "--epoch 2.5: does not work with --initial-loss-scaling",
    "--epochs 3": "unknown option --epochs; did you mean '--epoch'?",
    "--lr-end-rate 3": "unknown option --lr-end-rate; did you mean '--lr-end-ratio'?",
    "--zebras 4": "unknown option --zebras",
    "--lr nan": "--lr: got 'nan', expected a number, at least 0",
    "--lr inf": "--lr: got 'inf', expected a number, at least 0",
    "--lr 0.1 0.2": "--lr: got '0.1 0.2', expected one value",
    "--momentum 1.5": "--momentum: got '1.5', expected a number, from 0 to 1",
    "--norm-type batc": "--norm-type: got 'batc', expected batch, group or none; did you mean 'batch'?",
    "--norm-eps small": "--norm-eps: got 'small', expected a number, more than 0, or auto",
    "--model resnet5O": "--model: 'resnet5O' is not a model; did you mean 'resnet50'?",
    "--plan yes": "--plan: got 'yes', expected no value: it is a switch",
    "resnet50": "got 'resnet50', expected an option, such as --config",
    "--lr-epoch-decay 10 x": "--lr-epoch-decay: got '10 x', expected a list: a number, more than 0",
    "--weight-avg-N 0": "--weight-avg-N: got '0', expected a whole number, at least 1, or all or -1",
    "--data folder": "--data folder: needs --data-dir (or the environment variable DATA_DIR), a folder of",
    "--data folder --data-dir=": "--data-dir: got '', expected a path; '.' is this folder",
    "--run-dir=": "--run-dir: got '', expected a path or auto; '.' is this folder",
    "--micro-batch-size 1 --mixup-alpha 0.2": "--micro-batch-size: got 1, expected at least 2 for --mixup-alpha",
    "--micro-batch-size 1 --cutmix-lambda-high 0.8": (
        "--micro-batch-size: got 1, expected at least 2 for --cutmix-lambda-low and -high"
    ),
    "--micro-batch-size 1 --cutmix-lambda-high 0.8 --mixup-alpha 1": (
        "--micro-batch-size: got 1, expected at least 2 for --cutmix-lambda-low and -high"
    ),
    "--cutmix-lambda-low 0.9 --cutmix-lambda-high 0.8": (
        "--cutmix-lambda-low: got 0.9, expected at most --cutmix-lambda-high, which is 0.8"
    ),
    "--epoch 0.5": "--epoch: got 0.5, but --warmup-epoch is 1; expected --warmup-epoch 0.05 too",
    "--warmup-epoch 5 --epoch 3": "--warmup-epoch: got 5, expected at most --epoch, which is 3",
    "--efficientnet-group-dim 16": "--efficientnet-group-dim: 'resnet8-cifar' is not an EfficientNet",
    "--squeezenet-bypass": "--squeezenet-bypass: 'resnet8-cifar' is not a SqueezeNet",
    "--proxy-norm": "--proxy-norm: 'resnet8-cifar' is not an EfficientNet",
    "--model efficientnet-b0 --proxy-norm --optimizer lars": "--proxy-norm: does not work with --optimizer lars",
    "--model efficientnet-b0 --proxy-norm --norm-type none": "--proxy-norm: contradicts --norm-type none",
    "--model efficientnet-b0 --proxy-epsilon 0": "--proxy-epsilon: got '0', expected a number, more than 0",
    "--weight-avg-strategy mean --checkpoints-kept 2": (
        "--checkpoints-kept: got 2, expected all, because --weight-avg-N all averages every checkpoint"
    ),
    "--weight-avg-strategy mean --checkpoints-kept 2 --weight-avg-N 5": (
        "--weight-avg-N: got 5, expected at most --checkpoints-kept, which is 2"
    ),
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_mistake_on_the_line_is_answered_in_one_line(line, message):
    with pytest.raises(ConfigError) as mistake:
        loaded(line)
    assert str(mistake.value).startswith(message)
    assert "\n" not in str(mistake.value)


FILES = {
    "updates: 2.5": "c.yaml: updates: got '2.5', expected a whole number, at least 1",
    "epoch: 0": "c.yaml: epoch: got '0', expected a number, more than 0, or auto",
    "epochs: 3": "c.yaml: unknown option epochs; did you mean 'epoch'?",
    "- epoch": "c.yaml: got a list, expected options, such as `epoch: 10`",
    "epoch": "c.yaml: got 'epoch', expected options, such as `epoch: 10`",
    "": "c.yaml: got nothing, expected options, such as `epoch: 10`",
    "wandb: maybe": "c.yaml: wandb: got 'maybe', expected true or false",
    "lr: [0.1, 0.2]": "c.yaml: lr: got '0.1 0.2', expected one value",
    "lr: {peak: 1}": "c.yaml: lr: got a mapping, expected a number, at least 0",
    "lr: 'x": "c.yaml, line 1: is not YAML",
    "lr_epoch_decay: [[1]]": "c.yaml: lr-epoch-decay: got a nested list",
    "lr: 1\nepoch: 3\nlr: 2": "c.yaml, line 3: is not YAML: 'lr' is given twice, first in line 1",
    "{lr: 1, lr: 2}": "c.yaml, line 1: is not YAML: 'lr' is given twice, first in line 1",
    "lr-epoch-decay: 3\nlr_epoch_decay: 4": "c.yaml: 'lr_epoch_decay' is the same option as 'lr-epoch-decay'; expected",
    "wandb: true\nno-wandb: true": "c.yaml: 'no-wandb' is the same option as 'wandb'; expected one of them",
    "&a [*a, {x: 1, x: 2}]": "c.yaml, line 1: is not YAML: 'x' is given twice",
}


@pytest.mark.parametrize(("text", "message"), FILES.items())
def test_mistake_in_a_file_names_the_file(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as mistake:
        load(TrainOptions, from_config("c.yaml", OPTIONS))
    assert str(mistake.value).startswith(message)
    assert "\n" not in str(mistake.value)


def test_file_extends_a_named_config_or_another_file(tmp_path):
    (tmp_path / "team").mkdir()
    (tmp_path / "team/base.yaml").write_text(f"extends: photos\ndata-dir: {tmp_path}\nlr: 0.1\nepoch: 7\n")
    (tmp_path / "mine.yaml").write_text("about: ours\nextends: team/base.yaml\nepoch: 3\n")
    loaded = load(TrainOptions, from_config(str(tmp_path / "mine.yaml"), OPTIONS))
    assert (loaded.options.training.epoch, loaded.options.learning_rate.lr) == (3, 0.1)
    assert (loaded.options.training.pretrained, loaded.options.optimizer.optimizer) == ("auto", "adamw")
    assert loaded.sources["epoch"] == str(tmp_path / "mine.yaml")
    assert loaded.sources["lr"] == str(tmp_path / "team/base.yaml")
    assert loaded.sources["optimizer"] == "config photos"


EXTENDED = {
    "extends: photo": "c.yaml: extends: no config is named 'photo'; did you mean 'photos'?",
    "extends: [photos]": "c.yaml: extends: expected the name of one config, or one file",
    "extends:": "c.yaml: extends: expected the name of one config, or one file",
    "extends: none.yaml": "c.yaml: extends: none.yaml: no such file",
    "extends: c.yaml": "c.yaml: extends: 'c.yaml' extends this file in turn, expected a config that does not",
    "extends: ./up.yaml": "up.yaml: extends: 'c.yaml' extends this file in turn, expected a config that does not",
}


@pytest.mark.parametrize(("text", "message"), EXTENDED.items())
def test_mistake_in_what_a_file_extends_names_the_file(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    (tmp_path / "up.yaml").write_text("extends: c.yaml")
    with pytest.raises(ConfigError) as mistake:
        from_config("c.yaml", OPTIONS)
    assert str(mistake.value).startswith(message)


def test_missing_or_binary_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file"):
        from_config(str(tmp_path / "none.yaml"), OPTIONS)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"b.yaml: is not a text file"):
        from_config(str(tmp_path / "b.yaml"), OPTIONS)


def test_unknown_config_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match=r"--config: no config is named 'digit'; did you mean 'digits'\?"):
        from_config("digit", OPTIONS)


def test_command_line_overrides_checkpoint_overrides_environment(tmp_path):
    settings = [
        *from_environment({"DATA_DIR": "/data"}, OPTIONS),
        *from_checkpoint({"lr": {"value": "0.5"}, "epoch": {"value": "7"}, "gone": {"value": "1"}}, OPTIONS),
        *from_line(["--epoch", "9"], OPTIONS),
    ]
    result = load(TrainOptions, settings)
    assert (result.options.learning_rate.lr, result.options.training.epoch) == (0.5, 9)
    assert str(result.options.data.data_dir) == "/data"
    assert result.sources == {
        "data-dir": "environment variable DATA_DIR",
        "lr": "checkpoint",
        "epoch": "command line",
    }


def test_later_option_overrides_earlier_and_switches_turn_off():
    assert loaded("--epoch 3 --epoch 4").options.training.epoch == 4
    assert [repr(loaded(f"--epoch {text}").options.training.epoch) for text in ("4", "4.0", "2.5")] == ["4", "4", "2.5"]
    assert not loaded("--wandb --no-wandb").options.logging.wandb
    assert loaded("--no-wandb --wandb").options.logging.wandb


def test_underscores_equals_signs_and_negative_numbers_are_read():
    result = loaded("--micro_batch_size=3 --weight-avg-N -1").options
    assert (result.data.micro_batch_size, result.averaging.weight_avg_N) == (3, -1)


def test_recipe_overrides_the_checkpoint_and_the_line_overrides_both():
    line = read_line(TrainOptions, ["--config", "digits", "--lr", "0.7"])
    stored = {"epoch": {"value": "77"}, "lr": {"value": "0.5"}, "seed": {"value": "8"}}
    result = load_options(TrainOptions, line, stored)
    assert (result.sources["epoch"], result.sources["lr"]) == ("config digits", "command line")
    assert (result.options.learning_rate.lr, result.options.run.seed) == (0.7, 8)
    assert result.over({}).options == load_options(TrainOptions, line).options


def test_auto_is_a_choice_and_not_a_path():
    assert loaded("--run-dir auto").options.run.run_dir == "auto"


def test_none_removes_a_stored_value():
    stored = from_checkpoint({"updates": {"value": "5"}}, OPTIONS)
    assert load(TrainOptions, stored).options.training.updates == 5
    assert load(TrainOptions, [*stored, *from_line(["--updates", "None"], OPTIONS)]).options.training.updates is None


def test_a_list_option_without_values_is_empty():
    line = ["--config", "mobilenet-v3-large", "--data", "synthetic", "--pipeline-splits", "--replicas", "1"]
    assert load_options(TrainOptions, read_line(TrainOptions, line)).options.parallel.pipeline_splits == ()


def test_yaml_numbers_keep_their_spelling(tmp_path):
    (tmp_path / "c.yaml").write_text("precision: 32.32\nweight_decay: 1e-05\nlr_epoch_decay: [30, 60]\nwandb: true\n")
    result = load(TrainOptions, from_config(str(tmp_path / "c.yaml"), OPTIONS)).options
    assert result.machine.precision == "32.32"
    assert result.optimizer.weight_decay == 1e-5
    assert result.learning_rate.lr_epoch_decay == (30.0, 60.0)
    assert result.logging.wandb


def test_written_config_is_read_back_the_same(tmp_path):
    first = loaded("--lr 0.30000000000000004 --lr-epoch-decay 1 2.5 --lr-schedule step --wandb --data-dir /a:b/c#d")
    (tmp_path / "config.yaml").write_text(first.to_yaml())
    again = load(TrainOptions, from_config(str(tmp_path / "config.yaml"), OPTIONS))
    assert again.options == first.options
    stored = load(TrainOptions, from_checkpoint(first.table(), OPTIONS)).options
    assert stored.data == first.options.data
    assert stored.learning_rate == first.options.learning_rate
    assert not stored.logging.wandb, "a checkpoint starts no upload"


def test_options_without_effect_are_noted_only_when_asked_for():
    from falconet.config.effects import notes

    result = loaded("--rmsprop-decay 0.9 --lr-decay 0.1")
    assert list(notes(result.options, result.sources)) == [
        "--rmsprop-decay has no effect without --optimizer rmsprop",
        "--lr-decay has no effect without --lr-schedule step or exponential",
    ]
    restored = load(TrainOptions, from_checkpoint(result.table(), OPTIONS))
    assert list(notes(restored.options, restored.sources)) == []


def test_help_and_mistakes_never_import_torch():
    code = (
        "import sys; from falconet.cli import main; main(['train', '--help']); main(['train', '--epochs', '3']);"
        " main(['validate', '--model', 'x', '--lr', '3']); assert not {'torch', 'timm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


PLACES = {
    "--imagenet-data-path a": "a",
    "--imagenet_data_path=a": "a",
    "--data-dir a --imagenet-data-path b": "b",
    "--imagenet-data-path b --data-dir a": "a",
}


@pytest.mark.parametrize(("line", "place"), PLACES.items())
def test_last_of_two_spellings_of_the_data_folder_counts(line, place):
    settings = from_line(line.split(), OPTIONS)
    assert (settings[-1].option, settings[-1].values) == ("data-dir", (place,))


def test_config_may_use_the_alias():
    (setting,) = from_mapping({"imagenet_data_path": "x"}, OPTIONS, source="c")
    assert (setting.option, setting.values) == ("data-dir", ("x",))


def test_typo_of_an_alias_suggests_it():
    with pytest.raises(ConfigError, match="did you mean '--imagenet-data-path'"):
        from_line(["--imagenet-datapath", "x"], OPTIONS)


def test_command_without_data_has_no_alias_for_it():
    with pytest.raises(ConfigError, match="unknown option --imagenet-data-path"):
        from_line(["--imagenet-data-path", "x"], options_of(PackOptions))


def test_a_switch_may_be_turned_off_by_either_spelling(tmp_path):
    (tmp_path / "c.yaml").write_text("no-eight-bit-io: true\nno-antialias: false\ndataset_cache: true\n")
    data = load(TrainOptions, from_config(str(tmp_path / "c.yaml"), OPTIONS)).options.data
    assert (data.eight_bit_io, data.antialias, data.dataset_cache) == (False, True, True)
