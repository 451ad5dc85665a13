"""Options about replicas: folded, refused, restored onto another number."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gloo
from falconet.checkpoint import format
from falconet.parallel import environment, world
from phases import launched
from tiny import TINY

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("two_cores")]


def test_replicas_without_a_device_become_accumulation_with_a_note(falconet):
    answer = falconet(f"train {TINY} --replicas 8 --plan")
    assert answer.code == 0, answer.err
    assert "global batch 64 = micro-batch 8 x accumulation 2 x replicas 4" in answer.out
    note = "note: 8 replicas requested, 2 cores are available, enough for 4 processes: 4 run, with 2 times the"
    assert note in answer.out
    assert "replicas: 8  # command line" in answer.out
    assert "gradient-accumulation: 1  # default" in answer.out


def test_batch_norm_over_folded_replicas_has_a_note_with_its_cost(falconet):
    answer = falconet(f"train {TINY} --replicas 8 --batchnorm-span 4 --plan")
    assert answer.code == 0, answer.err
    assert (
        "note: --batchnorm-span 4: the micro-batches of 2 folded replicas run as one of 16 images, with 2 times the"
        " activations\n" in answer.out
    )
    assert "--batchnorm-span 2:" not in falconet(f"train {TINY} --replicas 4 --batchnorm-span 2 --plan").out


WORKERS = {"cluster": {"worker": ["left:2222", "right:2222"]}, "task": {"type": "worker", "index": 1}}


@pytest.mark.parametrize(
    ("asked", "batch", "note"),
    [
        ("--replicas 4", "32 = micro-batch 8 x accumulation 1 x replicas 4", None),
        ("--replicas 16", "128 = micro-batch 8 x accumulation 2 x replicas 8", "8 replicas requested, 2 cores are"),
        (
            "--replicas 8 --pipeline-splits layer2/0",
            "64 = micro-batch 8 x accumulation 2 x replicas 4",
            "4 replicas of 2 stages requested, 2 cores are",
        ),
        ("--pipeline-splits layer2/0", "16 = micro-batch 8 x accumulation 1 x replicas 2", None),
    ],
)
def test_a_plan_for_the_hosts_of_tf_config_uses_the_devices_of_each(falconet, monkeypatch, asked, batch, note):
    monkeypatch.setenv("TF_CONFIG", json.dumps(WORKERS))
    answer = falconet(f"train {TINY} --iterations 16 {asked} --plan")
    assert answer.code == 0, answer.err
    assert f"global batch {batch}" in answer.out
    assert "note: on each of 2 hosts: " + (note or "") in answer.out or note is None
    assert ("pipeline of 2 stages" in answer.out) == ("splits" in asked)


def test_a_plan_for_one_process_per_host_of_mpirun_uses_the_devices_of_each(falconet, monkeypatch):
    for name, value in {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("MASTER_ADDR", "left")
    answer = falconet(f"train {TINY} --replicas 4 --plan")
    assert answer.code == 0, answer.err
    assert "global batch 32 = micro-batch 8 x accumulation 1 x replicas 4" in answer.out


@pytest.mark.parametrize(
    ("asked", "what"),
    [("--replicas 3", "3 replicas"), ("--replicas 1 --pipeline-splits layer2/0", "1 replica of 2 stages")],
)
def test_replicas_that_the_hosts_of_tf_config_cannot_share_are_refused(falconet, monkeypatch, asked, what):
    monkeypatch.setenv("TF_CONFIG", json.dumps({**WORKERS, "task": {"type": "worker", "index": 0}}))
    answer = falconet(f"train {TINY} {asked} --plan")
    assert (answer.code, answer.err) == (
        2,
        f"falconet train: --replicas: {what} requested on 2 hosts; expected a multiple of 2, because a replica stays"
        " on one host\n",
    )


ONE_HOST = {"cluster": {"worker": ["127.0.0.1:3636", "127.0.0.1:3637"]}, "task": {"type": "worker", "index": 0}}


def test_a_worker_on_the_host_of_the_first_one_says_what_it_is(falconet, monkeypatch):
    cluster = {"worker": [f"127.0.0.1:{gloo.free_port()}", "127.0.0.1:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    answer = falconet(f"train {TINY} --collective-timeout 1")  # the first worker never comes
    assert answer.code != 0
    where = f"worker 1 of 2 on {socket.gethostname()}"
    assert answer.out == f"{where}: 1 process here; worker 0 prints what is trained, and saves\n"


def test_a_pipeline_across_workers_of_one_host_has_a_note(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(ONE_HOST))
    line = f"{TINY} --replicas 2 --pipeline-splits layer2/0"
    launch = launched(line)
    assert launch.division.notes == (
        "2 replicas of 2 stages requested, 2 processes of TF_CONFIG: 1 runs, with 2 times the accumulation; same global"
        " batch and learning rate",
        "the 2 stages of a replica run in 2 workers of TF_CONFIG, one in each",
    )


def test_replicas_folded_by_our_own_launcher_name_no_other(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", environment.OWN: "7"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = f"{TINY} --replicas 8"
    launch = launched(line)
    assert launch.division.notes == (
        "8 replicas requested, 4 processes: 4 run, with 2 times the accumulation; same global batch and learning rate",
    )


MISTAKES = {
    "--replicas 0": "--replicas: got '0', expected a whole number, at least 1, or auto",
    "--replicas 4 --batchnorm-span 3": "--batchnorm-span: got 3, expected a divisor of the number of replicas that run",
    "--replicas 12 --batchnorm-span 2": "expected a divisor of the number of replicas that run, 4 (of 12 requested)",
    "--replicas 8 --strict-devices": "8 replicas requested, which takes 8 devices; 2 cores are available",
}


@pytest.mark.parametrize(("extra", "message"), MISTAKES.items())
def test_mistake_is_refused_before_a_worker_starts(falconet, extra, message):
    answer = falconet(f"train {TINY} {extra}")
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1


WORLDS = {
    "3 for 4": ({"RANK": "0", "WORLD_SIZE": "3"}, "--replicas 4", "torchrun started 3 processes; expected 4 processes"),
    "no folder for restarts": (
        {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"},
        "",
        "--run-dir: required under torchrun --max-restarts 3",
    ),
}


@pytest.mark.parametrize(("variables", "extra", "message"), WORLDS.values(), ids=WORLDS.keys())
def test_world_that_contradicts_the_plan_is_refused(falconet, monkeypatch, variables, extra, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer = falconet(f"train {TINY} {extra}")
    assert answer.code == 2
    assert message in answer.err


def test_only_the_first_process_reports_a_mistake(falconet, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_PORT", str(gloo.free_port()))
    monkeypatch.setattr(environment, "WAITING", 0.2)
    answer = falconet(f"train {TINY} --replicas 4")
    assert (answer.code, answer.err) == (2, "")


def test_another_process_reports_its_own_mistake(falconet, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as first:
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(first.getsockname()[1])}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        answer = falconet("restore --checkpoint-input-path nowhere")
    assert (answer.code, answer.err) == (2, "falconet restore: rank 1: nowhere: no such file or folder\n")


@pytest.mark.parametrize(
    ("first", "said"), [(True, "falconet restore: rank 1: nowhere: no such file or folder\n"), (False, "")]
)
def test_under_our_launcher_a_file_shows_whether_the_first_process_waits(falconet, monkeypatch, tmp_path, first, said):
    place = {"RANK": "1", "WORLD_SIZE": "2", environment.MEETING: str(tmp_path)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "WAITING", 0.2)
    if first:
        (tmp_path / environment.FIRST).touch()
    answer = falconet("restore --checkpoint-input-path nowhere")
    assert (answer.code, answer.err) == (2, said)


def test_run_restarted_in_fewer_processes_keeps_its_global_batch(falconet, monkeypatch):
    line = f"train {TINY} --run-dir r --epoch 3"
    falconet(f"train {TINY} --run-dir r --epoch 1")
    manifest = format.read_manifest(format.checkpoints_in(Path("r"))[-1])
    stored = manifest.config | {"replicas": {"value": "4", "source": "default"}, "epoch": {"value": "3", "source": "x"}}
    monkeypatch.setattr(format, "read_manifest", lambda folder: replace(manifest, config=stored))
    assert "micro-batch 8 x accumulation 1 x replicas 1" in falconet(f"{line} --plan").out
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "global batch 32 = micro-batch 8 x" in falconet(f"{line} --plan").out


def test_restore_on_another_number_of_replicas_keeps_the_global_batch(falconet):
    falconet(f"train {TINY} --gradient-accumulation 4 --epoch 1 --run-dir r")
    line = "restore --checkpoint-input-path r --epoch 2 --plan"
    assert "global batch 32 = micro-batch 8 x accumulation 4 x replicas 1" in falconet(line).out
    assert "global batch 32 = micro-batch 8 x accumulation 2 x replicas 2" in falconet(f"{line} --replicas 2").out
    refused = falconet(f"{line} --replicas 3")
    assert refused.code == 2
    assert "--replicas: got 3, which does not divide the 4 micro-batches per update" in refused.err
    other = falconet(f"{line} --replicas 3 --gradient-accumulation 1")
    assert "global batch 24 = micro-batch 8 x accumulation 1 x replicas 3" in other.out


def test_restore_in_two_processes_reads_the_images_of_one(falconet):
    # Group norm does not see how the images are divided, so the losses are the same.
    group = "--norm-type group --norm-num-groups 4 --logs-per-epoch 4 --lr-schedule step --lr 0.02"
    assert falconet(f"train {TINY} {group} --gradient-accumulation 4 --epoch 2 --run-dir straight").code == 0
    assert falconet(f"train {TINY} {group} --gradient-accumulation 4 --epoch 1 --run-dir r").code == 0
    restore = "restore --checkpoint-input-path r --epoch 2 --replicas 2"
    answer = falconet(restore)
    assert answer.code == 0, answer.err
    assert format.verify(format.checkpoints_in(Path("r"))[-1]).progress.update == 8

    def losses(run):
        lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        return {line["update"]: line["train/loss"] for line in lines if "train/loss" in line}

    straight, moved = losses("straight"), losses("r")
    assert len(straight) == 8
    assert moved == pytest.approx(straight, rel=1e-5)


def test_port_in_use_is_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        line = [sys.executable, "-m", "falconet", "train", *TINY.split()]
        found = subprocess.run(
            line, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=300
        )
    assert found.returncode == 2
    assert (
        found.stderr
        == f"falconet train: MASTER_PORT: {port} is in use on 127.0.0.1; choose a free port, such as {port + 1}\n"
    )


def test_plan_shows_the_threads_of_each_process(falconet, monkeypatch):
    monkeypatch.setattr(world, "cores", lambda processes=1: 8 // processes)
    line = TINY.replace("--threads 1", "").replace("--dataloader-workers 1", "")
    assert "device cpu, 8 CPU threads and 8 loader threads\n" in falconet(f"train {line} --plan").out
    found = falconet(f"train {line} --replicas 4 --plan")
    assert "device cpu, 2 CPU threads and 2 loader threads per process\n" in found.out
