"""--weight-histogram: a whole run draws all of its trained weights, in one process or in several."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from falconet.checkpoint import format
from runs import begin, finish
from tiny import TINY

DRAWN = "--tensorboard --weight-histogram --logs-per-epoch 2 --run-dir r"


def drawn(run):
    """The last histogram of each weight, and the updates at which they were drawn."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    found = {tag.removeprefix("weights/"): events.Histograms(tag) for tag in events.Tags()["histograms"]}
    assert len({tuple(event.step for event in each) for each in found.values()}) == 1
    steps = [event.step for event in next(iter(found.values()))]
    return {name: each[-1].histogram_value for name, each in found.items()}, steps


def assert_of_last_checkpoint(run):
    folder = format.checkpoints_in(run)[-1]
    weights = format.read_tensors(folder, "model", verified=format.verify(folder))
    found, steps = drawn(run)
    assert steps == [2, 4, 6, 8]
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    assert found.keys() == {name for name in weights if not name.endswith(buffers)}
    for name, histogram in found.items():
        exact = weights[name].double()
        assert histogram.num == sum(histogram.bucket) == exact.numel()
        assert (histogram.min, histogram.max) == (float(exact.min()), float(exact.max()))
        assert histogram.sum == pytest.approx(float(exact.sum()), abs=1e-9)


def test_every_weight_has_a_histogram_at_every_log_point(falconet):
    answer = falconet(f"train {TINY} {DRAWN}")
    assert answer.code == 0, answer.err
    assert_of_last_checkpoint(Path("r"))


PROCESSES = {
    "stages": "--pipeline-splits layer2/0 --gradient-accumulation 2 --strict-devices",
    "replicas with divided state": "--replicas 2 --enable-optimizer-rts",
}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("options", PROCESSES.values(), ids=PROCESSES)
def test_several_processes_log_the_weights_of_one_replica_once(tmp_path, options):
    code, _, err = finish(begin(f"train {TINY} {DRAWN} {options}", tmp_path))
    assert code == 0, err
    assert_of_last_checkpoint(tmp_path / "r")


def test_wandb_gets_histograms_and_metrics(falconet, monkeypatch):
    class Wandb:
        __spec__ = ModuleSpec("wandb", None)

        def __init__(self):
            self.logged, self.settings, self.mode = {}, self, "offline"

        def setup(self):
            return self

        def Settings(self, **options):
            return options

        def init(self, **options):
            return self

        def log(self, metrics, *, step):
            self.logged.setdefault(step, {}).update(metrics)

        def Histogram(self, *, np_histogram):
            return np_histogram

        def finish(self):
            pass

    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert falconet(f"train {TINY} --epoch 1 --wandb --wandb-weight-histogram").code == 0
    counts, edges = fake.logged[4]["weights/fc.weight"]
    assert len(edges) == len(counts) + 1
    assert sum(counts) == 640  # 64 features of 10 classes
    assert "train/loss" in fake.logged[4]


def test_histograms_need_a_sink(falconet):
    answer = falconet("train --weight-histogram")
    assert answer.code == 2
    assert (
        answer.err == "falconet train: --weight-histogram: needs --tensorboard, --wandb or --aim, where histograms go\n"
    )
