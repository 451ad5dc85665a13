"""NVIDIA's Triton server with an exported model: the answers to its official clients, and how it batched them."""

import importlib
import itertools
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from falconet.bench import load_test, triton_server
from falconet.bench.client import Job, difference
from falconet.bench.load_test import Target, Tensors
from falconet.cli import main
from served import LIMIT, until
from triton_exports import exported_model

pytestmark = pytest.mark.dist
TOLERANCE = 1e-5  # of an image's largest score: the originals' relative tolerance
DEEP_TOLERANCE = 1e-4  # the export's own
PROTOCOLS = ("http", "grpc")


class Asking:
    """The official client of one protocol."""

    def __init__(self, protocol, server, name):
        self.library = importlib.import_module(f"tritonclient.{protocol}")
        self.name = name
        self.client = self.library.InferenceServerClient(f"127.0.0.1:{getattr(server.ports, protocol)}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def __call__(self, pixels, **asked):
        tensor = self.library.InferInput("images", list(pixels.shape), "UINT8")
        tensor.set_data_from_numpy(pixels)
        output = self.library.InferRequestedOutput("logits", **asked)
        return self.client.infer(self.name, [tensor], outputs=[output]).as_numpy("logits")


@pytest.fixture(params=PROTOCOLS)
def ask(request, server, exported):
    with Asking(request.param, server, exported.name) as found:
        yield found


def counts(server, exported):
    """Images and executions so far, by the server's own statistics."""
    url = f"http://127.0.0.1:{server.ports.http}/v2/models/{exported.name}/stats"
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        (stats,) = json.load(answer)["model_stats"]
    return np.array([stats["inference_count"], stats["execution_count"]])


def counted(server, exported, before, images):
    """The same since `before`, once there are so many images: Triton counts a request after it has sent the answer."""
    until(lambda: (counts(server, exported) - before)[0] >= images)
    found = counts(server, exported) - before
    assert found[0] == images
    return found


@pytest.mark.parametrize("size", [1, 3, 64])
def test_every_answer_is_the_local_models(ask, exported, size):
    for start in range(0, len(exported.pixels) - size + 1, size):
        rows = slice(start, start + size)
        scores = ask(exported.pixels[rows])
        assert (scores.dtype, scores.shape) == (np.float32, (size, 10))
        assert difference(scores, exported.scores[rows]) < TOLERANCE


def test_classes_are_answered_by_name(ask, exported):
    """The classification extension: score, number and label, the best first; labels are those of the digits."""
    found = ask(exported.pixels[:5], class_count=3)
    assert found.shape == (5, 3)
    for texts, scores in zip(found, exported.scores, strict=False):
        rows = [text.decode().split(":") for text in texts]
        best = np.argsort(-scores)[:3]
        assert [(int(number), label) for _, number, label in rows] == [(each, str(each)) for each in best]
        assert [float(score) for score, _, _ in rows] == pytest.approx(scores[best].tolist(), rel=1e-4)


def test_a_batch_beyond_the_limit_is_refused(ask, exported):
    with pytest.raises(ask.library.InferenceServerException, match="batch-size must be <= 64"):
        ask(np.concatenate([exported.pixels, exported.pixels[:1]]))
    with pytest.raises(ask.library.InferenceServerException, match=r"Expected \[-1,8,8,3\], got \[1,7,8,3\]"):
        ask(exported.pixels[:1, :7])


def test_metadata_and_configuration_are_those_of_the_export(server, exported):
    with Asking("http", server, exported.name) as ask:
        assert ask.client.get_server_metadata()["name"] == "triton"
        about, config = ask.client.get_model_metadata(exported.name), ask.client.get_model_config(exported.name)
    assert about["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 8, 8, 3]}]
    assert about["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]
    assert (config["backend"], config["max_batch_size"]) == ("onnxruntime", 64)
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 2000


def test_a_load_test_reads_the_same_over_both_protocols(server, exported):
    targets = [
        Target.at(f"127.0.0.1:{port}", exported.name, protocol)
        for protocol, port in (("http", server.ports.http), ("grpc", server.ports.grpc))
    ]
    expected = Tensors(input="images", output="logits", image_size=8, channels_last=True, datatype="FP32")
    assert [Tensors.of(target) for target in targets] == [expected, expected]
    found = [target.statistics()["model_stats"][0] for target in targets]
    assert [[each["inference_count"], each["execution_count"]] for each in found] == [
        counts(server, exported).tolist()
    ] * 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_requests_of_many_clients_are_computed_together(protocol, server, exported):
    clients, requests = 12, 20
    before, together = counts(server, exported), threading.Barrier(clients)

    def client(number):
        with Asking(protocol, server, exported.name) as ask:
            together.wait(LIMIT)
            rows = [(number + step) % len(exported.pixels) for step in range(requests)]
            return max(difference(ask(exported.pixels[[row]]), exported.scores[[row]]) for row in rows)

    with ThreadPoolExecutor(clients) as pool:
        assert max(pool.map(client, range(clients))) < TOLERANCE
    images, executions = counted(server, exported, before, clients * requests)
    assert executions < images


def answered(server, exported, folder, *, protocol, kind, clients, requests=12, tolerance=TOLERANCE):
    """Client processes send all images, eight at a time; every answer must be the local model's."""
    batches = len(exported.pixels) // 8
    np.save(folder / "images.npy", exported.pixels.reshape(batches, 8, *exported.pixels.shape[1:]))
    np.save(folder / "expected.npy", exported.scores.reshape(batches, 8, -1))
    before = counts(server, exported)
    job = Job(
        protocol=protocol,
        host="127.0.0.1",
        port=getattr(server.ports, protocol),
        model=exported.name,
        input="images",
        output="logits",
        images=str(folder / "images.npy"),
        expected=str(folder / "expected.npy"),
        tolerance=tolerance,
        window=4 if kind == "ASYNC" else 1,
        count=requests,
    )
    outcomes = load_test.run_clients(job, clients)
    assert [(len(each.times), each.wrong) for each in outcomes] == [(requests, 0)] * clients
    _, executions = counted(server, exported, before, clients * requests * 8)
    assert executions <= clients * requests


@pytest.mark.parametrize("clients", [1, 4, 8])
@pytest.mark.parametrize("kind", ["SYNC", "ASYNC"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_originals_matrix_of_clients(protocol, kind, clients, server, exported, tmp_path):
    """Client processes that wait for each answer, or keep several requests in flight."""
    answered(server, exported, tmp_path, protocol=protocol, kind=kind, clients=clients)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", "efficientnet-b0", "efficientnet-b4"])
def test_the_originals_models_for_the_matrix_of_clients(model, a_server_is_installed, tmp_path):
    """At 64 x 64, with random weights."""
    line = f"--model {model} --image-size 64"
    assert main(f"export {line} --format triton --output {tmp_path / 'export'}".split()) == 0
    exported = exported_model(tmp_path / "export", images=16, line=line)
    with triton_server.started(exported.models, models=[exported.name]) as server:
        for protocol, kind, clients in itertools.product(PROTOCOLS, ("SYNC", "ASYNC"), (1, 4, 8)):
            load = {"protocol": protocol, "kind": kind, "clients": clients, "requests": 4}
            answered(server, exported, tmp_path, **load, tolerance=DEEP_TOLERANCE)


def test_metrics_count_the_images(server, exported):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics", timeout=LIMIT) as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    labels = f'{{model="{exported.name}",version="1"}}'
    found = [float(lines[f"{name}{labels}"]) for name in ("nv_inference_count", "nv_inference_exec_count")]
    assert found == counts(server, exported).tolist()


def test_the_model_is_unloaded_and_loaded_at_run_time(ask, exported):
    ask.client.unload_model(exported.name)
    until(lambda: not ask.client.is_model_ready(exported.name))
    with pytest.raises(ask.library.InferenceServerException, match=r"not ready|unknown model|no available versions"):
        ask(exported.pixels[:1])
    ask.client.load_model(exported.name)
    assert ask.client.is_model_ready(exported.name)
    assert difference(ask(exported.pixels[:1]), exported.scores[:1]) < TOLERANCE
