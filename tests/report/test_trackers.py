"""What MLflow stores, read back from its own database; what stand-ins for Weights & Biases and Aim are handed."""

import io
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from falconet.report.trackers.aim import Aim
from falconet.report.trackers.histograms import Histogram
from falconet.report.trackers.mlflow import QUIETLY, MLflow
from falconet.report.trackers.tracker import OPENING, Confusion, Picture
from falconet.report.trackers.weights_and_biases import ANSWERING, CHARTED, KEYS, STARTING, WeightsAndBiases

CONFUSION = Confusion(("a", "b"), [(0, 0, 2), (1, 0, 1)])
HISTOGRAM = Histogram(0.0, 2.0, 3, 3.0, 5.0, [1, 2])


def png():
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(file, "PNG")
    return file.getvalue()


class Wandb:
    """The parts of the package that are used, recording calls."""

    Error = type("Error", (Exception,), {})

    def __init__(self, *, mode="online", address="", refusal=None):
        """`refusal`: what the server says to a new run."""
        self.calls, self.mode, self.base_url, self.api_key, self.refusal = [], mode, address, None, refusal
        self.plot = self.summary = self.settings = self

    def setup(self):
        return self

    def Settings(self, **options):
        return options

    def init(self, **options):
        self.calls.append(options)
        if self.refusal and options.get("mode") != "offline":
            raise self.Error(self.refusal)
        return self

    def log(self, metrics, **how):
        self.calls.append((how, metrics))

    def update(self, metrics):
        self.calls.append(("summary", metrics))

    def finish(self):
        self.calls.append("finished")

    def Histogram(self, *, np_histogram):
        return np_histogram

    def Image(self, pixels, caption=None):
        return np.asarray(pixels).shape, caption

    def confusion_matrix(self, *, y_true, preds, class_names):
        return y_true, preds, class_names


@pytest.fixture
def keyless(tmp_path, monkeypatch):
    """An account without a key of Weights & Biases."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (*KEYS, "NETRC", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    """The address of a server that answers everything with an error, as one does that expects something else."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as found:
        found.RequestHandlerClass.log_message = lambda *_: None
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{found.server_address[1]}"
        found.shutdown()
        thread.join()


@pytest.fixture
def silent():
    """The address of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield f"http://127.0.0.1:{found.getsockname()[1]}"


def opened(wandb, folder, monkeypatch):
    """What is said when it logs offline, and the modes of the runs that it was asked for."""
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    said = []
    WeightsAndBiases(folder, project="p", name="n", config={}, offline=said.append)
    return said, [call.get("mode") for call in wandb.calls]


OFFLINE = "; logging offline to {}/wandb, which `wandb sync` uploads"


def test_without_a_key_it_logs_offline_and_asks_nothing(keyless, tmp_path, monkeypatch):
    said, modes = opened(Wandb(address="http://127.0.0.1:1"), tmp_path, monkeypatch)
    assert said == ["no API key, which `wandb login` stores" + OFFLINE.format(tmp_path)]
    assert modes == ["offline"]


def test_without_a_connection_it_logs_offline(keyless, tmp_path, monkeypatch, silent):
    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.setattr("falconet.report.trackers.weights_and_biases.ANSWERING", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address, why in ((f"http://127.0.0.1:{port}", "Connection refused"), (silent, "no answer within 0.1 s")):
        said, modes = opened(Wandb(address=address), tmp_path, monkeypatch)
        assert said == [f"no connection to {address}: {why}" + OFFLINE.format(tmp_path)]
        assert modes == ["offline"]


def test_a_server_that_refuses_the_run_is_followed_by_an_offline_one(keyless, tmp_path, monkeypatch, server):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.netrc").touch()  # which may have a key
    wandb = Wandb(address=server, refusal="Timed out\n while retrying.")
    said, modes = opened(wandb, tmp_path, monkeypatch)
    assert said == ["Timed out while retrying" + OFFLINE.format(tmp_path)]
    assert modes == [None, "offline"]
    assert wandb.calls[0]["settings"]["init_timeout"] + ANSWERING < OPENING / 2, "long before a run stops waiting"


def test_offline_from_the_start_needs_neither_a_key_nor_a_connection(keyless, tmp_path, monkeypatch):
    assert opened(Wandb(mode="offline", address="http://127.0.0.1:1"), tmp_path, monkeypatch) == ([], [None])


def test_weights_and_biases_gets_everything(keyless, tmp_path, monkeypatch, server):
    wandb = Wandb(address=server)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    sink = WeightsAndBiases(tmp_path, project="p", name="n", config={"lr": 0.1})
    sink.write(5, {"train/loss": 0.5})
    sink.write_weights(5, {"fc.bias": HISTOGRAM})
    sink.write_pictures(5, "mistakes", [Picture("a taken for b, 90 %", png())])
    sink.write_confusion(5, CONFUSION)
    sink.write_confusion(5, Confusion([str(label) for label in range(CHARTED + 1)], [(0, 1, 1)]))
    sink.write_result(5, {"best/validation_accuracy": 50.0})
    sink.close()
    opened, *calls, result, end = wandb.calls
    assert opened.pop("settings") == {"init_timeout": STARTING}
    assert opened == {"project": "p", "name": "n", "dir": str(tmp_path), "config": {"lr": 0.1}}
    assert calls == [
        ({"step": 5}, {"train/loss": 0.5}),
        ({"step": 5}, {"weights/fc.bias": ([1, 2], [0.0, 1.0, 2.0])}),
        ({"commit": False}, {"pictures/mistakes": [((8, 8, 3), "a taken for b, 90 %")]}),
        ({"commit": False}, {"validation/confusion": ([0, 0, 1], [0, 0, 0], ["a", "b"])}),
        ({"commit": False}, {"validation/confusion": ((909, 909, 3), None)}),
    ]
    assert (result, end) == (("summary", {"best/validation_accuracy": 50.0}), "finished")


class FakeAim:
    """Aim's Run, Image and Distribution as its documentation has them: it cannot be installed beside our pins."""

    def __init__(self):
        self.tracked, self.stored, self.is_closed = [], {}, False

    def Run(self, *, experiment, system_tracking_interval, log_system_params, capture_terminal_logs):
        assert (system_tracking_interval, log_system_params, capture_terminal_logs) == (None, False, False)
        self.experiment = experiment
        return self

    def __setitem__(self, name, value):
        self.stored[name] = value

    def track(self, value, *, name, step):
        self.tracked.append((name, step, value))

    def close(self):
        self.is_closed = True

    def Image(self, image, caption="", format=None):
        return image.size, caption

    def Distribution(self, *, hist, bin_range):
        return hist, bin_range


