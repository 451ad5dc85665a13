"""`falconet serve` with several models: names, versions, a repository, and newer checkpoints while it answers."""

import contextlib
import http.client
import io
import json
import shutil
import threading
from pathlib import Path

import pytest
from PIL import Image

from falconet.checkpoint import format
from served import LIMIT, served, until
from tiny import TINY

pytestmark = pytest.mark.dist
SERVER = "--port 0 --threads 1 --device cpu --engine torch"


def ask(port, method, path, body=b""):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
        connection.request(method, path, body=body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def photo(seed=0):
    file = io.BytesIO()
    Image.effect_noise((40, 30), 50 + seed).convert("RGB").save(file, "PNG")
    return file.getvalue()


def scored(score, *, run="r"):
    """The run's checkpoints, oldest first, with these scores of a validation."""
    found = format.checkpoints_in(Path(run))
    for folder, value in zip(found, score, strict=False):
        metrics = format.read_manifest(folder).content["metrics"]
        format.amend(folder, {"metrics": {**metrics, "validation_accuracy": value, "score": value}})
    return found


def test_runs_are_served_under_their_names(falconet):
    assert falconet(f"train {TINY} --run-dir runs/birds").code == 0
    shutil.copytree("runs/birds", "runs/cats&dogs")
    Path("cats").symlink_to("runs/cats&dogs")
    with served(f"runs/birds cats runs/cats&dogs {SERVER}") as (_, port, lines):
        names = [line.split()[1] for line in lines if line.startswith("serving ")]
        assert names == ["birds", "cats", "cats-dogs"]
        for name in names:
            status, content = ask(port, "POST", f"/predict?model={name}&top=2", photo())
            assert (status, content["model"], content["version"]) == (200, name, "2")
            assert len(content["predictions"][0]["top"]) == 2
        assert ask(port, "POST", "/predict", photo())[1]["model"] == "birds"  # the first
        status, content = ask(port, "POST", "/predict?model=bird", photo())
        assert (status, content["error"].endswith("did you mean 'birds'?")) == (404, True)


def test_two_runs_of_one_name_are_refused(falconet):
    assert falconet(f"train {TINY} --run-dir a/birds").code == 0
    shutil.copytree("a/birds", "b/birds")
    answer = falconet(f"serve a/birds b/birds {SERVER}")
    assert answer.code == 2
    assert "--more-models: b/birds would be served as 'birds', which is taken" in answer.err


def test_clients_load_runs_of_a_repository(falconet):
    assert falconet(f"train {TINY} --run-dir runs/birds").code == 0
    with served(f"--repository runs {SERVER}") as (_, port, lines):
        assert lines[-2].startswith("serving no model yet at ")
        assert ask(port, "POST", "/predict", photo()) == (503, {"error": "no model is loaded"})
        assert ask(port, "POST", "/v2/repository/models/birds/load") == (200, {})
        assert ask(port, "POST", "/predict", photo())[1]["model"] == "birds"
        shutil.copytree("runs/birds", "runs/cats")  # later than the start
        assert [each["name"] for each in ask(port, "POST", "/v2/repository/index")[1]] == ["birds", "cats"]
        assert ask(port, "POST", "/v2/repository/models/cats/load") == (200, {})
        assert ask(port, "POST", "/v2/repository/models/birds/unload") == (200, {})
        assert ask(port, "POST", "/predict", photo())[1]["model"] == "cats"
        Path("runs/current").symlink_to("birds")
        assert ask(port, "POST", "/v2/repository/models/current/load") == (200, {})
        assert ask(port, "POST", "/predict?model=current", photo())[1]["model"] == "current"


def test_a_better_checkpoint_is_swapped_in_and_a_torn_one_is_not(falconet):
    assert falconet(f"train {TINY} --epoch 3 --run-dir r").code == 0
    first, second, third = scored([90.0, 10.0, 5.0])
    answers, done = [], threading.Event()
    with served(f"r --watch {SERVER}") as (process, port, _):

        def client():
            while not done.is_set():
                answers.append(ask(port, "POST", "/predict", photo(len(answers) % 5)))

        clients = [threading.Thread(target=client) for _ in range(3)]
        for each in clients:
            each.start()
        until(lambda: len(answers) > 5)
        assert {content["version"] for _, content in answers} == {"1"}
        scored([90.0, 95.0, 5.0])
        until(lambda: answers[-1][1].get("version") == "2")
        weights = third / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        scored([90.0, 95.0, 99.0])  # the best by its manifest, which is whole
        seen = len(answers)
        until(lambda: len(answers) > seen + 50)
        done.set()
        for each in clients:
            each.join(LIMIT)
        process.terminate()
        assert process.wait(LIMIT) == 0
        said = process.stdout.read()
        assert process.stderr.read() == ""
    assert {status for status, _ in answers} == {200}
    versions = [content["version"] for _, content in answers]
    assert set(versions) == {"1", "2"}
    assert "r: version 2 takes the place of 1\n" in said
    assert first.exists()
    assert second.exists()
