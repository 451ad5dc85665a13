"""A trained model, exported by the command line, and NVIDIA's own server with it."""

import platform

import pytest

from falconet.bench import triton_server
from falconet.cli import main
from falconet.errors import ConfigError
from triton_exports import exported_model


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A network that was trained on the digits for an epoch, with 64 images."""
    run = tmp_path_factory.mktemp("tritonserver") / "run"
    for line in (
        f"train --epoch 1 --threads 1 --device cpu --run-dir {run}",
        f"export {run} --format triton --threads 1 --latency-batch 2",
    ):
        assert main(line.split()) == 0
    return exported_model(run / "export/triton", images=64, line=f"--checkpoint-input-path {run}")


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
