"""Two hosts (network namespaces) with two processes each; one is disconnected and comes back."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import assert_bitwise, updates, wait_for
from tiny import TINY

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.getuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
        reason="network namespaces need root, ip and unshare",
    ),
]
LINE = f"{TINY} --micro-batch-size 4 --logs-per-epoch 4 --checkpoint-save-freq 0.5 --collective-timeout 25 --resume"
# Runs its second argument on a "host": a network namespace with its hostname.
SHELL = """#!/bin/sh
case "$1" in
{network}.1) host=left;;
{network}.2) host=right;;
*) echo "no route to $1" >&2; exit 255;;
esac
exec ip netns exec "{prefix}-$host" unshare --uts sh -c "hostname $host; $2"
"""
LIMIT = 240


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class Hosts:
    """Two namespaces; `shell` is what poprun takes for ssh."""

    def __init__(self, home: Path) -> None:
        self.prefix, self.network, self.shell = f"fn{os.getpid()}", "10.203.77", home / "shell"
        self.shell.write_text(SHELL.format(network=self.network, prefix=self.prefix))
        self.shell.chmod(0o755)
        left, right = f"{self.prefix}-left", f"{self.prefix}-right"
        ip("netns", "add", left)
        ip("netns", "add", right)
        ip("link", "add", "cable", "netns", left, "type", "veth", "peer", "name", "cable", "netns", right)
        for number, name in enumerate((left, right), 1):
            ip("-n", name, "address", "add", f"{self.network}.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")

    def cable(self, state: str) -> None:
        ip("-n", f"{self.prefix}-right", "link", "set", "cable", state)

    def close(self) -> None:
        for name in ("left", "right"):
            ip("netns", "delete", f"{self.prefix}-{name}")

    def begin(self, program, cwd, *, hosts="{0}.1,{0}.2", more=(), **variables):
        mpi = f"--mca plm_rsh_agent {self.shell} --mca btl_tcp_if_include {self.network}.0/24 -x PYTHONPATH"
        flags = ["--num-replicas", "4", "--host", hosts.format(self.network), f"--mpi-global-args={mpi}", *more]
        return subprocess.Popen(
            [sys.executable, "-m", "falconet.legacy.poprun", *flags, sys.executable, *program],
            cwd=cwd,
            env={"PYTHONPATH": ""} | os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def worker(self, number, program, cwd, *, cores=2, by_mpirun=False, has_cluster=True):
        """A program on one host, as a person or mpirun starts it there, for TF_CONFIG or only with MASTER_ADDR."""
        addresses = [f"{self.network}.{host}:29801" for host in (1, 2)]
        task = {"type": "worker"} | ({} if by_mpirun else {"index": number})
        config = {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}
        config = config if has_cluster else {"MASTER_ADDR": f"{self.network}.1"}
        ranks = {"RANK": number, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1} if by_mpirun else {}
        config |= {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in ranks.items()}
        name = ("left", "right")[number]
        inside = ["taskset", "-c", f"0-{cores - 1}", sys.executable, *program]
        shell = f"hostname {name}; exec {shlex.join(inside)}"
        return subprocess.Popen(
            ["ip", "netns", "exec", f"{self.prefix}-{name}", "unshare", "--uts", "sh", "-c", shell],
            cwd=cwd,
            env={"PYTHONPATH": ""} | os.environ | config | {"GLOO_SOCKET_IFNAME": "cable"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> list[str]:
        names = [f"{self.prefix}-{name}" for name in ("left", "right")]
        found = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True) for name in names]
        return " ".join(each.stdout for each in found).split()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(hosts, tmp_path_factory):
    home = tmp_path_factory.mktemp("undisturbed")
    process = hosts.begin(["-m", "falconet", "train", *LINE.split(), "--epoch", "12", "--run-dir", "r"], home)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, ""), out
    assert "x replicas 4" in out
    return home / "r"


def gone(hosts):
    wait_for(lambda: not hosts.processes(), "the end of all processes")


def test_an_unreachable_host_is_named_and_the_run_resumes_when_it_is_back(hosts, undisturbed, tmp_path):
    line = ["-m", "falconet", "train", *LINE.split(), "--epoch", "12", "--run-dir", "r"]
    process = hosts.begin(line, tmp_path)
    wait_for(lambda: max(updates(tmp_path / "r"), default=0) >= 20, "update 20")
    hosts.cable("down")
    cut = time.monotonic()
    try:
        _, err = process.communicate(timeout=LIMIT)
    finally:
        hosts.cable("up")
    assert process.returncode == 1
    assert time.monotonic() - cut < 25 + 30 + 60, "the time-out, and torch's 30 s for those that do not end"
    silent = r"rank 2 on right gives no sign of life, last seen \d+ s ago in .*; rank 3 on right gives no sign"
    assert re.search(rf"rank [01]: timed out after 25 s in update \d+, [a-z ']+: {silent}", err), err
    gone(hosts)
    process = hosts.begin(line, tmp_path)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, ""), out
    assert "restored r/checkpoints/" in out
    assert_bitwise(undisturbed, tmp_path / "r")


PRETEND = """
import os, sys
import falconet
from falconet.cli import main
if os.environ["RANK"] == "3":
    falconet.__version__ = "0.0.1"
