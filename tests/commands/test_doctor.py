"""`falconet doctor`: the report, the recommended decoder, the checks of several processes."""

import os
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from falconet.config.commands import TrainOptions
from falconet.config.options import Data, Machine
from falconet.data import native
from falconet.doctor import bottleneck, decoders, disk_speed, machine_facts, selftest
from falconet.doctor.advice import Advice
from falconet.doctor.bottleneck import COMPUTE, DECODE, READ, Finding, Parts, Updates


def test_versions_cores_and_devices_are_reported(falconet, monkeypatch):
    monkeypatch.setattr(decoders, "findings", lambda device, seconds: [])
    answer = falconet("doctor")
    assert answer.code == 0
    assert f"torch {torch.__version__}" in answer.out
    assert f"{len(os.sched_getaffinity(0))} CPU core" in answer.out


def test_decoders_are_measured_and_one_is_recommended(falconet, monkeypatch):
    monkeypatch.setattr(decoders, "PHOTOS", 4)
    monkeypatch.setattr(decoders, "MEASURED", 0.05)
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
    assert decoders.recommended(rates) == f"--decode-device {expected}"


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
    "--threads 1": "--threads: has no effect on doctor without --distributed or a training to measure",
    "--data digits --replicas 2": "--replicas 2: needs --distributed, which starts processes",
    "--distributed --model resnet18": "--model: has no effect with --distributed, which trains nothing",
}


@pytest.mark.parametrize(("line", "message"), WITHOUT_EFFECT.items())
def test_option_without_effect_is_refused(falconet, line, message):
    answer = falconet(f"doctor {line}")
    assert answer.code == 2
    assert answer.err.startswith(f"falconet doctor: {message}")
    assert answer.err.count("\n") == 1


def test_the_machine_is_described_with_its_memory_instructions_libraries_and_disk(falconet, monkeypatch):
    monkeypatch.setattr(decoders, "findings", lambda device, seconds: [])
    answer = falconet("doctor --device cpu")
    assert re.search(r"^memory: [\d.]+ GiB, [\d.]+ GiB available to this process$", answer.out, re.M)
    assert re.search(r"^  has .*; --precision auto is (bf16\.32|32\.32): ", answer.out, re.M)
    assert f"timm {__import__('timm').__version__}" in answer.out
    assert re.search(r"^optional parts: .*tensorboard \(tensorboard [\d.]+\)", answer.out, re.M)
    assert re.search(
        r"^disk of .* reads [\d,]+ MB/s in sequence and [\d,]+ photos of 128 KiB/s at random", answer.out, re.M
    )
    assert list(Path.cwd().iterdir()) == [], "the file is gone"


def test_every_optional_part_is_listed_by_doctor_and_by_make_install():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("test", "lint"):  # of those who work on Falconet
        del extras[name]
    packages = {re.match("[a-z-]+", line)[0] for each in extras.values() for line in each}
    assert machine_facts.OPTIONAL.keys() == extras.keys()
    assert set(machine_facts.OPTIONAL.values()) <= packages
    stated = re.search(r"^OPTIONAL := ((?:.*\\\n)*.*)$", (root / "Makefile").read_text(), re.M)[1]
    named = shlex.split(stated.replace("\\\n", " "))[::2]
    assert {*named, "serve"} == extras.keys(), "serve is installed already"


@pytest.mark.parametrize(
    ("flags", "precision", "words"),
    [
        ({"avx2"}, "32.32", "has AVX2; --precision auto is 32.32: it has no bf16 instructions"),
        (
            {"avx2", "avx512f", "amx_bf16", "avx512_fp16"},
            "bf16.32",
            "has AVX2, AVX-512, AVX512-FP16, AMX-BF16; --precision",
        ),
        (set(), "32.32", "has none of the instructions that matter;"),
    ],
)
def test_instructions_are_named_with_what_they_are_for(flags, precision, words):
    line = machine_facts.flags_line(frozenset(flags), precision)
    assert line.startswith(words)
    assert ("no fp16 units" in line) == ("avx512_fp16" not in flags)


