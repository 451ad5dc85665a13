"""The files in deploy/: well formed, and with options that exist."""

import re
import subprocess
from pathlib import Path

import yaml

from falconet.config.load import parse
from falconet.config.options import options_of
from falconet.config.schema import TrainOptions
from falconet.config.settings import from_line

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_the_slurm_script_is_shell_and_asks_for_as_many_tasks_as_gpus():
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm.sbatch")], check=True)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", (DEPLOY / "slurm.sbatch").read_text(), re.M))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


def test_the_kubernetes_job_starts_falconet_with_options_that_exist_and_safe_restarts():
    job = yaml.safe_load((DEPLOY / "pytorchjob.yaml").read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun", "-m", "falconet", "train"]
    options = parse(TrainOptions, from_line(container["args"], options_of(TrainOptions))).options
    assert options.run.run_dir != "auto", "restarts look for their checkpoints there"
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