sys.exit(main(sys.argv[1:]))
"""


def test_mixed_versions_are_refused_and_all_processes_end(hosts, tmp_path):
    (tmp_path / "program.py").write_text(PRETEND)
    process = hosts.begin(["program.py", "train", *LINE.split(), "--run-dir", "r"], tmp_path)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert re.fullmatch(
        r"falconet train: the version of falconet and torch: is '0\.0\.1 and .*' in process 3 and '.*' in process 0;"
        r" expected the same in both\n",
        err,
    )
    gone(hosts)
    assert not (tmp_path / "r").exists()


def test_a_port_in_use_is_refused_in_one_line(hosts, tmp_path):
    listen = "import socket, time; s = socket.socket(); s.bind(('', 29777)); s.listen(); print(flush=True); input()"
    taken = subprocess.Popen(
        ["ip", "netns", "exec", f"{hosts.prefix}-left", sys.executable, "-c", listen],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    taken.stdout.readline()
    process = hosts.begin(["-m", "falconet", "train", *LINE.split(), "--run-dir", "r"], tmp_path, MASTER_PORT="29777")
    _, err = process.communicate(timeout=LIMIT)
    taken.communicate("\n", timeout=LIMIT)
    assert process.returncode == 2
    assert err == f"poprun: MASTER_PORT: 29777 is in use on {hosts.network}.1; choose a free port\n"
    gone(hosts)


def test_a_missing_host_is_refused_in_one_line_and_nothing_is_started(hosts, tmp_path):
    process = hosts.begin(["-m", "falconet", "train", *LINE.split()], tmp_path, hosts="{0}.1,{0}.9")
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert err == f"poprun: --host: cannot reach {hosts.network}.9 by {hosts.shell}: no route to {hosts.network}.9\n"
    gone(hosts)


def test_replicas_that_do_not_divide_are_refused_in_one_line(hosts, tmp_path):
    program = ["-m", "falconet", "train", *LINE.split(), "--run-dir", "r", "--replicas", "6"]
    process = hosts.begin(program, tmp_path)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert err.count("\n") == 1
    assert "--replicas: 6 replicas with accumulation 1 requested, but torchrun started 4 processes" in err
    assert not (tmp_path / "r").exists()
    gone(hosts)


STAGED = f"{TINY} --micro-batch-size 2 --epoch 1 --logs-per-epoch 4 --pipeline-splits layer2/0"


def ends(workers):
    return [(*process.communicate(timeout=LIMIT), process.returncode) for process in workers]


@pytest.mark.parametrize("launcher", [{}, {"by_mpirun": True, "has_cluster": False}], ids=["TF_CONFIG", "mpirun"])
def test_each_worker_starts_the_processes_that_it_has_devices_for(hosts, tmp_path, launcher):
    """Of 2 x 2 replicas of 2 stages, one core of the second host is enough for one: so on the first host, too."""
    line = ["-m", "falconet", "train", *STAGED.split(), "--replicas", "4", "--run-dir", "r"]
    workers = [hosts.worker(number, line, tmp_path, cores=cores, **launcher) for number, cores in ((0, 2), (1, 1))]
    (out, err, code), (other, wrong, also) = ends(workers)
    assert (code, err, also, wrong) == (0, "", 0, ""), out
    assert "global batch 8 = micro-batch 2 x accumulation 2 x replicas 2" in out
    assert "pipeline of 2 stages" in out
    why = "2 replicas of 2 stages requested, devices for 2 processes on the host with the fewest: 1 runs, with 2 times"
    assert out.startswith(f"note: on each of 2 hosts: {why} the accumulation; same global batch and learning rate\n")
    assert out.count("note: ") == 1
    assert other == "worker 1 of 2 on right: 2 processes here; worker 0 prints what is trained, and saves\n"
    line = ["-m", "falconet", "train", *STAGED.split(), "--replicas", "2", "--gradient-accumulation", "2"]
    one = subprocess.run([sys.executable, *line, "--run-dir", "one"], cwd=tmp_path, capture_output=True, timeout=LIMIT)
    assert one.returncode == 0
    assert_bitwise(tmp_path / "one", tmp_path / "r")
    gone(hosts)


ORIGINAL = (
    "--dataset cifar-10 --generated-data --model-size 8 --batch-size 2 --iterations 4 --logs-per-epoch 1"
    " --batches-per-step 1 --shards 2 --pipeline --pipeline-splits b2/0/relu --gradient-accumulation-count 2"
    " --replicas 2 --distributed --no-stochastic-rounding --no-validation --log-all-instances yes --precision 32.32"
)


def test_the_original_program_under_mpirun_trains_in_stages_on_each_worker_and_both_print(hosts, tmp_path):
    script = Path(__file__).parents[2] / "compat/tensorflow/train.py"
    line = [str(script), *ORIGINAL.split(), "--log-dir", str(tmp_path), "--", "--device", "cpu", "--threads", "1"]
    workers = [hosts.worker(number, line, tmp_path, cores=1, by_mpirun=True) for number in (0, 1)]
    (out, _, code), (other, wrong, also) = ends(workers)
    assert (code, also) == (0, 0), wrong
    assert "global batch 16 = micro-batch 2 x accumulation 4 x replicas 2" in out  # of 4, each host has cores for one
    rows = [re.findall(r"^step:.*accuracy:", text, re.M) for text in (out, other)]
    assert rows[0]
    assert rows[0] == rows[1]
    gone(hosts)


def test_poprun_starts_on_every_host_what_the_smallest_has_devices_for(hosts, tmp_path):
    """The namespaces have this machine's two cores, for 4 processes each."""
    line = ["-m", "falconet", "train", *STAGED.split(), "--pipeline-splits", "layer1/0", "layer2/0", "layer3/0"]
    process = hosts.begin([*line, "--run-dir", "r"], tmp_path, more=["--num-replicas", "8", "--ipus-per-replica", "4"])
    out, err = process.communicate(timeout=LIMIT)
    first = f"{hosts.network}.1"
    assert (process.returncode, err) == (
        0,
        f"poprun: 32 processes requested, {first} has devices for 4 on each host: 8 are started\n",
    )
    assert "global batch 16 = micro-batch 2 x accumulation 4 x replicas 2" in out
    gone(hosts)
