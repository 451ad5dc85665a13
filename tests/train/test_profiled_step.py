"""Profiled steps and runs: the same updates, one looked at layer by layer and some traced, and nothing in the way."""

import gzip
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

import runs
from falconet.checkpoint import format
from falconet.report.profile import trace
from falconet.report.profile.trace import FILES, TABLE, TRACE
from falconet.report.throughput import Stopwatch
from falconet.train import profiled_step
from falconet.train.build import BuiltPhase
from falconet.train.capture import WARM
from falconet.train.profiled_step import LOOKED, NEEDED, ProfiledStep, Subject
from falconet.train.step import TimedStep
from tiny import TINY

CPU = torch.device("cpu")
SUMMARY = "profile_summary.json"


class Counted:
    """A step that calls a layer, whose product is known in a trace."""

    def __init__(self):
        self.calls, self.layer = [], nn.Linear(8, 8)

    def __call__(self, micro_batches, *, update, lr):
        self.calls.append((update, lr))
        nn.Sequential(self.layer)(torch.ones(8, 8)).sum().backward()
        return update


def profiled_of(step, folder, *, updates, said=None, pause=nullcontext):
    model = nn.Module()
    model.layer = step.layer
    say = [].append if said is None else said.append
    subject = Subject(model=model, device=CPU, folder=folder, say=say, pause=pause)
    return ProfiledStep(step, subject, updates=updates)


@pytest.mark.parametrize(
    ("updates", "traced", "looked"),
    [(1, [1], None), (2, [2], 1), (3, [3], 2), (5, [5], 3), (6, [5, 6], 3), (9, [5, 6], 3)],
)
def test_every_update_runs_once_and_some_are_profiled(tmp_path, updates, traced, looked):
    step, said = Counted(), []
    profiled = profiled_of(step, tmp_path, updates=updates, said=said)
    assert [profiled([], update=number, lr=0.5) for number in range(updates)] == list(range(updates))
    assert step.calls == [(number, 0.5) for number in range(updates)]
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert (summary["last"], summary["traced"], summary.get("looked")) == (traced[-1], len(traced), looked)
    events = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))["traceEvents"]
    assert len([event for event in events if event.get("name") == "aten::addmm"]) == len(traced)
    assert "aten::addmm" in (tmp_path / TABLE).read_text()
    assert ("layers" in summary) == (looked is not None)
    if looked:
        assert [row["names"] for row in summary["layers"]["rows"]] == [["layer"]]
    note = f"note: --profile takes 6 updates, and this run makes {updates}: "
    assert [line.startswith(note) for line in said] == ([True, False] if updates < NEEDED else [False])
    assert said[-1].startswith(f"profiled {len(traced)} update")


def test_the_update_that_is_looked_at_is_one_that_is_not_captured(falconet, monkeypatch):
    """But a trial of two updates, which looks for a micro-batch that fits, captures the second."""
    plain, warm = BuiltPhase.step, []

    def step(self, state, **more):
        warm.append(more.get("warm", WARM))
        return plain(self, state, **more)

    monkeypatch.setattr(BuiltPhase, "step", step)
    answer = falconet(f"train {TINY} --micro-batch-size auto --profile --run-dir r")
    assert answer.code == 0, answer.err
    assert warm == [WARM, LOOKED]
    assert trace.BEFORE > LOOKED > WARM, "nor is the capture itself traced"


@pytest.mark.parametrize("updates", [1, 10])
def test_starting_and_writing_the_profile_is_not_update_time(tmp_path, monkeypatch, updates):
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])

    def lasting(function, seconds):
        def call(*arguments, **more):
            now[0] += seconds
            return function(*arguments, **more)

        call.layer = getattr(function, "layer", None)
        return call

    for name, seconds in (("started", 100.0), ("stopped", 300.0), ("write", 1000.0)):
        monkeypatch.setattr(trace, name, lasting(getattr(trace, name), seconds))
    monkeypatch.setattr(profiled_step, "layer_costs", lasting(profiled_step.layer_costs, 500.0))
    counted = Counted()
    step = TimedStep(lasting(counted, 3.0), watch)
    step.layer = counted.layer
    profiled = profiled_of(step, tmp_path, updates=updates, pause=watch.standing)
    for number in range(updates):
        now[0] += 0.5  # until its images are there
        profiled([], update=number, lr=0.5)
    assert max(watch.update_seconds()) <= 3.5
    assert watch.lap().seconds == pytest.approx(3.5 * updates, abs=0.6)


