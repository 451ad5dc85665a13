"""The originals' named configs equal the originals' files, option by option."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from falconet.config import effects, facts
from falconet.config.commands import InferOptions, TrainOptions
from falconet.config.docs import configs_page
from falconet.config.fields import options_of
from falconet.config.load import load, parse
from falconet.config.recipes import EXTENDS, about, all_configs, deviations, from_config, values_of
from falconet.config.settings import Setting
from falconet.config.values import rate_share
from falconet.errors import ConfigError
from falconet.legacy.table import Place
from falconet.legacy.translate import read_configs, translate, translate_mapping

ROOT = Path(__file__).parents[2]
TRAIN, INFER = options_of(TrainOptions), options_of(InferOptions)
OURS = {
    *("digits", "photos", "cifar10-speedrun", "cifar10-96"),
    *("cifar10-resnet20", "cifar10-resnet32", "cifar10-resnet56", "cifar100-resnet56"),
    *("imagenette-resnet50", "imagenette-resnet50-progressive", "imagenette-resnet50-half-resolution"),
    *("imagenette-resnet18", "imagenette-efficientnet-b0", "imagenette-mobilenet-v3-large"),
}
PYTORCH = read_configs(ROOT / "compat/pytorch/train/configs.yml")
TENSORFLOW = read_configs(ROOT / "compat/tensorflow/configs.yml")
INFERENCE = read_configs(ROOT / "compat/pytorch/inference/configs.yml")
PLACE = Setting("data-dir", ("imagenet",), "test")
NO_MODEL = {
    "efficientnet-g16-gn-pod16-base",
    "efficientnet-g16-gn",
}  # documented: the original's model had no such options
NO_SPLITS = "mk2_efficientnet_b4_16ipus_base"  # documented: stages without splits


def trained(name):
    return load(TrainOptions, [PLACE, *from_config(name, TRAIN)])


def by_dialect(program, name, configs):
    """The settings to which the original's file translates, except for documented differences."""
    entry = {**configs[name], **({"model": "efficientnet-b0"} if name in NO_MODEL else {})}
    if name == NO_SPLITS:
        entry = {key: value for key, value in entry.items() if key not in ("pipeline", "shards", "pipeline_schedule")}
    settings = translate_mapping(program, entry, source="config").settings
    # A share of the device's memory was tuned for the IPU's, and is no part of a recipe; benchmarks fetch nothing.
    left_out = ("data-dir", "initial-checkpoint", "available-memory-proportion", "weights")
    return [setting for setting in settings if setting.option not in left_out]


@pytest.mark.parametrize("name", [*PYTORCH, *TENSORFLOW])
def test_training_config_equals_the_translated_original(name):
    program, configs = ("pytorch:train.py", PYTORCH) if name in PYTORCH else ("tf1:train.py", TENSORFLOW)
    expected = parse(TrainOptions, [PLACE, *by_dialect(program, name, configs)]).options
    assert trained(name).options == expected


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_config_equals_the_translated_original(name):
    settings = by_dialect("pytorch:inference/run_benchmark.py", name, INFERENCE)
    expected = parse(InferOptions, settings).options
    found = load(InferOptions, from_config(name, INFER, use="bench infer")).options
    assert found == replace(expected, data=replace(expected.data, data="generated"))


def test_original_command_line_reads_the_same_file():
    """The comparison above reads the entries of the file; this is what a user types."""
    place = Place(configs=ROOT / "compat/tensorflow/configs.yml")
    settings = translate("tf1:train.py", ["--config", "mk2_resnext101_16ipus"], place=place).settings
    expected = parse(TrainOptions, settings).options
    found = trained("mk2_resnext101_16ipus").options
    found_parts, expected_parts = (
        (options.parallel, options.learning_rate, options.model) for options in (found, expected)
    )
    assert found_parts == expected_parts


def test_every_config_of_the_originals_exists_and_no_other():
    assert all_configs().keys() == PYTORCH.keys() | TENSORFLOW.keys() | OURS
    assert all_configs("bench infer").keys() == INFERENCE.keys()


