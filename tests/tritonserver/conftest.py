"""A trained model, exported by the command line, and NVIDIA's own server with it."""

import platform
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from falconet.bench import triton_server
from falconet.cli import main
from falconet.config.commands import ServeOptions
from falconet.config.settings import LINE, Setting
from falconet.errors import ConfigError
from falconet.export.triton_repository import MODELS
from falconet.infer.classifier import open_classifier

SIDE, CLASSES = 8, 10


class Exported(NamedTuple):
    """An exported run."""

    name: str  # of the model
    models: Path  # the repository
    pixels: np.ndarray  # 64 x S x S x 3
    scores: np.ndarray  # of the trained model in torch, 64 x classes


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A network that was trained on the digits for an epoch, and what torch computes with it, without the predictor."""
    run = tmp_path_factory.mktemp("tritonserver") / "run"
    for line in (
        f"train --epoch 1 --threads 1 --device cpu --run-dir {run}",
        f"export {run} --format triton --threads 1 --latency-batch 2",
    ):
        assert main(line.split()) == 0
    settings = [Setting("checkpoint-input-path", (str(run),), LINE), Setting("device", ("cpu",), LINE)]
    classifier, _ = open_classifier(ServeOptions, settings, lambda _: None)
    pixels = np.random.default_rng(0).integers(0, 256, (64, SIDE, SIDE, 3), dtype=np.uint8)
    about = classifier.preprocessing
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (about.mean, about.std))
    with torch.inference_mode():
        values = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        scores = classifier.model.eval()((values - mean) / std).numpy()
    return Exported(classifier.served_name, run / "export/triton" / MODELS, pixels, scores)


@pytest.fixture(scope="session")
def a_server_is_installed():
    """Where one could be, a missing server is an error; NVIDIA makes none for other machines."""
    try:
        triton_server.find()
    except ConfigError:
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            pytest.skip("PyPI's tritonserver is for Linux on x86-64")
        raise


@pytest.fixture(scope="module")
def server(exported, a_server_is_installed):
    """NVIDIA's server with the exported classifier; the repository is used as it was written."""
    with triton_server.started(exported.models, models=[exported.name]) as running:
        yield running