def test_aim_gets_everything(tmp_path, monkeypatch):
    aim = FakeAim()
    monkeypatch.setitem(sys.modules, "aim", aim)
    sink = Aim(tmp_path / "first", options={"lr": 0.1})
    sink.write(5, {"train/loss": 0.5})
    sink.write_weights(5, {"fc.bias": HISTOGRAM})
    sink.write_pictures(5, "mistakes", [Picture("a taken for b, 90 %", png())])
    sink.write_pictures(5, "mistakes", [])
    sink.write_confusion(5, CONFUSION)
    sink.write_result(5, {"best/validation_accuracy": 50.0})
    sink.close()
    assert (aim.name, aim.experiment, aim.is_closed) == ("first", "falconet", True)
    assert aim.stored["options"] == {"lr": 0.1}
    assert aim.stored["result"] == {"best/validation_accuracy": 50.0}
    assert aim.tracked[:3] == [
        ("train/loss", 5, 0.5),
        ("weights/fc.bias", 5, ([1, 2], (0.0, 2.0))),
        ("pictures/mistakes", 5, [((8, 8), "a taken for b, 90 %")]),
    ]
    assert [name for name, *_ in aim.tracked[3:]] == ["validation/confusion"]


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """MLflow at its defaults, in an empty current folder; reads its runs."""
    import mlflow

    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID", *QUIETLY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db"
    )  # its default, but not a remembered one
    yield lambda: mlflow.search_runs(experiment_names=["falconet"], output_format="list")
    mlflow.end_run()
    for name in QUIETLY:
        os.environ.pop(name, None)


@pytest.mark.run
@pytest.mark.filterwarnings("ignore")  # MLflow's database code uses what SQLAlchemy deprecates
def test_mlflow_has_the_options_every_metric_and_the_files_of_a_run_that_was_continued(tracked, tmp_path, capfd):
    from mlflow import MlflowClient

    folder = tmp_path / "it's a run"
    folder.mkdir()
    (folder / "report.html").write_text("first")
    files = ("report.html", "summary.json")
    for number in (1, 2):
        sink = MLflow(folder, mark="abc", options={"lr": 0.1, "long": "x" * 900}, files=files, continues=number == 2)
        sink.write(5 * number, {"train/loss": 0.5 / number, "train/lr": float("nan")})
        sink.write_weights(5, {"fc.bias": HISTOGRAM})
        sink.write_result(10, {"best/validation_accuracy": 40.0 * number})
        sink.close()
        (folder / "report.html").write_text("second")
    (run,) = tracked()
    client = MlflowClient()
    assert (run.info.run_name, run.info.status) == ("it's a run", "FINISHED")
    assert run.data.params == {"lr": "0.1", "long": "x" * 500}
    assert run.data.metrics["best/validation_accuracy"] == 80.0
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(5, 0.5), (10, 0.25)]
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["report.html"]
    assert capfd.readouterr().out == ""


@pytest.mark.run
@pytest.mark.filterwarnings("ignore")
def test_another_run_in_a_folder_of_the_same_name_is_a_run_of_its_own(tracked, tmp_path):
    for mark in ("abc", "def"):
        MLflow(tmp_path / "r", mark=mark, options={}, files=(), continues=True).close()
    assert len(tracked()) == 2
