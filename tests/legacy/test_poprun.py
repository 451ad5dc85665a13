"""`poprun` as a person runs it: real processes under torch's agent."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from falconet.legacy import poprun
from tiny import TINY

pytestmark = pytest.mark.dist

FALCONET = [sys.executable, "-m", "falconet"]
TELL = "import os, sys; print(*(os.environ[name] for name in sys.argv[1:]))"
LIMIT = 300  # seconds; 10 on a quiet machine


def begin(flags, program, cwd, **variables):
    line = [sys.executable, "-m", "falconet.legacy.poprun", *flags.split(), *program]
    return subprocess.Popen(
        line, cwd=cwd, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(flags, program, cwd, **variables):
    process = begin(flags, program, cwd, **variables)
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def mentions(text):
    """Processes whose command line holds a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [line] if text in line else []
    return found


def test_each_process_knows_its_rank_and_what_was_asked_for(tmp_path):
    program = [sys.executable, "-c", TELL, "RANK", "WORLD_SIZE", "FALCONET_REPLICAS", "FALCONET_STAGES", "X", "PWD"]
    flags = "--num-replicas 2 --num-instances 2 --mpi-global-args --tag-output"
    code, out, err = run(flags, program, tmp_path, X="y", PWD=str(tmp_path))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[1,0]:0 2 2 1 y {tmp_path}", f"[1,1]:1 2 2 1 y {tmp_path}"]


