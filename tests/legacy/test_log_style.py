"""--log-style: a whole run in each of the originals' words."""

import re
from pathlib import Path

import pytest

from tiny import TINY

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


@pytest.mark.parametrize("style", FILES)
def test_a_run_leaves_the_lines_files_and_folder_of_the_original(falconet, style):
    answer = falconet(f"train {TINY} --log-style {style}")
    assert answer.code == 0, answer.err
    (place,) = re.findall(r"^run folder +(\S+)$", answer.out, re.M)
    assert re.fullmatch(PLACES[style], place)
    assert FILES[style] <= {path.name for path in Path(place).iterdir()}
    for pattern in PATTERNS[style]:
        assert re.search(pattern, answer.out, re.M), pattern


def test_tensorflow_checkpoints_restore_and_validate_under_their_names(falconet):
    assert falconet(f"train {TINY} --log-style tensorflow --run-dir r").code == 0
    assert sorted(path.name for path in Path("r/checkpoints").iterdir()) == ["ckpt-4", "ckpt-8"]
    assert falconet("restore --checkpoint-input-path r --epoch 3").code == 0
    assert (Path("r/checkpoints") / "ckpt-12").is_dir()
    answer = falconet("validate --checkpoint-input-path r --log-style tensorflow")
    assert len(re.findall(r"^Validation top-1 accuracy \[ckpt-\d+\] ", answer.out, re.M)) == 3


def test_the_pytorch_style_logs_where_it_saves(falconet):
    answer = falconet(f"train {TINY} --log-style pytorch --checkpoint-output-path out")
    assert answer.code == 0, answer.err
    assert (Path("out") / "training.csv").exists()
    assert (Path("out") / "resnet8-cifar_generated_2").is_dir()
    assert falconet("validate --checkpoint-input-path out").code == 0


def test_the_variable_says_where_runs_go(falconet, monkeypatch, tmp_path):
    monkeypatch.setenv("FALCONET_RUNS", str(tmp_path / "elsewhere"))
    assert falconet(f"train {TINY}").code == 0
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    assert not Path("runs").exists()