def test_a_folder_that_cannot_be_written_to_is_one_line(falconet, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk_speed, "measure", refuse)
    monkeypatch.setattr(decoders, "findings", lambda device, seconds: [])
    answer = falconet("doctor --device cpu")
    assert answer.code == 0
    assert "not measured, because no file can be made there: Permission denied\n" in answer.out


@pytest.fixture
def quickly(monkeypatch):
    for name in ("READING", "LOADING", "COMPUTING", "TRAINING", "TRYING"):
        monkeypatch.setattr(bottleneck, name, 0.05)


TABLE = re.compile(r"^(read|decode|load|augment|copy|compute|together) +([\d,]+|-)  ", re.M)


@pytest.mark.usefixtures("quickly", "image_folder")
def test_every_part_of_a_training_on_photos_is_measured(falconet):
    line = "doctor photos --model resnet8-cifar --image-size 32 --micro-batch-size 8 --device cpu --threads 1"
    answer = falconet(line)
    assert answer.code == 0, answer.err
    rates = dict(TABLE.findall(answer.out))
    assert [name for name in rates if name != "load"] == ["read", "decode", "copy", "compute", "together"]
    assert rates.pop("copy") == "-"
    assert all(int(rate.replace(",", "")) > 0 for rate in rates.values())
    assert re.search(r"^limited by: (compute|load, of which (read|decode) takes \d+%)$", answer.out, re.M)
    assert re.search(r"^an epoch of 24 images takes about .*, without validation$", answer.out, re.M)
    assert re.search(r"^change: ", answer.out, re.M)
    assert not list(Path.cwd().glob("runs*"))


@pytest.mark.usefixtures("quickly", "image_folder")
def test_a_link_that_leads_nowhere_is_passed_over(falconet):
    Path("photos/train/dark/gone.png").symlink_to("nowhere.png")
    line = "doctor photos --model resnet8-cifar --image-size 32 --micro-batch-size 8 --device cpu --threads 1"
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert "limited by: " in answer.out


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    "data", ["digits", "synthetic --image-size 8", "generated --image-size 8 --iterations 4 --classes 3"]
)
def test_images_in_memory_are_neither_read_nor_decoded(falconet, data):
    answer = falconet(f"doctor --data {data} --device cpu --threads 1 --model resnet8-cifar --micro-batch-size 16")
    assert answer.code == 0, answer.err
    rates = dict(TABLE.findall(answer.out))
    assert (rates["read"], rates["decode"], rates["copy"]) == ("-", "-", "-")
    assert ("augment" in rates) == (not data.startswith("synthetic"))
    parts = {name: int(rates[name].replace(",", "")) for name in ("augment", "compute") if name in rates}
    assert f"limited by: {min(parts, key=parts.get)}\n" in answer.out


@pytest.mark.usefixtures("quickly")
def test_images_in_memory_may_be_limited_by_the_cores_that_prepare_them(falconet, monkeypatch):
    monkeypatch.setattr(bottleneck.measure, "loader_rate", lambda pipeline, seconds: 7.0)
    answer = falconet("doctor --device cpu --threads 1 --dataloader-workers 1 --data digits --model resnet8-cifar")
    assert answer.code == 0, answer.err
    assert dict(TABLE.findall(answer.out))["augment"] == "7"
    assert "limited by: augment\n" in answer.out


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("options", "tried"),
    [
        ("--micro-batch-size 1024", []),  # digits has 1,433 images to train on
        ("--micro-batch-size 256 --gradient-accumulation 4", []),
        ("--micro-batch-size 64 --gradient-accumulation 8", ["--micro-batch-size 128"]),
        ("--micro-batch-size 1024 --data generated --image-size 8 --iterations 1", ["--micro-batch-size 2048"]),
    ],
)
def test_larger_micro_batches_are_tried_only_if_the_training_takes_them(falconet, monkeypatch, options, tried):
    """On CUDA; what is measured there is measured on the CPU here."""
    found, measured = [], bottleneck._measured

    def tries(launch, site, *, micro_batch):
        monkeypatch.setattr(bottleneck, "_measured", lambda launch, _, **named: measured(launch, site, **named))
        cuda = SimpleNamespace(world=SimpleNamespace(device=torch.device("cuda")))
        rates = on_cuda(launch, cuda, micro_batch=launch.loaded.options.data.micro_batch)
        found.extend(option for option in rates if "batch" in option)
        return rates

    on_cuda = bottleneck._tried
    monkeypatch.setattr(bottleneck, "_tried", tries)
    line = f"doctor --data digits --device cpu --threads 1 --model resnet8-cifar --precision bf16.32 {options}"
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert found == tried


