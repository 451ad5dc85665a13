"""`falconet train --replicas 2` as a person runs it: workers that start, die, hang and stop together."""

import io
import json
import os
import random
import re
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gloo
from falconet.checkpoint import format
from falconet.errors import ConfigError, WorldError
from falconet.parallel import collectives, launch, meeting
from falconet.parallel.environment import Place
from runs import assert_bitwise, begin, finish, metrics, standing, updates, wait_for
from tiny import TINY
from watched import children, wait_until_gone

pytestmark = pytest.mark.dist

LINE = f"{TINY} --micro-batch-size 4 --replicas 2 --logs-per-epoch 4 --checkpoint-save-freq 0.5 --ema-half-life 1"
EPOCHS, TOTAL = 6, 24  # and their updates
STAGES = "--replicas 1 --gradient-accumulation 2 --pipeline-splits layer2/0/conv2 --pipeline-schedule interleaved"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    home = tmp_path_factory.mktemp("straight")
    return home, *finish(begin(f"train {LINE} --epoch {EPOCHS} --run-dir r", home))


def test_two_workers_train_and_save_shares_and_only_the_first_prints(straight):
    home, code, out, err = straight
    assert (code, err) == (0, "")
    assert out.count("global batch 8 = micro-batch 4 x accumulation 1 x replicas 2") == 1
    assert len(re.findall(rf"^ +\d+/{EPOCHS} ", out, re.M)) == EPOCHS
    assert updates(home / "r") == list(range(1, TOTAL + 1))
    manifest = format.verify(format.checkpoints_in(home / "r")[-1])
    assert manifest.runtime["processes"] == 2
    assert {f"{stem}-{rank:05d}.safetensors" for stem in manifest.stems for rank in (0, 1)} == manifest.files.keys()


def test_one_process_with_the_same_global_batch_logs_the_same_losses(straight, falconet, tmp_path):
    home = straight[0]
    line = LINE.replace("--replicas 2", "--gradient-accumulation 2")
    assert falconet(f"train {line} --epoch {EPOCHS} --norm-type batch --run-dir r").code == 0
    two, one = metrics(home / "r"), metrics(tmp_path / "r")
    assert two[1, "train/loss"] == pytest.approx(one[1, "train/loss"], rel=1e-6)
    assert two[1, "train/accuracy"] == one[1, "train/accuracy"]
    assert two[4, "validation/images"] == one[4, "validation/images"]


def kill_unnoticed(killed, other):
    """The other worker notices only after the launcher has asked it to end, as on a machine where it got no core."""
    os.kill(other, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: is_pending(signal.SIGTERM, other), "the launcher to end the other")
    os.kill(other, signal.SIGCONT)