def test_falconet_trains_under_poprun_and_notes_what_has_no_effect(tmp_path):
    flags = "--numa-aware 1 --num-replicas 2 --ipus-per-replica 1 --vipu-partition=p"
    line = [*FALCONET, "train", *TINY.replace("--micro-batch-size 8", "--micro-batch-size 4").split(), "--run-dir", "r"]
    code, out, err = run(flags, line, tmp_path)
    assert code == 0, err
    assert "global batch 8 = micro-batch 4 x accumulation 1 x replicas 2" in out
    assert err.splitlines()[0] == "poprun: --vipu-partition: no effect, there is no IPU here"
    updates = [json.loads(words)["update"] for words in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert max(updates) == 8


def test_the_host_benchmark_measures_every_rank(tmp_path):
    line = "--data generated --micro-batch-size 16 --iterations 2 --dataloader-worker 1"
    ours = "--image-size 8 --seconds 0.01 --iterations 4 --output r.json"
    script = Path(__file__).parents[2] / "compat/pytorch/datasets/host_benchmark.py"
    program = [sys.executable, str(script), *line.split(), "--", *ours.split()]
    code, out, err = run("--num-replicas 2 --num-instances 2", program, tmp_path)
    assert (code, err) == (0, "")
    assert out.count("Throughput of the iteration:") == 2, "a line for each pass, from the first process"
    assert "1 loader threads in each of 2 processes" in out
    assert json.loads((tmp_path / "r.json").read_text())["processes"] == 2


MISTAKES = {
    "of stages": pytest.param(
        "--num-replicas 1 --ipus-per-replica 2",
        [*FALCONET, "train", *TINY.split()],
        "falconet train: the launcher was asked for 2 processes per replica, but the model is in 1 stage; expected 1,"
        " or 1 --pipeline-splits\n",
        marks=pytest.mark.slow,
    ),
    "of the program": (
        "--num-replicas 2",
        ["no-such-program"],
        "poprun: no-such-program: not found; expected a program on the PATH\n",
    ),
    "of a flag": ("--num-replica 2", ["x"], "poprun: --num-replica: poprun has no such flag; did you mean '--num-re"),
}


@pytest.mark.parametrize(("flags", "program", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, flags, program, message):
    code, out, err = run(flags, program, tmp_path)
    assert code == 2, out
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_stages_that_the_program_does_not_have_are_refused(tmp_path):
    code, _, err = run("--ipus-per-replica 4096", [*FALCONET, "train", *TINY.split()], tmp_path)
    assert code == 2
    note, mistake = err.splitlines()
    assert note.endswith(": 1 is started")
    assert mistake.startswith("falconet train: the launcher was asked for 4096 processes per replica, but the model is")


def test_an_unreachable_host_is_named(tmp_path):
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\n[ "$1" = there ] && exit 0\necho "no route to $1" >&2; exit 255\n')
    shell.chmod(0o755)
    flags = f"--num-replicas 2 --host there,elsewhere --mpi-global-args=--mca\tplm_rsh_agent\t{shell}"
    line = [sys.executable, "-m", "falconet.legacy.poprun", *(word.replace("\t", " ") for word in flags.split(" "))]
    found = subprocess.run([*line, "true"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert found.returncode == 2
    assert found.stderr == f"poprun: --host: cannot reach elsewhere by {shell}: no route to elsewhere\n"


def test_a_missing_remote_shell_is_named(capfd):
    flags = ["--num-replicas", "2", "--host", "there,elsewhere", "--mpi-global-args=--mca plm_rsh_agent no-such-shell"]
    assert poprun.main([*flags, "true"]) == 2
    assert capfd.readouterr().err == "poprun: --host: cannot reach there: no-such-shell is not installed here\n"


def test_another_exit_code_is_reported_with_its_rank(tmp_path):
    program = [sys.executable, "-c", "import os, sys; sys.exit(3 * int(os.environ['RANK']))"]
    code, _, err = run("--num-replicas 2", program, tmp_path)
    assert code == 1
    assert err.endswith(": rank 1 exited with code 3\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_processes_end_with_poprun(tmp_path, how):
    program = [sys.executable, "-c", f"import time; time.sleep(600) # {tmp_path}"]
    process = begin("--num-replicas 2", program, tmp_path)
    deadline = time.monotonic() + LIMIT
    while len(mentions(f"# {tmp_path}")) < 4:  # poprun, the agent and two workers
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(how)
    process.communicate(timeout=LIMIT)
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    while mentions(f"# {tmp_path}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


CPU = {
    "--device cpu": ["--num-replicas", "2", "falconet", "train", "--device", "cpu"],
    "--device=cpu": ["--num-replicas", "2", "falconet", "train", "--device=cpu"],
    "no device to be seen": ["--num-replicas", "2", "--mpi-local-args=-x CUDA_VISIBLE_DEVICES=", "falconet", "train"],
}


@pytest.mark.parametrize("line", CPU.values(), ids=CPU.keys())
def test_a_program_for_the_cpu_is_not_limited_by_cuda_devices(capfd, monkeypatch, line):
    monkeypatch.setattr(poprun.hosts, "devices", lambda: (1, "1 CUDA device is available"))
    assert poprun.main(["--dry-run", *line]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "--nproc-per-node=2" in out


def test_a_program_for_devices_is_limited_by_their_number(capfd, monkeypatch):
    monkeypatch.setattr(poprun.hosts, "devices", lambda: (1, "1 CUDA device is available"))
    assert poprun.main(["--dry-run", "--num-replicas", "2", "falconet", "train", "--device", "cuda"]) == 0
    out, err = capfd.readouterr()
    assert err == "poprun: 2 processes requested, 1 CUDA device is available: 1 is started\n"
    assert "--nproc-per-node=1" in out


def test_two_names_of_this_host_are_a_mistake(capfd, monkeypatch):
    monkeypatch.setattr(poprun.hosts, "devices", lambda: (1, "1 CUDA device is available"))
    assert poprun.main(["--num-replicas", "2", "--host", f"{socket.gethostname()},localhost", "true"]) == 2
    assert capfd.readouterr().err.endswith(" and localhost are both this host; expected each host once\n")


def test_a_dry_run_prints_the_lines(capfd, monkeypatch):
    monkeypatch.setenv("KEPT", "a b")
    flags = ["--dry-run", "--host", "a,b", "--num-replicas", "8", "--mpi-local-args=-x KEPT -x GONE -x SET=1"]
    assert poprun.main([*flags, "python3", "train.py"]) == 0
    out, err = capfd.readouterr()
    assert err == "poprun: -x GONE: not set here\n"
    first, second = out.splitlines()
    assert first.startswith("ssh a 'cd ")
    assert "--nnodes=2 --node-rank=0 --master-addr=a --master-port=29500" in first
    assert "--nnodes=2 --node-rank=1 --master-addr=a" in second
    for line in (first, second):
        assert "'KEPT=a b'" in line.replace("'\"'\"'", "'")
        assert " SET=1 " in line
        assert line.endswith("--nproc-per-node=4 --no-python -- python3 train.py'")


def test_fewer_devices_start_fewer_processes(capfd, monkeypatch):
    monkeypatch.setattr(poprun.hosts, "devices", lambda: (3, "3 CUDA devices are available"))
    assert poprun.main(["--dry-run", "--num-replicas", "16", "python3", "train.py"]) == 0
    out, err = capfd.readouterr()
    assert err == "poprun: 16 processes requested, 3 CUDA devices are available: 2 are started\n"
    assert "FALCONET_REPLICAS=16" in out
    assert "--nproc-per-node=2" in out


def test_the_flags_are_explained(capfd):
    assert poprun.main(["--help"]) == 0
    assert "--ipus-per-replica" in capfd.readouterr().out


def test_an_invalid_port_is_refused(capfd, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "99999")
    assert poprun.main(["--dry-run", "true"]) == 2
    assert capfd.readouterr().err == "poprun: MASTER_PORT: got '99999', expected 1 to 65535\n"


def test_a_line_without_its_script_runs_in_the_folder_of_train_py():
    """As printed in the TensorFlow program's README, for two replicas on this host."""
    folder = Path(__file__).parents[2] / "compat/tensorflow"
    line = [
        sys.executable,
        "--config",
        "mk2_resnet50_bn_128ipus",
        "--no-validation",
        "--data-dir",
        "d",
        "--show-translation",
    ]
    code, out, err = run("--ipus-per-replica 1 --num-replicas=2 --num-instances=2", line, folder)
    assert code == 0, err
    assert f"poprun: {sys.executable} --config: names no script; running {sys.executable} train.py" in err
    assert "falconet train " in out


def test_an_empty_port_is_the_default(capfd, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "")
    assert poprun.main(["--dry-run", "--num-replicas", "2", "--host", "a,b", "true"]) == 0
    assert "--master-port=29500" in capfd.readouterr().out


def test_ctrl_c_during_startup_prints_nothing(tmp_path):
    (tmp_path / "rich.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    assert run("--num-replicas 2", ["true"], tmp_path, PYTHONPATH=path) == (130, "", "")
