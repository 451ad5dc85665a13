"""Every script prints its help, every named config is accepted, and the sample photos are read."""

import re
import shutil
from pathlib import Path

import pytest

from falconet.legacy.translate import read_configs

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("train", "inference", "datasets")
    for path in (ROOT / folder).glob("*.py")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_lists_its_options(run, script):
    assert run(script, "--help").out.startswith(f"usage: {Path(script).name} [options]")


# Those of the original's table of training examples.
CONFIGS = (
    *("resnet50", "resnet50-pod64", "efficientnet-b0-g16-gn-pod16", "efficientnet-b4-g16-gn-pod16"),
    *("mobilenet-v3-small-pod4", "mobilenet-v3-large-pod16"),
)


@pytest.mark.parametrize("config", CONFIGS)
def test_train_config_is_planned(run, config):
    """Where the original compiled it for a device that was not there."""
    answer = run("train/train.py", f"--config {config} --compile-only")
    assert "global batch " in answer.out


@pytest.mark.parametrize("config", sorted(set(read_configs(ROOT / "inference/configs.yml")) - {"common"}))
def test_inference_config_runs(run, config):
    line = f"--config {config} --data generated --random-weights --iterations 3 --device-iterations 1"
    line += " --micro-batch-size 2 --precision 32.32"
    answer = run("inference/run_benchmark.py", f"{line} -- --image-size 64 --threads 1")
    (rate,) = answer.numbers(r"throughput: ([\d.]+) samples/sec \(mean\)")
    assert rate > 0


def test_a_benchmark_reads_the_sample_photos(run, cifar):
    photos = cifar / "photos"
    shutil.copytree(ROOT / "data/samples", photos, ignore=shutil.ignore_patterns("*.csv", "*.md"))
    line = "--model resnet18 --random-weights --iterations 3 --micro-batch-size 2 --precision 32.32"
    answer = run("inference/run_benchmark.py", f"{line} -- --data-dir {photos} --image-size 64 --threads 1")
    assert "data_mode: real" in answer.out


INFERRED = {
    "full precision": "--model resnet18 --precision 32.32",
    "half precision": "--model resnet18",
    "a pipeline": "--model resnet18 --pipeline-splits layer3/0 --data synthetic",
    "group norm": "--model resnet18 --norm-type group",
    "no norm": "--model efficientnet-b0 --norm-type none",
    "mobilenet": "--model mobilenet",
}


@pytest.mark.parametrize("line", INFERRED.values(), ids=INFERRED)
def test_inference_has_a_positive_throughput(run, line):
    small = "--data generated --random-weights --iterations 3 --micro-batch-size 2"
    answer = run("inference/run_benchmark.py", f"{small} {line} -- --image-size 64 --threads 1")
    (best,) = answer.numbers(r"throughput: .* max: ([\d.]+),")
    assert best > 0


def test_the_server_gives_the_answers_of_the_model(run):
    line = "-s -k test_single_model[resnet50-resnet50-RequestType.SYNC-1] ../tests/tritonserver/"
    own = "--micro-batch-size 2 --iterations 4 --image-size 32 --precision 32.32 --device cpu --threads 1"
    answer = run("inference/run_benchmark_with_triton_server.py", f"{line} -- {own}")
    assert re.search(r"throughput: [\d.]+ samples/sec", answer.out)
    assert "served to 1 client, SYNC" in answer.out


def test_the_host_benchmark_reports_each_pass(run):
    line = "--data cifar10 --micro-batch-size 32 --iterations 2 --dataloader-worker 2 -- --seconds 0.1"
    assert run("datasets/host_benchmark.py", line).out.count("Throughput of the iteration:") == 2
