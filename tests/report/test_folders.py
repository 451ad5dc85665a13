"""Names of new run folders."""

import re
from dataclasses import replace
from pathlib import Path

from falconet.report.folders import fresh
from runs import RN50


def test_a_new_folder_does_not_exist_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = replace(RN50, model="timm:a b")
    folder = fresh(shape)
    assert re.fullmatch(r"runs/timm-a-b_imagenet_\d{8}-\d{6}", str(folder))
    folder.mkdir(parents=True)
    assert not fresh(shape).exists()


def test_the_variable_names_the_folder_of_all_runs(tmp_path, monkeypatch):
    beside = replace(RN50, parent=Path("elsewhere"))
    monkeypatch.setenv("FALCONET_RUNS", str(tmp_path))
    assert fresh(RN50).parent == fresh(beside).parent == tmp_path
    monkeypatch.setenv("FALCONET_RUNS", "")
    assert fresh(RN50).parent == Path("runs")
    assert fresh(beside).parent == Path("elsewhere")


def test_a_suffix_ends_the_name():
    assert re.fullmatch(r"resnet50_imagenet_\d{8}-\d{6}_my-run", fresh(replace(RN50, suffix="my/run")).name)
