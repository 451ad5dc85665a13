"""Every installed launcher gives the same bits as our own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gloo
from falconet.checkpoint import format

pytestmark = [pytest.mark.dist, pytest.mark.slow]
DIGITS = "train --epoch 1 --micro-batch-size 32 --threads 1 --dataloader-workers 1 --device cpu --run-dir"
FALCONET = [sys.executable, "-m", "falconet"]
LIMIT = 400  # seconds; 10 on a quiet machine


def says(*command):
    """What a program prints, or nothing if it is not here or does not work."""
    if not shutil.which(command[0]):
        return ""
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return found.stdout if found.returncode == 0 else ""


def mpirun(size):
    """The originals' line; one variable for all processes, without an index, names the first."""
    if "Open MPI" not in says("mpirun", "--version"):
        pytest.skip("mpirun of Open MPI is not installed")
    workers = [f"127.0.0.1:{gloo.free_port()}", *(f"127.0.0.1:{number}" for number in range(1, size))]
    config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker"}}, separators=(",", ":"))
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    line = f"mpirun --tag-output -H localhost:{size} -bind-to none -map-by slot --oversubscribe -x PATH -x".split()
    return [*line, f"TF_CONFIG={config}", *root]


def mpiexec(size):
    names = [name for name in ("mpiexec.hydra", "mpiexec") if "HYDRA" in says(name, "--version")]
    if not names:
        pytest.skip("mpiexec of MPICH is not installed")
    return [names[0], "-n", str(size), "-env", "MASTER_PORT", str(gloo.free_port())]


def srun(size):
    if not says("sinfo", "--noheader"):
        pytest.skip("there is no SLURM here: srun is not installed, or no controller answers")
    return ["srun", "--overcommit", "--kill-on-bad-exit=1", "-n", str(size)]


def poprun(size):
    return [sys.executable, "-m", "falconet.legacy.poprun", f"--num-replicas={size}"]


def torchrun(size):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "--no-python"]


def run(line, home):
    found = subprocess.run([*line], cwd=home, capture_output=True, text=True, timeout=LIMIT)
    assert found.returncode == 0, found.stderr
    return found.stdout


def weights(run_dir):
    folder = format.checkpoints_in(run_dir)[-1]
    manifest = format.verify(folder)
    assert manifest.progress.update > 5
    return manifest.runtime["processes"], format.read_tensors(folder, "model", verified=manifest)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Weights by number of processes, of our own launcher; made once each."""
    made: dict[int, object] = {}

    def of(size):
        if size not in made:
            home: Path = tmp_path_factory.mktemp(f"own-{size}")
            run([*FALCONET, *DIGITS.split(), "r", "--replicas", str(size)], home)
            made[size] = weights(home / "r")
        return made[size]

    return of


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("launcher", [mpirun, mpiexec, srun, poprun, torchrun])
def test_every_launcher_gives_the_same_bits(launcher, size, straight, tmp_path):
    begun = launcher(size)
    out = run([*begun, *FALCONET, *DIGITS.split(), "r"], tmp_path)
    assert out.count(" 1/1 ") == 1, "the first process alone prints"
    (processes, found), (_, expected) = weights(tmp_path / "r"), straight(size)
    assert processes == size
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
