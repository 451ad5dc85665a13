"""A tracker never ends a run: what it raises, whenever, takes one line, and what hangs is left behind."""

import io
import sys
import threading
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest

from falconet.errors import ConfigError
from falconet.report.trackers import tracker
from falconet.report.trackers.aim import Aim
from falconet.report.trackers.histograms import Histogram
from falconet.report.trackers.mlflow import MLflow
from falconet.report.trackers.tensorboard import TensorBoard
from falconet.report.trackers.tracker import Confusion, Guarded, Picture, Tracker
from falconet.report.trackers.weights_and_biases import WeightsAndBiases

TINY = "--model resnet8-cifar --micro-batch-size 256 --threads 1 --epoch 1 --run-dir r"
HISTOGRAM = Histogram(0.0, 2.0, 3, 3.0, 5.0, [1, 2])
CALLS = {
    "write": (5, {"train/loss": 0.5}),
    "write_weights": (5, {"fc.bias": HISTOGRAM}),
    "write_pictures": (5, "mistakes", [Picture("a taken for b, 90 %", b"")]),
    "write_confusion": (5, Confusion(("a", "b"), [(0, 1, 3)])),
    "write_graph": ("graph",),
    "write_result": (5, {"best/validation_accuracy": 50.0}),
}


class Recording(Tracker):
    """Keeps its calls; raises in one of them."""

    def __init__(self, broken=None, error=None):
        self.calls, self.broken, self.error = [], broken, error or RuntimeError("gone")
        self._do("open")

    def _do(self, name, *values):
        self.calls.append((name, *values))
        if name == self.broken:
            raise self.error

    def __getattribute__(self, name):
        if name in (*CALLS, "close"):
            return lambda *values: self._do(name, *values)
        return super().__getattribute__(name)


def test_everything_arrives_in_order_and_close_waits_for_it():
    said, kept = [], Recording()
    board = Guarded("It", lambda: kept, say=said.append)
    for name, values in CALLS.items():
        getattr(board, name)(*values)
    board.close()
    assert kept.calls == [("open",), *((name, *values) for name, values in CALLS.items()), ("close",)]
    assert said == []
    assert "falconet-It" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("error", [RuntimeError("gone\n  for good."), OSError(28, "No space left"), SystemExit("gone")])
@pytest.mark.parametrize("broken", ["open", *CALLS, "close"])
def test_whatever_is_raised_wherever_takes_one_line(broken, error):
    said, opened = [], []

    def opens():
        opened.append(Recording(broken, error))
        return opened[0]

    board = Guarded("It", opens, say=said.append)
    for _ in range(3):
        for name, values in CALLS.items():
            getattr(board, name)(*values)
    board.close()
    expected = {RuntimeError: "gone for good", OSError: "No space left", SystemExit: "gone"}[type(error)]
    assert said == [f"note: It: {expected}; nothing more is sent to it"]
    if broken not in ("open", "close"):
        names = [name for name, *_ in opened[0].calls]
        assert names.count(broken) == 1
        assert names[-2:] == [broken, "close"], "nothing more, but its files are closed"


def test_a_tracker_cannot_ask_the_terminal(monkeypatch):
    terminal, asked = io.StringIO("typed\n"), []
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)

    def opens():
        asked.append((sys.stdin.isatty(), sys.stdin.read()))
        return Recording()

    Guarded("It", opens, say=pytest.fail).close()
    assert asked == [(False, "")]
    assert sys.stdin is terminal


def test_a_mistake_of_the_users_is_an_error():
    def opens():
        raise ConfigError("needs the package it")

    with pytest.raises(ConfigError, match="needs the package it"):
        Guarded("It", opens, say=pytest.fail)


def test_a_tracker_that_is_refused_closes_those_that_were_opened_before_it(falconet, monkeypatch):
    kept = Recording()

    def refuse(*_, **__):
        raise ConfigError("--aim: got nothing to write to")

    monkeypatch.setattr("falconet.report.trackers.tensorboard.TensorBoard", lambda *_, **__: kept)
    monkeypatch.setattr("falconet.report.trackers.aim.Aim", refuse)
    monkeypatch.setitem(sys.modules, "aim", SimpleNamespace(__spec__=ModuleSpec("aim", None)))
    answer = falconet(f"train {TINY} --tensorboard --aim")
    assert (answer.code, answer.err) == (2, "falconet train: --aim: got nothing to write to\n")
    assert kept.calls == [("open",), ("close",)]