def is_pending(number, pid):
    masks = re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def kill_at_random(home, run, *, total, kills, extra=""):
    """Train `run` while workers are killed with -9 at updates drawn for this line; returns them, and its answer."""
    draw = random.Random(f"{kills} {extra}")
    variables = standing(home, update=total - 1)
    process = begin(f"train {LINE} {extra} --epoch {total // 4} --run-dir {run}", home, variables=variables)
    targets = sorted(draw.sample(range(1, total // 2), kills))
    for number, target in enumerate(targets):
        before = len(updates(home / run))
        wait_for(
            lambda at=target, before=before, first=number == 0: (
                (first or len(updates(home / run)) > before) and max(updates(home / run), default=0) >= at
            ),
            f"update {target}; {process.poll()}",
        )
        workers = children(process.pid)
        assert len(workers) == 2
        killed, other = draw.sample(workers, 2)
        if number % 2:
            kill_unnoticed(killed, other)
        else:
            os.kill(killed, signal.SIGKILL)
        wait_for(
            lambda old=workers: len(children(process.pid)) == 2 and not set(children(process.pid)) & set(old), "restart"
        )
    (home / "go").touch()
    return targets, *finish(process)


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_workers_restart_and_finish_bit_for_bit(straight, tmp_path, kills):
    targets, code, out, err = kill_at_random(tmp_path, "r", total=TOTAL, kills=kills)
    assert (code, err) == (0, ""), (targets, out)
    assert out.count("was killed by SIGKILL; restarting all workers from the newest complete checkpoint") == kills
    assert_bitwise(straight[0] / "r", tmp_path / "r")


@pytest.mark.slow
def test_a_killed_stage_restarts_and_the_run_finishes_bit_for_bit(tmp_path):
    assert finish(begin(f"train {LINE} {STAGES} --epoch 6 --run-dir straight", tmp_path))[0] == 0
    targets, code, out, err = kill_at_random(tmp_path, "killed", total=24, kills=1, extra=STAGES)
    assert (code, err) == (0, ""), (targets, out)
    assert out.count("was killed by SIGKILL; restarting all workers from the newest complete checkpoint") == 1
    assert_bitwise(tmp_path / "straight", tmp_path / "killed")


SOAKED = {
    "whole state": "",
    "divided state": "--enable-optimizer-rts --optimizer adamw --lr 0.001 --batchnorm-span 2",
    "16-bit, divided": "--precision 16.16 --enable-stochastic-rounding --auto-loss-scaling --enable-optimizer-rts",
    "stages": STAGES,
}


@pytest.mark.slow
@pytest.mark.parametrize("extra", SOAKED.values(), ids=SOAKED.keys())
def test_twenty_five_kills_do_not_change_a_bit(tmp_path, extra):
    assert finish(begin(f"train {LINE} {extra} --epoch 200 --run-dir straight", tmp_path))[0] == 0
    targets, code, out, err = kill_at_random(tmp_path, "killed", total=800, kills=25, extra=extra)
    assert (code, err) == (0, ""), (targets, out)
    assert_bitwise(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.parametrize("how", ["Ctrl-C", pytest.param("SIGTERM to the launcher", marks=pytest.mark.slow)])
def test_an_interruption_leaves_one_checkpoint_and_exit_code_130(tmp_path, how):
    process = begin(f"train {LINE} --epoch 5000 --checkpoint-save-freq 5000 --run-dir r", tmp_path)
    wait_for(lambda: updates(tmp_path / "r"), "the first update")
    workers = children(process.pid)
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals the whole group
    else:
        process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert (code, err) == (130, "")
    assert out.count("to continue: falconet restore r") == 1
    assert len(format.checkpoints_in(tmp_path / "r")) == 1
    wait_until_gone(*workers)


@pytest.mark.slow
def test_a_second_interrupt_stops_all_at_once_and_reports_what_is_lost(tmp_path):
    line = f"train {LINE} --epoch 5000 --checkpoint-save-freq 5000 --run-dir r"
    process = begin(line, tmp_path, variables=standing(tmp_path, update=3))
    wait_for(lambda: 2 in updates(tmp_path / "r"), "update 2")
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert any("stopping after this update, then saving (Ctrl-C again" in line for line in process.stdout)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    assert (code, err) == (130, "")
    assert re.search(r"^stopped at once: \d updates? lost", out.splitlines()[-1])
    wait_until_gone(*workers)


def test_a_launcher_killed_with_9_leaves_no_orphans(tmp_path):
    process = begin(f"train {LINE} --epoch 5000 --run-dir r", tmp_path)
    wait_for(lambda: updates(tmp_path / "r"), "the first update")
    workers = children(process.pid)
    process.kill()
    wait_until_gone(*workers)
    finish(process)


ENDS = {
    "killed": (
        {0: -15, 1: -9},
        " was killed by SIGKILL on {here} (by the system, if it ran out of memory: see `dmesg`)",
    ),
    "failed": ({0: -15, 1: 1}, " exited with code 1 on {here}"),
}


@pytest.mark.parametrize(("failures", "words"), ENDS.values(), ids=ENDS.keys())
def test_giving_up_names_the_process_its_host_and_where_to_look(monkeypatch, failures, words):
    monkeypatch.setattr(launch, "_run", lambda workers, attempt: failures)
    workers = launch.Workers(argv=[], processes=2, restarts=1)
    said = []
    with pytest.raises(WorldError) as caught:
        launch.launch(workers, progress=lambda: None, say=said.append)
    found = words.format(here=socket.gethostname())
    assert str(caught.value) == f"rank 1{found}; gave up after 2 attempts (restarts allowed: 1)"
    assert len(said) == 1


def test_an_error_of_the_workers_is_reported_once_without_restarting(tmp_path):
    (tmp_path / "r/checkpoints/one").mkdir(parents=True)
    (tmp_path / "r/checkpoints/one/model.safetensors").touch()
    (tmp_path / "r/config.yaml").touch()
    code, out, err = finish(begin(f"train {LINE} --run-dir r", tmp_path))
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("falconet train: --run-dir: r already holds a run")
    assert "starting" not in out


def test_torchrun_gives_the_same_bits(straight, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "falconet")
    line = LINE.replace("--replicas 2 ", "")  # as many as torchrun started
    code, out, err = finish(begin(f"train {line} --epoch {EPOCHS} --run-dir r", tmp_path, launcher=torchrun))
    assert code == 0, err
    assert len(re.findall(rf"^ +\d+/{EPOCHS} ", out, re.M)) == EPOCHS
    assert_bitwise(straight[0] / "r", tmp_path / "r")


@pytest.mark.slow
def test_tf_config_gives_the_same_bits(straight, tmp_path):
    cluster = {"worker": [f"127.0.0.1:{gloo.free_port()}", "127.0.0.1:1"]}
    line = LINE.replace("--replicas 2 ", "")
    workers = []
    for index in range(2):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        workers.append(begin(f"train {line} --epoch {EPOCHS} --run-dir r", tmp_path, variables={"TF_CONFIG": config}))
    answers = [finish(worker) for worker in workers]
    assert [code for code, _, _ in answers] == [0, 0], answers
    assert re.fullmatch(r"worker 1 of 2 on .*: 1 process here; worker 0 prints .*\n", answers[1][1])
    assert answers[1][2] == ""
    assert_bitwise(straight[0] / "r", tmp_path / "r")


@pytest.mark.slow
def test_torchrun_restarts_killed_workers_and_gives_the_same_bits(straight, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = (*torchrun, "--max-restarts=2", "-m", "falconet")
    process = begin(f"train {LINE} --epoch {EPOCHS} --run-dir r", tmp_path, launcher=launcher, variables=variables)
    for target, killed in ((5, 0), (15, 1)):
        wait_for(lambda at=target: max(updates(tmp_path / "r"), default=0) >= at, f"update {target}")
        workers = children(process.pid)
        os.kill(workers[killed], signal.SIGKILL)
        wait_for(lambda old=workers: not set(children(process.pid)) & set(old), "restart")
    code, _, err = finish(process)
    assert code == 0, err
    assert_bitwise(straight[0] / "r", tmp_path / "r")


@pytest.fixture
def first():
    return Place(launcher="TF_CONFIG", rank=0, size=2, local_rank=0, local_size=1, port=gloo.free_port())


def meet(place, timeout=60):
    return launch.meet(place, devices=1, timeout=timeout)


def join(place, timeout=60):
    return collectives.join(place, torch.device("cpu"), timeout=timeout)


@pytest.mark.parametrize("wait", [meet, join])
def test_workers_that_do_not_come_are_reported_in_one_line(first, wait):
    where = f"127.0.0.1:{first.port}"
    with pytest.raises(WorldError) as raised:
        wait(replace(first, rank=1), timeout=1)
    assert (
        str(raised.value) == f"worker 1: timed out after 1 s waiting for worker 0 of 2 at {where} (Connection refused)"
    )
    with pytest.raises(WorldError) as raised:
        wait(first, timeout=1)
    assert str(raised.value) == f"worker 0: timed out after 1 s waiting for worker 1 of 2 at {where}"


def test_a_port_in_use_is_reported_in_one_line(first):
    with socket.create_server(("127.0.0.1", first.port)), pytest.raises(ConfigError) as raised:
        meet(first)
    assert str(raised.value) == f"TF_CONFIG: 127.0.0.1:{first.port} is in use; choose a free port"


@pytest.mark.parametrize("wait", [meet, join])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_for_another_worker_is_reported_and_ends_with_ctrl_c(first, monkeypatch, wait, rank):
    monkeypatch.setattr(meeting, "QUIET", 0.2)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)

    def press_ctrl_c():
        wait_for(said.getvalue, "the report")
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press_ctrl_c)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        wait(replace(first, rank=rank))
    pressing.join()
    refused = " (Connection refused)" if rank else ""
    assert said.getvalue() == (
        f"waiting for worker {1 - rank} of 2 at 127.0.0.1:{first.port}{refused}; to run on this host alone, unset"
        " TF_CONFIG\n"
    )


def test_hosts_agree_on_the_smallest_number_of_devices(first):
    with ThreadPoolExecutor() as pool:
        other = pool.submit(launch.meet, replace(first, rank=1), devices=2, timeout=60)
        assert launch.meet(first, devices=3, timeout=60).fewest == other.result().fewest == 2


def test_workers_of_which_only_one_starts_processes_are_refused(first):
    """mpirun with two processes on the first host and one on the second, or a worker with other options."""
    with ThreadPoolExecutor() as pool:
        other = pool.submit(meet, replace(first, rank=1))
        for wait in (lambda: join(first), other.result):
            with pytest.raises(ConfigError) as raised:
                wait()
            assert str(raised.value) == (
                "TF_CONFIG: worker 1 starts the processes of its host, and worker 0 does not; expected the same"
                " options, and the same number of workers, on every host"
            )


@pytest.mark.slow
@pytest.mark.parametrize("command", [f"train {TINY} --replicas 4 --run-dir r", "data bench --data digits --device cpu"])
def test_a_command_that_waits_for_another_worker_exits_130_after_ctrl_c(tmp_path, command):
    cluster = {"worker": [f"127.0.0.1:{gloo.free_port()}", "127.0.0.2:1"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    process = begin(command, tmp_path, variables={"TF_CONFIG": config})
    assert process.stderr.readline().startswith("waiting for worker 1 of 2 at 127.0.0.1:")
    for _ in range(2):  # as `timeout -s INT` sends them
        process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "")
    assert not (tmp_path / "r").exists()
