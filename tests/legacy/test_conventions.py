"""The originals' conventions: folder names, lines about predictions, and whole runs."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import falconet as package
from falconet.checkpoint.manifest import _digest
from falconet.config.commands import TrainOptions
from falconet.config.load import load_options, read_line
from falconet.legacy.conventions import (
    CONVENTIONS,
    own_words,
    pytorch_batch,
    pytorch_name,
    pytorch_predictions,
    tensorflow_name,
    tensorflow_repetition,
)
from falconet.legacy.programs import canonical
from falconet.report.inference import Predictions, Repetition, TimedBatch
from runs import RN50, begin, finish
from tiny import TINY

SMALL = {"accumulation": 1, "replicas": 1, "norm": "batch"}
NAMES = {
    "RN50_bs8x16rx8a_GN32_16.16": {},
    "RN50_bs8x16rx8p_GN32_16.16_noSR": {"pipelined": True, "rounds_stochastically": False},
    "RN20_bs32_BN_16.16": {"model": "resnet20-cifar", "data": "cifar10", "micro_batch": 32, "image_size": 32, **SMALL},
    "RN20_bs32_BN_32.32": {
        **{"model": "resnet20-cifar", "data": "generated", "micro_batch": 32, "image_size": 32, "precision": "32.32"},
        **SMALL,
    },
    "RNX101_bs6_noBN_32.32": {"model": "resnext101", "micro_batch": 6, "precision": "32.32", **SMALL, "norm": "none"},
    "EfficientNet-B1_bs8_BN_240x240": {"model": "efficientnet-b1", "image_size": 240, **SMALL},
    "EfficientNet-B4_bs5x40px4r_GN4_380x380": {  # accumulation first, and no precision
        **{"model": "efficientnet-b4", "image_size": 380, "micro_batch": 5, "accumulation": 40, "replicas": 4},
        **{"pipelined": True, "groups": 4, "precision": "16.32", "rounds_stochastically": False},
    },
    "EfficientNet-CIFAR_bs8_BN": {"model": "efficientnet-cifar", "data": "cifar10", "image_size": 32, **SMALL},
    "RN50_bs16x4rx256p_BN_16.32": {  # nothing is rounded, so the default has no mark
        **{"micro_batch": 16, "replicas": 4, "accumulation": 256, "pipelined": True, "norm": "batch"},
        **{"precision": "16.32", "rounds_stochastically": False},
    },
    "SN_bs8x2r_16.16": {"model": "squeezenet", "accumulation": 1, "replicas": 2, "norm": "none"},
    "mobilenet-v3-small_bs8_BN_16.16": {"model": "mobilenet-v3-small", **SMALL},
}


def test_the_names_of_the_tensorflow_program():
    assert {name: tensorflow_name(replace(RN50, **changes)) for name, changes in NAMES.items()} == {
        name: name for name in NAMES
    }


def test_the_name_of_the_pytorch_program():
    assert pytorch_name(RN50) == "resnet50_bs8_16.16fp_r16_di1"


VERSION = re.escape(package.__version__)
FOLDERS = {
    "pytorch": r"logs/timm-a-b_bs8_16\.16fp_r16_di1_[A-Z0-9]{3}",
    "tensorflow": rf"logs/timm-a-b_bs8x16rx8a_GN32_16\.16_v{VERSION}_[A-Z0-9]{{3}}",
    "popart": r"logs/\d{8}-\d{6}/timm:a b/net",
}
SUFFIXED = {
    "pytorch": r"logs/resnet50_bs8_16\.16fp_r16_di1_my_run_[A-Z0-9]{3}",
    "tensorflow": rf"logs/RN50_bs8x16rx8a_GN32_16\.16_my_run_v{VERSION}_[A-Z0-9]{{3}}",
    "popart": r"logs/\d{8}-\d{6}/50/my_run",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_new_folder_does_not_exist_yet(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape, new = replace(RN50, model="timm:a b"), CONVENTIONS[name].run_folder
    folder = new(shape)
    assert re.fullmatch(FOLDERS[name], str(folder))
    folder.mkdir(parents=True)
    assert not new(shape).exists()
    assert re.fullmatch(SUFFIXED[name], str(new(replace(RN50, suffix="my_run"))))


def test_the_variable_names_the_folder_of_all_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FALCONET_RUNS", str(tmp_path))
    assert CONVENTIONS["tensorflow"].run_folder(RN50).parent == tmp_path


FOUND = Predictions(
    model="resnet50",
    micro_batch=4,
    data="generated",
    dtype="torch.float16",
    devices=2,
    rates=[100.0, 300.0],
    latencies=[1.0, 2.0, 6.0],
)


def test_the_line_of_a_batch_names_the_instance_when_there_are_several():
    alone = pytorch_batch(TimedBatch(100.0, 40.0, instance=0, instances=1))
    assert alone == "[INFO]  Throughput: 100.00 imgs/sec; Latency range: 40.000..40.000 ms"
    assert pytorch_batch(TimedBatch(100.0, 40.0, 1, 4)) == alone.replace("  ", " [instance2/4] ", 1)


def test_the_pytorch_summary_equals_one_worked_out_by_hand():
    assert pytorch_predictions(FOUND) == [
        f"[INFO] {'-' * 91}",
        "[INFO] resnet50 results:",
        "[INFO] \n\tmicro_batch_size: 4",
        "[INFO] \n\tdata_mode: generated",
        "[INFO] \n\tdata_type: torch.float16",
        "[INFO] \n\tnum_ipus: 2",
        "[INFO] \n\tthroughput: 200.00 samples/sec (mean) (min: 100.00, max: 300.00, std: 100.00)",
        "[INFO] \n\tlatency avg: 3.000 ms (mean) (min: 1.000, max: 6.000)",
    ]


def test_photos_of_a_folder_are_real_data_in_the_pytorch_programs_words():
    assert "[INFO] \n\tdata_mode: real" in pytorch_predictions(replace(FOUND, data="folder"))


def test_the_tensorflow_lines_have_percentiles_and_the_rate_of_all_images():
    latencies = [float(number) for number in range(1, 501)]
    found = Repetition(model="resnet50", number=1, of=1, images=16, seconds=0.125, latencies=latencies, accuracy=6.25)
    high, higher = np.percentile(latencies, [99, 99.9])
    assert tensorflow_repetition(found) == [
        f"Latencies - avg: 250.5000, 99th percentile: {high:8.4f}, 99.9th percentile: {higher:8.4f}, max: 500.0000",
        "Validation top-1 accuracy [resnet50] (iteration:      0, epoch:   0.00, img/sec: 128.00, time: 0.125000,"
        " latency (ms): 250.5000):  6.250%",
    ]
    assert "99th percentile:   7.0000" in tensorflow_repetition(replace(found, latencies=[7.0]))[0]


WORDS = {
    ("tf1", "a smaller --lr or a longer --warmup-epoch usually helps"): "a smaller --base-learning-rate or a longer"
    " --warmup-epochs usually helps",
    ("tf1", "expected a smaller --micro-batch-size, --gradient-accumulation or --replicas"): "expected a smaller"
    " --batch-size, --gradient-accumulation-count or --replicas",
    (
        "tf1",
        "`falconet train --epoch 3` trains; --epochs is ours",
    ): "`falconet train --epoch 3` trains; --epochs is ours",
    ("tf1", "to continue: falconet restore r --run-dir s"): "to continue: falconet restore r --run-dir s",
    ("tf1", "--lr: got 3, expected at most --epoch"): "--base-learning-rate: here --lr: got 3, expected at most"
    " --epochs",
    ("tf1", "--micro-batch-size: is more than all"): "--batch-size: is more than all",
    ("tf1", "--pipeline-schedule interleaved --micro-batch-size 32 fits"): "--pipeline-schedule Interleaved"
    " --batch-size 32 fits",
    ("tf1", "--enable-stochastic-rounding on the host"): "--enable-stochastic-rounding on the host",
    ("popart", "expected --norm-type group"): "expected --norm-type GROUP",
    ("tf1", "my--epoch/--epoch-1"): "my--epoch/--epoch-1",
    ("popart", "more --gradient-accumulation, fewer --replicas"): "more --gradient-accumulation-factor, fewer"
    " --replication-factor",
    ("pytorch", "a larger --epoch, a smaller --lr"): "a larger --epoch, a smaller --lr",
}


@pytest.mark.parametrize(("dialect", "text"), WORDS)
def test_advice_names_the_options_of_the_program_that_was_typed(dialect, text):
    assert own_words(text, dialect=dialect) == WORDS[dialect, text]


def test_an_error_names_the_options_of_the_program_that_was_typed(falconet):
    answer = falconet(f"train {TINY} --lr 1e30", "tensorflow")
    assert answer.code == 2
    assert answer.err.endswith("; a smaller --base-learning-rate or a longer --warmup-epochs usually helps\n")


FILES = {
    "pytorch": {"app.json", "log.txt", "training.csv", "validation.csv"},
    "tensorflow": {"arguments.json", "log.txt", "training.csv", "validation.csv"},
    "popart": {"log.txt", "log_str.txt"},
}
PLACES = {
    "pytorch": r"logs/resnet8-cifar_bs8_32\.32fp_r1_di1_\w{3}",
    "tensorflow": r"logs/RN8_bs8_BN_32\.32_16x16_v[\d.]+_\w{3}",
    "popart": r"logs/[\d-]+/8/net",
}
PATTERNS = {
    "pytorch": (r"^\[INFO\] throughput: *(.*?) samples\/sec$", r"^\[INFO\] Accuracy on test set: .*%$"),
    "tensorflow": (r"^step: .* img/sec: ", r"^Validation top-1 accuracy \[ckpt-4\] \(iteration:      4, "),
    "popart": (r"^step: .* ipu_execution_time: ", r"^Validation accuracy epoch   2\.00, "),
}


@pytest.mark.parametrize("name", FILES)
def test_a_run_leaves_the_lines_files_and_folder_of_the_original(falconet, name):
    answer = falconet(f"train {TINY}", name)
    assert answer.code == 0, answer.err
    (place,) = re.findall(r"^run folder +(\S+)$", answer.out, re.M)
    assert re.fullmatch(PLACES[name], place)
    assert FILES[name] <= {path.name for path in Path(place).iterdir()}
    for pattern in PATTERNS[name]:
        assert re.search(pattern, answer.out, re.M), pattern


def test_tensorflow_checkpoints_restore_and_validate_under_their_names(falconet):
    assert falconet(f"train {TINY} --run-dir r", "tensorflow").code == 0
    assert sorted(path.name for path in Path("r/checkpoints").iterdir()) == ["ckpt-4", "ckpt-8"]
    assert falconet("restore --checkpoint-input-path r --epoch 3", "tensorflow").code == 0
    assert (Path("r/checkpoints") / "ckpt-12").is_dir()
    answer = falconet("validate r --checkpoint all", "tensorflow")
    assert len(re.findall(r"^Validation top-1 accuracy \[ckpt-\d+\] ", answer.out, re.M)) == 3


def test_the_pytorch_program_logs_where_it_saves(falconet):
    answer = falconet(f"train {TINY} --checkpoint-output-path out", "pytorch")
    assert answer.code == 0, answer.err
    assert (Path("out") / "training.csv").exists()
    assert (Path("out") / "resnet8-cifar_generated_2").is_dir()
    assert falconet("validate --checkpoint-input-path out").code == 0


@pytest.mark.dist
@pytest.mark.slow
def test_workers_keep_the_conventions_of_the_program_that_starts_them(tmp_path):
    launcher = (sys.executable, "-m", "falconet.legacy.programs", "tensorflow")
    code, out, err = finish(begin(f"train {TINY} --epoch 1 --replicas 2 --run-dir r", tmp_path, launcher=launcher))
    assert code == 0, err
    assert re.search(PATTERNS["tensorflow"][0], out, re.M)
    assert [path.name for path in (tmp_path / "r/checkpoints").iterdir()] == ["ckpt-4"]


def test_conventions_that_do_not_exist_are_answered_in_one_line(capfd):
    assert canonical(["tensorflw", "train"]) == 2
    expected = "expected falconet, pytorch, tensorflow, popart; did you mean 'tensorflow'?"
    assert capfd.readouterr().err == f"falconet.legacy.programs: got 'tensorflw', {expected}\n"


def test_a_checkpoint_with_a_stored_log_style_restores(falconet):
    """Earlier versions had the option, and stored it with every run."""
    assert falconet(f"train {TINY} --epoch 1 --run-dir r").code == 0
    (manifest,) = Path("r/checkpoints").glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    content["config"]["log-style"] = {"value": "tensorflow", "source": "command line"}
    content["digest"] = _digest(content)
    manifest.write_text(json.dumps(content))
    with Path("r/config.yaml").open("a") as file:
        file.write("log-style: tensorflow  # command line\n")
    answer = falconet("restore --checkpoint-input-path r --epoch 2")
    assert answer.code == 0, answer.err
    assert "log-style" not in answer.out + answer.err


def test_a_config_file_with_a_stored_log_style_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text("epoch: 7\nlog-style: tensorflow  # command line\n")
    line = read_line(TrainOptions, ["--config", str(tmp_path / "config.yaml")])
    assert load_options(TrainOptions, line).options.training.epoch == 7
