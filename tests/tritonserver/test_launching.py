"""NVIDIA's Triton server is started, stopped and reported cleanly: nothing outlives it, and a failure is one line."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from falconet.bench import triton_server
from falconet.bench.triton_server import Ports
from falconet.errors import ConfigError, WorldError
from served import LIMIT
from watched import descendants, wait_until_gone

WORDS = ("needs NVIDIA's Triton server", "tritonserver on PATH", "`make triton`", "FALCONET_TRITON=DIR")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A machine without a server."""
    monkeypatch.setattr(triton_server, "ENVIRONMENT", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program_in(folder, text="#!/bin/sh\n"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tritonserver"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_missing_server_is_one_line_that_says_where_to_get_it(elsewhere):
    with pytest.raises(ConfigError) as error:
        triton_server.find()
    assert [word for word in WORDS if word not in str(error.value)] == []


def test_the_named_server_goes_before_the_one_on_path_before_the_installed_one(elsewhere, monkeypatch):
    packages = elsewhere / "venv/lib/python3.11/site-packages"
    installed = program_in(packages / "pytriton/tritonserver/bin")
    monkeypatch.setattr(triton_server, "ENVIRONMENT", elsewhere / "venv")
    assert triton_server.find() == triton_server.Program(path=installed, packages=packages)
    on_path = program_in(elsewhere)
    assert triton_server.find() == triton_server.Program(path=on_path, packages=None)
    named = program_in(elsewhere / "named")
    monkeypatch.setenv("FALCONET_TRITON", str(named))
    assert triton_server.find().path == named
    monkeypatch.setenv("FALCONET_TRITON", str(elsewhere / "venv"))
    assert triton_server.find().packages == packages
    monkeypatch.setenv("FALCONET_TRITON", str(elsewhere / "other"))
    with pytest.raises(ConfigError, match=r"FALCONET_TRITON: .*other: expected a tritonserver program, or an env"):
        triton_server.find()


def test_an_environment_for_another_python_is_refused(elsewhere, monkeypatch):
    """The stub that runs Python inside of the server is compiled for one version."""
    packages = elsewhere / "venv/lib/python3.99/site-packages"
    program_in(packages / "pytriton/tritonserver/bin")
    for name in ("backends/python", "python_backend_stubs/3.12", "python_backend_stubs/3.13"):
        (packages / "pytriton/tritonserver" / name).mkdir(parents=True)
    monkeypatch.setattr(triton_server, "ENVIRONMENT", elsewhere / "venv")
    with (
        pytest.raises(ConfigError, match=r"has no stub for Python 3\.99; expected 3\.12, 3\.13"),
        triton_server.started(elsewhere, models=[]),
    ):
        pass


@pytest.mark.dist
def test_a_complete_server_keeps_its_own_backends(elsewhere):
    """NVIDIA's container has the compiled ones."""
    program_in(elsewhere, '#!/bin/sh\necho "error: $*"\nexit 3\n')
    with pytest.raises(WorldError) as error, triton_server.started(elsewhere, models=["one", "two"]):
        pass
    said = str(error.value)
    assert "tritonserver did not start: exit code 3: --model-repository=" in said
    assert "--model-control-mode=explicit --load-model=one --load-model=two" in said
    assert len(re.findall(r"--(?:http|grpc|metrics)-address=127\.0\.0\.1", said)) == 3
    assert "--backend-directory" not in said


@pytest.mark.dist
def test_other_ports_are_tried_if_one_was_taken_meanwhile(elsewhere, monkeypatch):
    program_in(elsewhere, '#!/bin/sh\necho "error: Socket already in use"\nexit 1\n')
    asked, free = [], Ports.free
    monkeypatch.setattr(Ports, "free", classmethod(lambda cls: asked.append(free()) or asked[-1]))
    with (
        pytest.raises(WorldError, match="exit code 1: Socket already in use"),
        triton_server.started(elsewhere, models=[]),
    ):
        pass
    assert len({port for ports in asked for port in (ports.http, ports.grpc, ports.metrics)}) == 3 * 3


@pytest.mark.dist
def test_nothing_is_left_of_a_stopped_server(exported, a_server_is_installed):
    with triton_server.started(exported.models, models=[exported.name]) as running:
        processes = [running.process, *descendants(running.process)]
        assert len(processes) > 1, "a model has a process of its own"
        assert running.shared_memory()
        folder = running.log.parent
    wait_until_gone(*processes)
    assert not running.shared_memory()
    assert not folder.exists()
    for port in (running.ports.http, running.ports.grpc, running.ports.metrics):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=LIMIT)


@pytest.mark.dist
def test_the_shared_memory_of_a_killed_model_is_freed(exported, a_server_is_installed):
    with triton_server.started(exported.models, models=[exported.name]) as running:
        processes = [running.process, *descendants(running.process)]
        for process in reversed(processes):
            os.kill(process, signal.SIGKILL)
    wait_until_gone(*processes)
    assert not running.shared_memory()


PROGRAM = """
import sys, time
from pathlib import Path
from falconet.bench import triton_server
with triton_server.started(Path(sys.argv[1]), models=[sys.argv[2]]) as running:
    print(running.process, flush=True)
    time.sleep(1000)
"""


@pytest.mark.dist
def test_a_server_does_not_outlive_the_process_that_started_it(exported, a_server_is_installed):
    argv = [sys.executable, "-c", PROGRAM, str(exported.models), exported.name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        started = int(parent.stdout.readline())
        processes = [started, *descendants(started)]
        parent.kill()
    wait_until_gone(*processes)


@pytest.mark.dist
def test_a_configuration_that_does_not_fit_the_model_is_reported(exported, a_server_is_installed, tmp_path):
    shutil.copytree(exported.models, tmp_path / "models")
    config = tmp_path / "models" / exported.name / "config.pbtxt"
    config.write_text(config.read_text().replace("dims: [ 8, 8, 3 ]", "dims: [ 9, 9, 3 ]"))
    with (
        pytest.raises(WorldError) as error,
        triton_server.started(tmp_path / "models", models=[exported.name]),
    ):
        pass
    said = str(error.value)
    assert "tritonserver did not start: exit code 1: " in said
    assert "input 'images': the configuration has TYPE_UINT8 [9, 9, 3], model.onnx has tensor(uint8) [8, 8, 3]" in said
    assert "\n" not in said


@pytest.mark.dist
def test_the_ensemble_needs_the_backend_that_decodes(exported, a_server_is_installed):
    """PyPI's server has no DALI; NVIDIA's image has."""
    if triton_server.find().packages is None:
        pytest.skip("this server may have DALI")
    with (
        pytest.raises(WorldError, match="unable to find backend library for backend 'dali'"),
        triton_server.started(exported.models, models=[f"{exported.name}_photo"]),
    ):
        pass


def test_the_environment_is_pinned():
    """What `make triton` installs: every package to one version, and numpy 1."""
    text = (Path(__file__).parents[2] / "requirements-triton.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    assert pins["nvidia-pytriton"] == "0.7.0"
    assert pins["numpy"].startswith("1.")
    assert "onnxruntime" in pins
