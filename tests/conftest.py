"""Shared by all tests: the command line called in this process, and small things to train on."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from falconet.cli import main


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def falconet(capfd, tmp_path, monkeypatch) -> Callable[[str], Answer]:
    """Runs a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)

    def call(line: str) -> Answer:
        code = main(line.split())
        return Answer(code, *capfd.readouterr())

    return call


@pytest.fixture
def image_folder(tmp_path) -> Path:
    """Two classes, dark and light, of 12 training and 4 validation PNG photos each."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for label, level in (("dark", 60), ("light", 190)):
            folder = tmp_path / "photos" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(level - 50, level + 50, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "photos"
