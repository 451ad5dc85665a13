"""`falconet doctor`: the report, the recommended decoder, the checks of several processes."""

import os
import re
from pathlib import Path

import pytest
import torch

from falconet.commands import doctor, selftest
from falconet.data import native


def test_versions_cores_and_devices_are_reported(falconet, monkeypatch):
    monkeypatch.setattr(doctor, "findings", lambda device, seconds: [])
    answer = falconet("doctor")
    assert answer.code == 0
    assert f"torch {torch.__version__}" in answer.out
    assert f"{len(os.sched_getaffinity(0))} CPU core" in answer.out


def test_decoders_are_measured_and_one_is_recommended(falconet, monkeypatch):
    monkeypatch.setattr(doctor, "PHOTOS", 4)
    monkeypatch.setattr(doctor, "MEASURED", 0.05)
    answer = falconet("doctor --device cpu")
    assert answer.code == 0, answer.err
    assert re.search(r"^  Pillow +[\d,]+$", answer.out, re.M)
    assert bool(re.search(r"^  native decoder \(\w+\) +[\d,]+$", answer.out, re.M)) == (native.library() is not None)
    assert answer.out.endswith("recommended: --decode-device cpu\n")


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"Pillow": 100.0}, "cpu"),
        ({"native decoder (avx2)": 400.0, "Pillow": 100.0, "nvJPEG on the device": 700.0}, "cpu"),
        ({"native decoder (avx2)": 400.0, "Pillow": 100.0, "nvJPEG on the device": 900.0}, "cuda"),
        ({"Pillow": 100.0, "nvJPEG on the device": 500.0}, "cuda"),
    ],
)
def test_device_is_recommended_where_it_is_clearly_faster(rates, expected):
    assert doctor.recommended(rates) == f"--decode-device {expected}"


@pytest.mark.gpu
def test_nvjpeg_is_measured_on_cuda(falconet):
    answer = falconet("doctor")
    assert answer.code == 0, answer.err
    assert re.search(r"^  nvJPEG on the device +[\d,]+$", answer.out, re.M)


def test_every_check_is_reported_and_no_file_is_left(falconet):
    answer = falconet("doctor --distributed --replicas 1 --device cpu --threads 1")
    assert answer.code == 0, answer.err
    assert answer.out.count("\nok ") == len(selftest.CHECKS)
    assert list(Path.cwd().iterdir()) == []


def test_failed_check_is_one_line_and_exit_code_2(falconet, monkeypatch):
    monkeypatch.setitem(selftest.CHECKS, "vote", lambda world: (False, "no votes"))
    answer = falconet("doctor --distributed --replicas 1 --device cpu --threads 1")
    assert answer.code == 2
    assert "FAILED  vote: no votes" in answer.out
    assert answer.err == "falconet doctor: --distributed: 1 check failed: vote\n"


@pytest.mark.gpu
def test_every_check_holds_on_cuda(falconet):
    answer = falconet("doctor --distributed")
    assert answer.code == 0, answer.err
    assert "FAILED" not in answer.out


def test_replicas_without_distributed_are_refused(falconet):
    answer = falconet("doctor --replicas 2")
    assert answer.code == 2
    assert answer.err == "falconet doctor: --replicas 2: needs --distributed, which starts processes\n"


WITHOUT_EFFECT = {
    "--precision 16.16": "--precision: has no effect on doctor, whose checks fix it",
    "--distributed --no-deterministic": "--no-deterministic: has no effect on doctor, whose checks fix it",
    "--replicas 2": "--replicas 2: needs --distributed, which starts processes",
    "--threads 1": "--threads: has no effect on doctor without --distributed",
}


@pytest.mark.parametrize(("line", "message"), WITHOUT_EFFECT.items())
def test_option_without_effect_is_refused(falconet, line, message):
    answer = falconet(f"doctor {line}")
    assert answer.code == 2
    assert answer.err.startswith(f"falconet doctor: {message}")
    assert answer.err.count("\n") == 1