@pytest.mark.parametrize("hangs", ["open", "write", "close"])
def test_what_hangs_is_waited_for_once_and_left_behind(monkeypatch, hangs):
    monkeypatch.setattr(tracker, "CLOSING", 0.1)
    monkeypatch.setattr(tracker, "WAITING", 4)
    said, release = [], threading.Event()

    class Hanging(Recording):
        def _do(self, name, *values):
            super()._do(name, *values)
            if name == hangs:
                release.wait()

    board = Guarded("It", Hanging, say=said.append, patience=0.1 if hangs == "open" else 60)
    writes = 10 if hangs == "write" else 2
    for update in range(writes):
        board.write(update, {})
    board.close()
    board.close()
    why = {"open": "no answer within 0.1 s", "write": "it has not answered for a long time"}
    assert said == [f"note: It: {why.get(hangs, 'no answer within 0.1 s')}; nothing more is sent to it"]
    release.set()
    board._thread.join(60)
    assert not board._thread.is_alive()


MISSING = {
    "torch.utils.tensorboard": (
        lambda folder: TensorBoard(folder),
        "needs the package tensorboard: pip install 'falconet[tensorboard]'",
    ),
    "wandb": (
        lambda folder: WeightsAndBiases(folder, project="p", name="n", config={}),
        "needs the package wandb: pip install 'falconet[wandb]'",
    ),
    "mlflow": (
        lambda folder: MLflow(folder, mark="m", options={}, files=()),
        "needs the package mlflow: pip install 'falconet[mlflow]'",
    ),
    "aim": (lambda folder: Aim(folder, options={}), "needs the package aim: pip install 'falconet[aim]'"),
}


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_package_is_named_with_its_install_command(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    opens, message = MISSING[package]
    with pytest.raises(ConfigError) as refused:
        opens(tmp_path)
    assert str(refused.value) == message


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow", "aim"])
def test_a_run_with_a_missing_package_ends_in_one_line_before_data_is_read(falconet, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    answer = falconet(f"train --{package}")
    needs = f"--{package}: needs {package}, which is not installed: pip install 'falconet[{package}]'"
    assert (answer.code, answer.out, answer.err) == (2, "", f"falconet train: {needs}\n")


def test_trackers_change_no_number_of_a_run(falconet, tmp_path, monkeypatch):
    monkeypatch.setattr(MLflow, "__init__", lambda *_, **__: None)
    for name in ("write", "write_result", "close"):
        monkeypatch.setattr(MLflow, name, lambda *_, **__: None)
    plain = falconet(f"train {TINY} --epoch 2")
    shown = falconet(f"train {TINY} --epoch 2 --run-dir s --tensorboard --weight-histogram --mlflow")
    assert (plain.code, shown.code) == (0, 0), shown.err
    weights = [sorted((tmp_path / run / "checkpoints").rglob("*.safetensors")) for run in "rs"]
    assert [path.name for path in weights[0]] == [path.name for path in weights[1]]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*weights, strict=True))


KINDS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "aim": Aim}
NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow", "aim": "Aim"}


@pytest.mark.parametrize("broken", ["__init__", "write", "write_weights", "close"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_without_a_broken_tracker(falconet, monkeypatch, kind, broken):
    if kind == "mlflow" and broken == "write_weights":
        return  # it has no place for histograms

    def breaks(*_, **__):
        raise RuntimeError("server gone")

    for name in ("__init__", *CALLS, "close"):
        monkeypatch.setattr(KINDS[kind], name, breaks if name == broken else lambda *_, **__: None)
    if kind != "tensorboard":
        monkeypatch.setitem(sys.modules, kind, SimpleNamespace(__spec__=ModuleSpec(kind, None)))
    drawn = "" if kind == "mlflow" else "--weight-histogram"
    answer = falconet(f"train {TINY} --{kind} {drawn}")
    assert answer.code == 0, answer.err
    assert answer.out.count(f"note: {NAMES[kind]}: server gone; nothing more is sent to it\n") == 1
    assert answer.err == ""
    assert "best accuracy" in answer.out