def test_a_step_that_fails_leaves_no_profiler_and_no_hook(tmp_path):
    class Failing(Counted):
        def __call__(self, micro_batches, *, update, lr):
            if update == LOOKED - 1:
                raise ValueError("as it happens")
            return super().__call__(micro_batches, update=update, lr=lr)

    profiled = profiled_of(Failing(), tmp_path, updates=9)
    for number in range(LOOKED - 1):
        profiled([], update=number, lr=0.5)
    with pytest.raises(ValueError, match="as it happens"):
        profiled([], update=LOOKED - 1, lr=0.5)
    profiled.close()
    assert not modules._global_forward_hooks
    assert not torch.autograd._profiler_enabled()


def test_an_interruption_between_traced_updates_stops_the_profiler(tmp_path):
    profiled = profiled_of(Counted(), tmp_path, updates=9)
    for number in range(5):
        profiled([], update=number, lr=0.5)
    assert torch.autograd._profiler_enabled()
    profiled.close()
    assert not torch.autograd._profiler_enabled()
    profiled([], update=5, lr=0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_cannot_be_written_costs_a_line(tmp_path):
    said = []
    (tmp_path / TRACE).symlink_to(tmp_path / "elsewhere")
    profiled = profiled_of(Counted(), tmp_path, updates=7, said=said)
    assert [profiled([], update=number, lr=0.5) for number in range(7)] == list(range(7))
    assert len(said) == 1
    assert said[0].startswith("note: there is no profile: ")
    assert "symbolic link" in said[0]
    assert said[0].endswith("; training is not affected")


def test_another_profiler_costs_a_line(tmp_path):
    said, other = [], trace.started(CPU)
    try:
        profiled = profiled_of(Counted(), tmp_path, updates=7, said=said)
        assert [profiled([], update=number, lr=0.5) for number in range(7)] == list(range(7))
    finally:
        trace.stopped(other)
    assert said == ["note: there is no profile: another profiler is running; training is not affected"]


def test_a_trace_of_very_many_events_has_the_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MOST_EVENTS", 20)
    tracing = trace.started(CPU)
    for _ in range(100):
        torch.ones(4).add(1)
    torch.ones(600, 600) @ torch.ones(600, 600)
    trace.write(trace.stopped(tracing), {}, tmp_path)
    events = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))["traceEvents"]
    assert len(events) == 20
    assert "aten::mm" in [event["name"] for event in events]
    assert {"ph", "ts", "dur", "pid", "tid"} <= set(events[0])


# Whole runs.

RUN = f"train {TINY} --iterations 7 --epoch 1 --model resnet8-cifar"


def weights(folder):
    newest = format.checkpoints_in(folder / "checkpoints")[-1]
    return {path.name: path.read_bytes() for path in newest.rglob("*.safetensors")}


@pytest.mark.parametrize("more", ["", "--enable-recompute --gradient-accumulation 2"])
def test_profiling_changes_no_bit_of_a_run(falconet, tmp_path, more):
    for name, profile in (("plain", ""), ("profiled", "--profile")):
        answer = falconet(f"{RUN} {more} {profile} --run-dir {name}")
        assert answer.code == 0, answer.err
    assert weights(tmp_path / "plain") == weights(tmp_path / "profiled") != {}
    assert not modules._global_forward_hooks
    assert not (tmp_path / "plain" / SUMMARY).exists()