WORKED_OUT = {  # by hand from the originals' formulas: global batch, stages, peak learning rate
    "resnet50": (18 * 57 * 16, 1, 2.0),
    "resnet50-pod64": (16_128, 1, 2.0),
    "efficientnet-b4-g1-gn-pod16": (768, 4, 0.0483),
    "mobilenet-v3-large-pod16": (1024, 4, 0.52),
    "mk2_resnet50_gn_16ipus": (1024, 1, 2**-11 * 1024),
    "mk2_resnet50_gn_64ipus": (1024, 1, 2**-11 * 1024),
    "mk2_resnet50_bn_128ipus": (16_384, 4, 2**-13 * 16_384),
    "mk2_resnext101_16ipus": (768, 2, 2**-11 * 768),
    "mk2_efficientnet_b4_g1_64ipus": (768, 4, 2**-14 * 768),
    "mk2_efficientnet_b4_g16_64ipus": (640, 4, 2**-14 * 640),
    "mk2_efficientnet_b4_g16_64ipus_LARS": (3040, 4, 2**-9.5 * 3040),
    "mk2_efficientnet_b4_g16_256ipus": (6144, 2, 2**-9.5 * 6144),
    "mk2_resnet50_mlperf_pod256_lars": (10_240, 1, 20.2),
    "mk1_resnet50_16ipus": (1024, 4, 2**-11 * 1024),
}


@pytest.mark.parametrize("name", WORKED_OUT)
def test_recipe_equals_the_one_worked_out_by_hand(name):
    options = trained(name).options
    batch = options.data.micro_batch_size * options.training.gradient_accumulation * options.parallel.replicas
    stages, rate = facts.stages_of(options.parallel), options.learning_rate.lr
    assert (batch, stages, pytest.approx(rate)) == WORKED_OUT[name]


@pytest.mark.parametrize("name", all_configs())
def test_every_option_of_a_config_has_an_effect(name):
    loaded = trained(name)
    unused = {"--data-dir has no effect without --data imagenet, folder, cifar10 or cifar100"}
    assert set(effects.notes(loaded.options, loaded.sources)) <= unused


@pytest.mark.parametrize("use", ["train", "bench infer"])
def test_every_config_has_a_description_and_lists_differences(use):
    for name, entry in all_configs(use).items():
        assert 20 < len(about(name, use=use)) < 200
        assert deviations(name, use=use) or EXTENDS in entry or name in OURS


MISTAKES = {
    "resnet5O": ("train", "--config: no config is named 'resnet5O'; did you mean 'resnet50'?"),
    "mk2_resnet50_gn_16ipu": (
        "train",
        "no config is named 'mk2_resnet50_gn_16ipu'; did you mean 'mk2_resnet50_gn_16ipus'?",
    ),
    "zzz": ("train", "no config is named 'zzz'; `falconet configs` lists all"),
    "efficientnet-b4": ("train", "'efficientnet-b4' is a config for `falconet bench infer`, not for `falconet train`"),
    "resnet50-pod4": ("bench infer", "is a config for `falconet train`, not for `falconet bench infer`"),
    "efficientnet-b5": ("bench infer", "no config is named 'efficientnet-b5'; did you mean 'efficientnet-b"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_unknown_config_name_suggests_the_nearest(name):
    use, message = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        from_config(name, TRAIN if use == "train" else INFER, use=use)
    assert message in str(caught.value)


def test_values_include_those_of_extended_configs():
    values = values_of("resnet50-pod4")
    assert (values["replicas"], values["lr"]) == ("4", "2.0")
    assert values_of("resnet50", use="bench infer")["micro-batch-size"] == "90"
    assert values_of("nobody") == {}


def test_configs_page_is_up_to_date():
    assert (ROOT / "docs/knowing/configs.md").read_text() == configs_page(), "run `make docs`"


def test_configs_are_listed_without_torch():
    code = "import sys; from falconet.cli import main; main(['configs']); sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "mk2_resnet50_mlperf_pod64_lars" in run.stdout


@pytest.mark.parametrize(("name", "batch"), [("cifar10-speedrun", 2000), ("cifar10-96", 1000)])
def test_speed_recipes_have_the_published_rates_per_image(name, batch):
    """A rate r for summed losses is r x batch for their mean; decay is a part of a weight per update."""
    options = load(TrainOptions, [*from_config(name, TRAIN)]).options
    lr, shares = options.learning_rate.lr, dict(map(rate_share, options.optimizer.lr_share))
    assert lr == 0.24
    assert shares["fc"] * lr == pytest.approx(0.67 * batch, rel=1e-6)
    assert shares[".*/bias"] * lr == pytest.approx(0.053 * batch, rel=1e-6)
    assert options.optimizer.weight_decay * lr == pytest.approx(2e-6 * batch, rel=1e-6)
    assert options.data.micro_batch == batch
