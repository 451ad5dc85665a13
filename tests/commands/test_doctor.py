"""`falconet doctor`: what there is, and whether it works."""

import os
import re
from pathlib import Path

import pytest
import torch

from falconet.commands import doctor, selftest
from falconet.data import native


def test_versions_cores_and_devices_are_told(falconet, monkeypatch):
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
    ("rates", "wanted"),
    [
        ({"Pillow": 100.0}, "cpu"),
        ({"native decoder (avx2)": 400.0, "Pillow": 100.0, "nvJPEG on the device": 450.0}, "cpu"),
        ({"native decoder (avx2)": 400.0, "Pillow": 100.0, "nvJPEG on the device": 500.0}, "cuda"),
        ({"Pillow": 100.0, "nvJPEG on the device": 500.0}, "cuda"),
    ],
)
def test_the_device_is_recommended_where_it_is_clearly_faster(rates, wanted):
    assert doctor.recommended(rates) == f"--decode-device {wanted}"


@pytest.mark.gpu
def test_on_cuda_the_device_s_decoder_is_measured_too(falconet):
    answer = falconet("doctor")
    assert answer.code == 0, answer.err
    assert re.search(r"^  nvJPEG on the device +[\d,]+$", answer.out, re.M)


def test_each_check_is_told_and_nothing_is_left_behind(falconet):
    answer = falconet("doctor --distributed --replicas 1 --device cpu --threads 1")
    assert answer.code == 0, answer.err
    assert answer.out.count("\nok ") == len(selftest.CHECKS)
    assert list(Path.cwd().iterdir()) == []


def test_a_check_that_fails_is_told_in_one_line_with_exit_code_2(falconet, monkeypatch):
    monkeypatch.setitem(selftest.CHECKS, "vote", lambda world: (False, "nobody came"))
    answer = falconet("doctor --distributed --replicas 1 --device cpu --threads 1")
    assert answer.code == 2
    assert "FAILED  vote: nobody came" in answer.out
    assert answer.err == "falconet doctor: --distributed: 1 check failed: vote\n"


@pytest.mark.gpu
def test_on_cuda_every_check_holds(falconet):
    answer = falconet("doctor --distributed")
    assert answer.code == 0, answer.err
    assert "FAILED" not in answer.out


def test_processes_without_the_self_test_are_refused(falconet):
    answer = falconet("doctor --replicas 2")
    assert answer.code == 2
    assert answer.err == "falconet doctor: --replicas 2: is for --distributed, which starts processes; expected both\n"


IDLE = {
    "--precision 16.16": "--precision: has no effect on doctor, whose checks have their own",
    "--distributed --no-deterministic": "--no-deterministic: has no effect on doctor, whose checks have their own",
    "--replicas 2": "--replicas 2: is for --distributed, which starts processes; expected both",
    "--threads 1": "--threads: has no effect on doctor without --distributed; expected both",
}


@pytest.mark.parametrize(("line", "message"), IDLE.items())
def test_an_option_without_effect_is_refused(falconet, line, message):
    answer = falconet(f"doctor {line}")
    assert answer.code == 2
    assert answer.err.startswith(f"falconet doctor: {message}")
    assert answer.err.count("\n") == 1