def test_a_profiled_run_has_its_profile_in_the_report(falconet, tmp_path):
    answer = falconet(f"{RUN} --profile --run-dir r")
    assert answer.code == 0, answer.err
    assert answer.out.count("profiled 2 updates of ") == 1
    summary = json.loads((tmp_path / "r" / SUMMARY).read_text())
    assert (summary["processes"], summary["captured"], summary["looked"], summary["last"]) == (1, False, 3, 6)
    named = {name for row in summary["layers"]["rows"] for name in row["names"]}
    assert {"conv1", "bn1", "layer1.0.conv1", "layer3.0.bn2", "fc"} <= named
    html = (tmp_path / "r/report.html").read_text()
    for words in ("Where the time goes", "Costliest operators", "Memory over an update", "Time and memory by layer"):
        assert words in html, words


def test_a_profile_is_small(falconet, tmp_path):
    """Of ResNet-50 with 2 micro-batches: three updates, not compressed and with shapes, took 11 MB."""
    answer = falconet(f"{RUN} --model resnet50 --image-size 32 --gradient-accumulation 2 --profile --run-dir r")
    assert answer.code == 0, answer.err
    assert sum((tmp_path / "r" / name).stat().st_size for name in FILES) < 1e6
    assert (tmp_path / "r" / SUMMARY).stat().st_size < 200e3


@pytest.mark.dist
def test_a_profiled_run_prints_nothing_of_its_libraries(tmp_path):
    """In a process of its own, whose standard error a C++ library may write to."""
    command = [sys.executable, "-m", "falconet", *RUN.split(), "--profile", "--run-dir", str(tmp_path / "r")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=runs.LIMIT, env=os.environ | {"PYTHONWARNINGS": ""}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "profiled 2 updates" in done.stdout
    assert (tmp_path / "r" / TRACE).exists()


@pytest.mark.dist
@pytest.mark.usefixtures("two_cores", "forked_workers")
def test_of_several_processes_the_first_is_profiled(falconet, tmp_path):
    answer = falconet(f"{RUN} --replicas 2 --profile --run-dir r")
    assert answer.code == 0, answer.err
    assert answer.out.count("profiled 2 updates of ") == 1
    summary = json.loads((tmp_path / "r" / SUMMARY).read_text())
    assert summary["processes"] == 2
    assert "communication" in [each["kind"] for each in summary["kinds"]]
    assert "All of it is from the first of 2 processes." in (tmp_path / "r/report.html").read_text()


@pytest.mark.gpu
def test_on_a_gpu_a_captured_run_is_profiled_and_its_bits_are_the_same(falconet, tmp_path):
    line = RUN.replace("--device cpu", "--device cuda")
    for name, profile in (("plain", ""), ("profiled", "--profile")):
        answer = falconet(f"{line} {profile} --run-dir {name}")
        assert answer.code == 0, answer.err
        assert answer.err == ""
    assert weights(tmp_path / "plain") == weights(tmp_path / "profiled") != {}
    summary = json.loads((tmp_path / "profiled" / SUMMARY).read_text())
    assert summary["captured"] is True
    assert summary["device"] == "cuda"
    kinds = {each["kind"]: each["milliseconds"] for each in summary["kinds"]}
    assert kinds["convolution, forward"] > 0
    assert kinds["norm"] > 0
    assert kinds["optimizer"] > 0
    named = {name for row in summary["layers"]["rows"] for name in row["names"] if row["backward"] > 0}
    assert {"conv1", "bn1", "layer1.0.conv1", "fc"} <= named
    assert summary["memory"]["is_whole"] is True
    assert summary["memory"]["peak"] > summary["memory"]["before"] > 0
    assert (tmp_path / "profiled" / TRACE).stat().st_size < 4e6


def test_files_of_a_profile_belong_to_a_run():
    from falconet.train.run_folder import WRITTEN

    assert set(FILES) <= set(WRITTEN)
    assert Path(TRACE).suffix == ".gz"