@pytest.mark.usefixtures("quickly")
def test_a_named_config_is_measured_on_what_there_is(falconet):
    generated = "--data generated --image-size 32 --iterations 4 --micro-batch-size 8"
    answer = falconet(f"doctor --config cifar10-resnet20 {generated} --device cpu --threads 1")
    assert answer.code == 0, answer.err
    assert "resnet20-cifar on generated" in answer.out


MISTAKES = {
    "no/photos": "no/photos: no such folder",
    "--config nothing": "nothing",
    "--model resnet1": "--model: 'resnet1' is not a model",
    "--epoch x": "--epoch: got 'x'",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_bad_input_is_one_line(falconet, line, message):
    answer = falconet(f"doctor {line}")
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""


def finding(
    *,
    read=None,
    kept=None,
    decode=None,
    augment=None,
    copy=None,
    load=None,
    computed=100.0,
    trained=None,
    tried=None,
    **others,
):
    updates = Updates(computed=computed, trained=trained, micro_batch=32, number=9)
    options = TrainOptions(data=Data(**others.pop("data", {})), machine=Machine(precision="32.32"))
    values = {"device": torch.device("cpu"), "images": 1000, "stored": None, "packed": False, "described": "", **others}
    parts = Parts(read=read, kept=kept, decode=decode, augment=augment, copy=copy, load=load, updates=updates)
    return Finding(parts=parts, options=options, tried=tried or {}, **values)


def advice(found, *, free=10**9, cores=8, decoder="the native decoder (avx2)"):
    return Advice(found=found, free=free, cores=cores, decoder=decoder)


def test_the_first_epoch_reads_and_decodes_one_after_the_other():
    parts = finding(read=300.0, kept=3000.0, decode=700.0, load=600.0, computed=400.0, trained=380.0).parts
    assert parts.together(from_disk=False) == 380.0
    assert parts.together(from_disk=True) == pytest.approx(214.2857)  # 1 / (1 / 600 + 1 / 300 - 1 / 3000)
    assert (parts.limit(from_disk=False), parts.limit(from_disk=True)) == (COMPUTE, READ)


@pytest.mark.parametrize("slowest", ["computed", "decode", "copy", "load"])
def test_all_together_are_never_predicted_faster_than_the_slowest(slowest):
    rates = {"read": 3000.0, "kept": 3000.0, "decode": 70.0, "copy": 500.0, "load": 60.0, "computed": 65.0}
    parts = finding(**rates | {slowest: 6.2}, trained=6.9).parts
    assert parts.together(from_disk=False) == parts.together(from_disk=True) == 6.2


ONE_AFTER_THE_OTHER = [  # rates, and what is said of them
    ({}, 500, "load, of which read takes 50%"),
    ({"computed": 400.0}, 400, "compute"),
    ({"copy": 300.0}, 300, "copy"),
    ({"kept": 2000.0, "decode": 666.0}, 500, "load, of which decode takes 75%"),
    ({"read": 250.0, "stored": 10**10}, 200, "load, of which read takes 80%"),  # 1 / (1 / 500 + 1 / 250 - 1 / 1000)
    ({"kept": 510.0, "decode": None}, 500, "read"),  # decoding takes no time that could be measured
]


@pytest.mark.parametrize(("given", "rate", "limit"), ONE_AFTER_THE_OTHER)
def test_the_limit_is_what_has_the_predicted_rate(given, rate, limit):
    rates = {"read": 1000.0, "kept": 1000.0, "decode": 1000.0, "load": 500.0, "computed": 600.0, "trained": 700.0}
    said = advice(finding(**rates | {"stored": 10**6} | given))
    text = "\n".join(said.lines())
    named, shown = re.search(r"^limited by: (\w+)", text, re.M)[1], dict(TABLE.findall(text))
    assert f"limited by: {limit}\n" in text
    assert shown["together"] == str(rate)
    assert "hinder" not in text
    assert "take the cores" not in text
    if named != "read":  # which is shown as it is from the disk
        assert shown[named] == str(rate)
    assert said.changes()


def test_decoding_is_what_loading_takes_beside_reading():
    assert bottleneck._rest(100.0, 300.0) == pytest.approx(150.0)  # 10 ms - 3.3 ms
    assert bottleneck._rest(100.0, 105.0) is None
    assert bottleneck._rest(100.0, 90.0) is None


def test_a_disk_that_is_slow_every_time_is_the_limit_even_if_memory_is_free():
    found = finding(read=50.0, kept=55.0, load=54.0, computed=100.0, trained=52.0, stored=10**8)
    assert advice(found).limit == READ
    assert any(
        line.startswith("decode             -  cannot be separated from reading") for line in advice(found).lines()
    )


@pytest.mark.parametrize(("stored", "limit"), [(10**8, DECODE), (10**10, READ)])
def test_a_disk_is_the_limit_only_of_files_that_do_not_fit_into_memory(stored, limit):
    found = finding(read=50.0, kept=600.0, decode=80.0, load=75.0, computed=100.0, trained=70.0, stored=stored)
    assert advice(found).limit == limit
    epoch = next(line for line in advice(found).lines() if line.startswith("an epoch"))
    # 1000 x (1 / 75 + 1 / 50 - 1 / 600) seconds
    assert ("the first one 31.7s, from the disk" in epoch) == (limit == DECODE)


CHANGES = [
    (finding(read=50.0, decode=80.0, load=75.0, stored=10**10), ["--dataloader-workers 32:", "`falconet data pack`:"]),
    (
        finding(decode=80.0, load=75.0, data={"dataloader_workers": 2}),
        ["--dataloader-workers 8: 2 threads decode on 8 cores", "`falconet data pack --resize`:"],
    ),
    (finding(decode=80.0, load=75.0, packed=True), ["`falconet data pack --resize`:"]),
    (
        finding(decode=80.0, load=75.0, device=torch.device("cuda")),
        ["--decode-device cuda: the cores are the limit", "`falconet data pack --resize`:"],
    ),
    (
        finding(augment=80.0, load=80.0, data={"dataloader_workers": 2}, device=torch.device("cuda")),
        ["--dataloader-workers 8: 2 threads augment on 8 cores", "--dataset-location device:"],
    ),
    (finding(augment=80.0, load=80.0), ["a simpler --augment: preparing batches on the cores"]),
    (
        finding(
            augment=80.0,
            load=80.0,
            data={"dataloader_workers": 2, "dataset_location": "device"},
            device=torch.device("cuda"),
        ),
        ["a simpler --augment: preparing batches on the device"],
    ),
    (finding(copy=80.0, load=90.0, data={"eight_bit_io": False}), ["--eight-bit-io:", "--decode-device cuda:"]),
    (
        finding(tried={"--precision bf16.32": 150.0}),
        [
            "--precision bf16.32: computes 150 images/s, 1.50 times as many",
            "a smaller --image-size or --model, or a GPU:",
        ],
    ),
    (
        finding(tried={"--precision bf16.32": 104.0}, device=torch.device("cuda")),
        ["a smaller --image-size or --model: computing is the limit (--precision bf16.32: tried, no faster)"],
    ),
    (finding(decode=300.0, load=290.0), ["`falconet data pack --resize`: smaller photos leave more of the cores"]),
]


@pytest.mark.parametrize(("found", "expected"), CHANGES)
def test_changes_follow_from_the_limit(monkeypatch, found, expected):
    monkeypatch.setattr(Advice, "workers", 8 if found.options.data.dataloader_workers == "auto" else 2)
    changes = advice(found).changes()
    assert len(changes) <= 2
    for change, words in zip(changes, expected, strict=False):
        assert change.startswith(words)


def test_pillow_is_answered_with_the_native_decoder():
    changes = advice(finding(decode=80.0, load=75.0), cores=1, decoder="Pillow: no compiler").changes()
    assert changes[0].startswith("a C++ compiler, and Falconet installed again")
