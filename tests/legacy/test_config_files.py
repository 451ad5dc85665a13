"""Every named config of the originals has the global batch that their documents give it."""

from pathlib import Path

import pytest

from falconet.errors import ConfigError
from falconet.legacy.table import Place
from falconet.legacy.translate import config_entry, read_configs, translate

COMPAT = Path(__file__).parents[2] / "compat"
# Micro-batch x accumulation x replicas, and the stages of a pipeline.
PYTORCH = {
    "resnet50": (16416, 1),
    "resnet50-pod4": (16416, 1),
    "resnet50-pod64": (16128, 1),
    "efficientnet-b0-g16-gn-pod16": (800, 2),
    "efficientnet-b4-g16-gn-pod16": (2048, 2),
    "efficientnet-b4-g16-gn-pod64": (2048, 2),
    "efficientnet-b4-g1-gn-pod16": (768, 4),
    "mobilenet-v3-small": (1024, 1),
    "mobilenet-v3-small-pod4": (1024, 1),
    "mobilenet-v3-large": (1024, 4),
    "mobilenet-v3-large-pod16": (1024, 4),
}
TENSORFLOW = {
    "mk2_resnet8_test": (32, 1),
    "mk2_resnet50_mlperf_pod16": (2304, 1),
    "mk2_resnet50_mlperf_pod16_bs20": (1920, 1),
    "mk2_resnet50_mlperf_pod4_bs20": (1920, 1),
    "mk2_resnet50_mlperf_pod64_bs20": (2560, 1),
    "mk2_resnet50_mlperf_pod128_bs20": (5120, 1),
    "mk2_resnet50_mlperf_pod16_lars": (3200, 1),
    "mk2_resnet50_mlperf_pod64_lars": (3840, 1),
    "mk2_resnet50_mlperf_pod128_lars": (5120, 1),
    "mk2_resnet50_mlperf_pod256_lars": (10240, 1),
    "mk2_resnet50_gn_16ipus": (1024, 1),
    "mk2_resnet50_gn_64ipus": (1024, 1),
    "mk2_resnet50_bn_16ipus": (16384, 4),
    "mk2_resnet50_bn_64ipus": (16384, 4),
    "mk2_resnet50_bn_128ipus": (16384, 4),
    "mk2_resnext101_16ipus": (768, 2),
    "mk2_efficientnet_b4_g1_16ipus": (768, 4),
    "mk2_efficientnet_b4_g1_32ipus": (768, 4),
    "mk2_efficientnet_b4_g1_64ipus": (768, 4),
    "mk2_efficientnet_b4_g16_16ipus": (800, 4),
    "mk2_efficientnet_b4_g16_64ipus": (640, 4),
    "mk2_efficientnet_b4_g16_64ipus_LARS": (3040, 4),
    "efficientnet_b4_g16_large_batch_size_high_throughput": (12, 2),
    "mk2_efficientnet_b4_g16_32ipus": (6144, 2),
    "mk2_efficientnet_b4_g16_128ipus": (6144, 2),
    "mk2_efficientnet_b4_g16_256ipus": (6144, 2),
    "mk1_resnet50_16ipus": (1024, 4),
}
BASES = {
    *("efficientnet-g16-gn-pod16-base", "mobilenet-v3-base", "mk2_resnet50_base", "mk2_efficientnet_b4_16ipus_base"),
    *("common", "efficientnet-g16-gn"),
}
FILES = {
    "pytorch:train.py": (COMPAT / "pytorch/train/configs.yml", PYTORCH),
    "tf1:train.py": (COMPAT / "tensorflow/configs.yml", TENSORFLOW),
}


def batch_and_stages(program, name):
    translation = translate(program, ["--config", name], place=Place(configs=FILES[program][0]))
    value = {setting.option: setting.values for setting in translation.settings}
    product = 1
    for option, default in (("micro-batch-size", "64"), ("gradient-accumulation", "1"), ("replicas", "1")):
        product *= int(value.get(option, (default,))[0])
    return product, len(value.get("pipeline-splits", ())) + 1


@pytest.mark.run
@pytest.mark.parametrize("program", FILES)
def test_every_named_config_has_its_global_batch_and_stages(program):
    path, table = FILES[program]
    assert {name: batch_and_stages(program, name) for name in set(read_configs(path)) - BASES} == table


INFERENCE = sorted(set(read_configs(COMPAT / "pytorch/inference/configs.yml")) - BASES)


def test_the_named_configs_of_inference_are_read():
    place = Place(configs=COMPAT / "pytorch/inference/configs.yml")
    for name in INFERENCE:
        line = ["--config", name, "--data", "generated"]
        translation = translate("pytorch:inference/run_benchmark.py", line, place=place)
        model = {setting.option: setting.values for setting in translation.settings}["model"][0]
        assert (translation.command, model) == ("bench infer", name.removesuffix("-g16-gn"))


UNKNOWN = {
    "mk2_resnet50_mlperf_pod16_": "did you mean 'mk2_resnet50_mlperf_pod16_bs20', 'mk2_resnet50_mlperf_pod16_",
    "mk2_resnex101_16ipus": "did you mean 'mk2_resnext101_16ipus', '",
    "zzz": "expected mk2_resnet8_test, mk2_resnet50_mlperf_pod16, mk2_resnet50_mlperf_pod16_bs20, mk2_",
    "": "expected mk2_resnet8_test, mk2_resnet50_mlperf_pod16, mk2_resnet50_mlperf_pod16_bs20, mk2_",
}


@pytest.mark.parametrize(("name", "meant"), UNKNOWN.items())
def test_an_unknown_config_is_answered_with_the_nearest_names_or_all(name, meant):
    path = COMPAT / "tensorflow/configs.yml"
    with pytest.raises(ConfigError) as refused:
        config_entry(name, path)
    message = str(refused.value)
    assert message.startswith(f"--config: no config is named '{name}' in {path}; {meant}")
    assert message.count(";") == 1


def test_a_config_without_options_is_refused(tmp_path):
    path = tmp_path / "configs.yml"
    path.write_text("mine: 5\n")
    with pytest.raises(ConfigError) as refused:
        config_entry("mine", path)
    assert str(refused.value) == f"--config: {path}: mine: expected options below it, such as `epochs: 10`"
