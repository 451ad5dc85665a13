"""Names of run folders: ours and the originals'."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from falconet.report.folders import RunShape, fresh, pytorch_name, tensorflow_name

RN50 = RunShape(
    model="resnet50",
    data="imagenet",
    micro_batch=8,
    accumulation=8,
    replicas=16,
    pipelined=False,
    norm="group",
    groups=32,
    precision="16.16",
    rounds_stochastically=True,
    image_size=224,
)
SMALL = {"accumulation": 1, "replicas": 1, "norm": "batch"}
NAMES = {
    "RN50_bs8x16rx8a_GN32_16.16": {},
    "RN50_bs8x16rx8p_GN32_16.16_noSR": {"pipelined": True, "rounds_stochastically": False},
    "RN20_bs32_BN_16.16": {"model": "resnet20-cifar", "data": "cifar10", "micro_batch": 32, "image_size": 32, **SMALL},
    "RN20_bs32_BN_32.32": {
        **{"model": "resnet20-cifar", "data": "generated", "micro_batch": 32, "image_size": 32, "precision": "32.32"},
        **SMALL,
    },
    "RNX101_bs6_noBN_32.32": {"model": "resnext101", "micro_batch": 6, "precision": "32.32", **SMALL, "norm": "none"},
    "EfficientNet-B1_bs8_BN_240x240": {"model": "efficientnet-b1", "image_size": 240, **SMALL},
    "EfficientNet-B4_bs5x40px4r_GN4_380x380": {  # accumulation first, and no precision
        **{"model": "efficientnet-b4", "image_size": 380, "micro_batch": 5, "accumulation": 40, "replicas": 4},
        **{"pipelined": True, "groups": 4, "precision": "16.32", "rounds_stochastically": False},
    },
    "EfficientNet-CIFAR_bs8_BN": {"model": "efficientnet-cifar", "data": "cifar10", "image_size": 32, **SMALL},
    "RN50_bs16x4rx256p_BN_16.32": {  # where nothing is rounded, the default is not said
        **{"micro_batch": 16, "replicas": 4, "accumulation": 256, "pipelined": True, "norm": "batch"},
        **{"precision": "16.32", "rounds_stochastically": False},
    },
    "SN_bs8x2r_16.16": {"model": "squeezenet", "accumulation": 1, "replicas": 2, "norm": "none"},
    "mobilenet-v3-small_bs8_BN_16.16": {"model": "mobilenet-v3-small", **SMALL},
}


@pytest.mark.parametrize(("name", "changes"), NAMES.items())
def test_the_names_of_the_tensorflow_program(name, changes):
    assert tensorflow_name(replace(RN50, **changes)) == name


def test_the_name_of_the_pytorch_program():
    assert pytorch_name(RN50) == "resnet50_bs8_16.16fp_r16_di1"


FOLDERS = {
    "falconet": r"runs/timm-a-b_imagenet_\d{8}-\d{6}",
    "pytorch": r"logs/timm-a-b_bs8_16\.16fp_r16_di1_[A-Z0-9]{3}",
    "tensorflow": r"logs/timm-a-b_bs8x16rx8a_GN32_16\.16_v1\.2_[A-Z0-9]{3}",
    "popart": r"logs/\d{8}-\d{6}/timm:a b/net",
}


@pytest.mark.parametrize(("style", "pattern"), FOLDERS.items())
def test_a_fresh_folder_is_not_there_yet(style, pattern, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FALCONET_RUNS", raising=False)
    folder = fresh(style, replace(RN50, model="timm:a b"), version="1.2")
    assert re.fullmatch(pattern, str(folder))
    folder.mkdir(parents=True)
    assert not fresh(style, replace(RN50, model="timm:a b"), version="1.2").exists()


def test_the_variable_says_where_new_folders_go(tmp_path, monkeypatch):
    monkeypatch.setenv("FALCONET_RUNS", str(tmp_path))
    assert fresh("tensorflow", RN50, version="1").parent == tmp_path
    assert fresh("falconet", RN50, version="1").parent == Path(tmp_path)


SUFFIXED = {
    "falconet": r"runs/resnet50_imagenet_\d{8}-\d{6}_my_run",
    "pytorch": r"logs/resnet50_bs8_16\.16fp_r16_di1_my_run_[A-Z0-9]{3}",
    "tensorflow": r"logs/RN50_bs8x16rx8a_GN32_16\.16_my_run_v1\.2_[A-Z0-9]{3}",
    "popart": r"logs/\d{8}-\d{6}/50/my_run",
}


@pytest.mark.parametrize(("style", "pattern"), SUFFIXED.items())
def test_a_suffix_stands_where_the_originals_had_it(style, pattern, monkeypatch):
    monkeypatch.delenv("FALCONET_RUNS", raising=False)
    assert re.fullmatch(pattern, str(fresh(style, replace(RN50, suffix="my_run"), version="1.2")))
