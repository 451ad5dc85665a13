"""What the tests of the originals' scripts share: scripts, run as people type them, and a small CIFAR-10.

`pytest` in this folder runs them in about two minutes on two cores. They are the originals' tests in kind, at small
size; those in tests_serial/ start several processes. `make test` runs the tests of Falconet itself.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from falconet.legacy.programs import main

HERE = Path(__file__).parent
TRAIN, TEST = 100, 30  # images
INHERITED = re.compile(r"DATA_DIR|FALCONET_\w+|WANDB_\w+|RANK|WORLD_SIZE|LOCAL_\w+|MASTER_\w+|SLURM_\w+|OMPI_\w+")
for name in filter(INHERITED.fullmatch, list(os.environ)):
    del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    def numbers(self, pattern: str) -> list[float]:
        """The numbers that a tool of the originals would find in the output."""
        return [float(text) for text in re.findall(pattern, self.out)]

    @property
    def train_accuracy(self) -> float:
        return self.numbers(r"\[INFO\] accuracy: ([\d.]+) %")[-1]

    @property
    def losses(self) -> list[float]:
        return self.numbers(r"\[INFO\] loss: ([\d.]+),")

    @property
    def test_accuracies(self) -> list[float]:
        return self.numbers(r"Accuracy on test set: ([\d.]+)%")


Run = Callable[..., Answer]


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/cifar-10-batches-bin, where every class has a colour that is learned in a few updates."""
    home = tmp_path_factory.mktemp("cifar")
    folder = home / "data/cifar-10-batches-bin"
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    colours = noise.permutation(np.stack(np.meshgrid([40, 128, 215], [40, 215], [40, 215]), -1).reshape(-1, 3))[:10]
    for name, count in {**{f"data_batch_{number}": TRAIN // 5 for number in range(1, 6)}, "test_batch": TEST}.items():
        labels = np.arange(count) % 10
        planes = colours[labels][:, :, None] + noise.integers(-30, 31, (count, 3, 1024))
        # A record of CIFAR-10: a byte for the label, then the red, green and blue planes of 32 x 32 pixels.
        records = np.concatenate([labels[:, None], planes.reshape(count, -1)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.astype(np.uint8).tobytes())
    return home


@pytest.fixture
def run(cifar: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a script of this folder, such as `train/train.py`, in this process; it must end well."""
    monkeypatch.chdir(cifar)

    def call(script: str, line: str = "") -> Answer:
        name = script.removeprefix("train/")
        answer = Answer(main(f"pytorch:{name}", str(HERE / script), line.split()), *capfd.readouterr())
        assert answer.code == 0, answer.err
        assert "ERROR" not in answer.out + answer.err
        return answer

    return call


@pytest.fixture
def started(cifar: Path) -> Run:
    """Run a command in processes of its own, where `SCRIPT` is the path of a script of this folder."""

    def call(command: str) -> Answer:
        words = [str(HERE / word) if word.endswith(".py") else word for word in command.split()]
        words = [sys.executable if word == "python3" else word for word in words]
        if words[0] == "poprun":
            words[:1] = [sys.executable, "-m", "falconet.legacy.poprun"]
        ended = subprocess.run(words, cwd=cifar, capture_output=True, text=True, check=False, timeout=300)
        assert ended.returncode == 0, ended.stderr
        return Answer(ended.returncode, ended.stdout, ended.stderr)

    return call
