"""Captured updates: the same numbers as without a graph, whatever changes between them, and failed captures."""

import gc
import os
import re
import subprocess
import sys
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from falconet.config.commands import TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import load
from falconet.config.settings import from_line
from falconet.data.buffers import Batch
from falconet.evaluation.loss import Loss
from falconet.parallel.batchnorm import Span, over
from falconet.parallel.collectives import join
from falconet.parallel.data_parallel import AveragedReplicas
from falconet.parallel.environment import Place
from falconet.parallel.grid import divide
from falconet.parallel.world import World
from falconet.train import build
from falconet.train.build import BuiltPhase, open_site
from falconet.train.capture import WARM, CapturedStep
from falconet.train.pipeline_step import StagedModel
from falconet.train.placement import WholeModel
from falconet.train.preparation import prepare
from falconet.train.step import Update
from gloo import free_port
from phases import launched
from runs import assert_bitwise, stop_at
from tiny import TINY

# Which updates are captured.


def reason(device="cuda", line="", *, placement=WholeModel):
    options = load(TrainOptions, from_line(line.split(), options_of(TrainOptions))).options
    phase = SimpleNamespace(
        options=options,
        placement=placement,
        site=SimpleNamespace(world=SimpleNamespace(device=torch.device(device))),
    )
    return BuiltPhase.uncaptured.fget(phase)


def test_updates_are_captured_by_default():
    assert reason() is None


@pytest.mark.parametrize("rule", ["sgd", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars"])
def test_updates_of_every_rule_are_captured(rule):
    assert reason(line=f"--optimizer {rule}") is None


def test_updates_of_replicas_are_captured_also_with_sharded_state():
    assert reason(line="--replicas 2") is None
    assert reason(line="--enable-optimizer-rts --replicas 2") is None


def test_what_is_not_captured_has_a_reason():
    assert reason("cpu") == "there is no CUDA device"
    assert reason(line="--no-capture") == "--no-capture"
    assert reason(placement=StagedModel) == "stages of a pipeline wait for one another"
    assert reason(line="--offload-optimizer") == "the optimizer's state is in host memory"


def test_the_switch_has_no_effect_on_a_cpu(falconet):
    answer = falconet(f"train {TINY} --no-capture --plan")
    assert "note: --capture has no effect without --device cuda or auto\n" in answer.out
    assert "updates: " not in answer.out


# When they are captured; CUDA only takes notes here.


class Notes:
    """A device that writes down what it is told, and a step on it."""

    def __init__(self, monkeypatch):
        self.events, self.captures, self.ends, self.note = [], False, True, []
        stream = SimpleNamespace(wait_stream=lambda other: None, device=torch.device("cuda", 0))
        notes = self

        class Graph:
            def capture_begin(self, pool, *, capture_error_mode):
                notes.captures = True
                notes.events.append("capture")

            def capture_end(self):
                notes.captures = False
                if not notes.ends:
                    raise RuntimeError("the capture was ended")

            def replay(self):
                notes.events.append("replay")

        @contextmanager
        def graph(graph, **_):
            yield
            self.events.append("generator reset")

        for name, value in {
            "Stream": lambda device: stream,
            "stream": lambda _: nullcontext(),
            "current_stream": lambda _: stream,
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": Graph,
            "graph": graph,
            "synchronize": lambda _: None,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **more: zeros(*shape, **more))
        for name in ("endAllocateToPool", "releasePool"):
            monkeypatch.setattr(
                torch._C, f"_cuda_{name}", lambda *_, name=name: self.events.append(name), raising=False
            )
        self.model = torch.nn.Linear(2, 2)
        self.moving = SimpleNamespace(model=self.model, at=lambda update, lr: None, uploads=True)
        self.error = None
        self.step = CapturedStep(self, World(device=stream.device), note=self.note.append)

    def prepare_for(self, batch):
        """Nothing is compiled."""

    def make(self, micro_batches):
        self.events.append(f"make {len(micro_batches[0].labels)}")
        if self.captures and self.error:
            raise self.error
        return Update(*(torch.tensor(float(number)) for number in range(5)))

    def update(self, size=4):
        batch = Batch(torch.empty(size, 3, 2, 2), torch.empty(size, dtype=torch.int64), None)
        return self.step([batch], update=0, lr=0.1)


@pytest.fixture
def notes(monkeypatch):
    return Notes(monkeypatch)


def test_a_shape_is_captured_after_an_update_and_then_replayed(notes):
    results = [notes.update() for _ in range(4)]
    assert notes.events == ["make 4", "capture", "make 4"] + ["replay"] * 3
    assert all(result == results[0] for result in results)
    assert results[-1].loss is not results[-2].loss  # the next replay would overwrite it


def test_graphs_go_with_their_step(notes):
    """A communicator cannot be closed while a graph has messages of it, so the garbage collector would be too late."""
    for _ in range(3):
        notes.update()
    graph = weakref.ref(next(iter(notes.step._graphs.values())))
    gc.disable()
    try:
        notes.step = None
        assert graph() is None
    finally:
        gc.enable()


def test_each_size_and_every_change_of_what_is_trained_has_a_graph(notes):
    for _ in range(2):
        notes.update()
    notes.events.clear()
    for _ in range(2):
        notes.update(2)
    notes.update()
    assert notes.events == ["make 2", "capture", "make 2", "replay", "replay"]
    notes.events.clear()
    notes.model.weight.requires_grad_(False)
    for _ in range(2):
        notes.update()
    assert notes.events == ["make 4", "capture", "make 4", "replay"]


@pytest.fixture
def whole(notes):
    """A graph of all weights, in a step whose updates upload nothing; its model has a layer with two modes."""
    notes.model.add_module("dropout", torch.nn.Dropout())
    notes.moving.uploads = False
    notes.step = CapturedStep(notes, World(device=torch.device("cuda", 0)), note=notes.note.append)
    for _ in range(2):
        notes.update()
    notes.events.clear()
    return notes


def test_an_update_of_fewer_weights_is_captured_at_once(whole):
    whole.model.weight.requires_grad_(False)
    for _ in range(2):
        whole.update()
    assert whole.events == ["capture", "make 4", "replay", "replay"]
    whole.events.clear()
    whole.model.bias.requires_grad_(False)
    whole.update()
    assert whole.events == ["capture", "make 4", "replay"]


def test_an_update_that_no_graph_contains_is_made_once_before_it_is_captured(whole):
    whole.model.eval()
    whole.model.weight.requires_grad_(False)
    for _ in range(2):
        whole.update()
    assert whole.events == ["make 4", "capture", "make 4", "replay"], "another mode"
    whole.events.clear()
    for _ in range(2):
        whole.update(2)
    assert whole.events == ["make 2", "capture", "make 2", "replay"], "another size"
    whole.events.clear()
    whole.model.weight.requires_grad_(True)
    for _ in range(2):
        whole.update()
    assert whole.events == ["make 4", "capture", "make 4", "replay"], "more weights"


def test_an_update_is_no_part_of_one_that_was_only_made_without_a_graph(notes):
    notes.moving.uploads = False
    notes.update()
    notes.model.weight.requires_grad_(False)
    notes.update()
    assert notes.events == ["make 4", "make 4"]


def test_fewer_weights_that_cannot_be_captured_at_once_are_after_an_update(whole):
    whole.model.weight.requires_grad_(False)
    whole.error = RuntimeError("not loaded yet")
    whole.update()
    whole.error = None
    whole.update()
    assert whole.events == ["capture", "make 4", "make 4", "capture", "make 4", "replay"]
    assert whole.note == []


def test_fewer_weights_that_can_never_be_captured_end_all_captures(whole):
    whole.model.weight.requires_grad_(False)
    whole.error = RuntimeError("never")
    for _ in range(3):
        whole.update()
    assert whole.events == ["capture", "make 4", "make 4", "capture", "make 4", "make 4", "make 4"]
    assert whole.note == ["note: updates are not captured as CUDA graphs, which takes longer: never"]


@pytest.mark.parametrize(
    ("line", "uploads"),
    [
        ("--optimizer sgd", False),
        ("--optimizer adamw", False),
        ("--model speednet8-cifar --optimizer muon", False),
        ("--model speednet8-cifar --optimizer muon --precision 16.32 --loss-scaling 128", False),
        ("--optimizer sgd --precision 16.32 --loss-scaling 128", True),
        ("--optimizer adamw --precision 16.16", True),
    ],
)
def test_rules_with_tables_of_the_weights_upload_them(line, uploads):
    loaded = load(TrainOptions, from_line(f"{TINY} {line}".split(), options_of(TrainOptions)))
    launch = prepare(loaded)
    phase = BuiltPhase(launch, open_site(launch))
    assert phase.step(phase.new_state()).moving.uploads == uploads


def test_a_step_can_be_asked_for_more_updates_before_it_captures_one(notes):
    step = CapturedStep(notes, World(device=torch.device("cuda", 0)), note=notes.note.append, warm=3)
    notes.step = step
    for _ in range(4):
        notes.update()
    assert notes.events == ["make 4"] * 3 + ["capture", "make 4", "replay"]


def test_an_update_that_cannot_be_captured_is_made_without_a_graph_as_all_after_it(notes):
    notes.error = RuntimeError("CUDA error: operation not permitted\nmore about it")
    for _ in range(4):
        notes.update()
    assert notes.events == ["make 4", "capture"] + ["make 4"] * 4
    assert notes.note == [
        "note: updates are not captured as CUDA graphs, which takes longer: CUDA error: operation not permitted"
    ]


def test_a_capture_that_cuda_ended_leaves_torch_as_it_was(notes):
    notes.error, notes.ends = RuntimeError("no"), False
    for _ in range(2):
        notes.update()
    assert notes.events[1:] == ["capture", "make 4", "endAllocateToPool", "releasePool", "generator reset", "make 4"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), KeyboardInterrupt()])
def test_a_shortage_and_an_interruption_are_no_failed_captures(notes, error):
    notes.update()
    notes.error = error
    with pytest.raises(type(error)):
        notes.update()
    assert (notes.captures, notes.note) == (False, [])


# Updates in a row, and compiled kernels.


def test_updates_in_a_row_are_the_same_bit_for_bit(falconet):
    for number in (1, 3):
        line = f"train {TINY} --ema-half-life 1 --logs-per-epoch 2 --device-iterations {number} --run-dir r{number}"
        assert falconet(line).code == 0
    assert_bitwise(Path("r1"), Path("r3"))
    assert "3 updates in a row, fewer where something is due\n" in Path("r3/plan.txt").read_text()


def test_compiled_kernels_are_kept_in_the_folder(falconet, monkeypatch, tmp_path):
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "before")
    assert falconet(f"train {TINY} --epoch 1 --iterations 1 --model-cache-path compiled/here --run-dir r").code == 0
    assert os.environ["TRITON_CACHE_DIR"] == os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled/here")


@pytest.mark.parametrize("command", ["train", "validate r"])
def test_a_cache_that_is_no_folder_is_answered_with_one_line(falconet, command):
    if command != "train":
        assert falconet(f"train {TINY} --epoch 1 --iterations 1 --run-dir r").code == 0
    Path("file").touch()
    answer = falconet(f"{command} --device cpu --model-cache-path file")
    assert answer.code == 2
    assert answer.err.endswith("--model-cache-path: file: File exists; expected a folder that you may write to\n"), (
        answer.err
    )


# On a GPU.

SMALL = "--data generated --image-size 32 --classes 10 --micro-batch-size 8 --warmup-epoch 0 --device cuda"
UPDATES = 8
CASES = {
    "plain": "--model resnet8-cifar",
    "accumulation": "--model resnet8-cifar --gradient-accumulation 3 --batchnorm-per-update",
    "mixup cutmix": (
        "--model resnet8-cifar --mixup-alpha 0.2 --cutmix-lambda-low 0.3 --cutmix-lambda-high 0.9 --label-smoothing 0.1"
    ),
    "dropout": "--model efficientnet-b0 --efficientnet-dropout 0.3",
    "dropout in half": "--model efficientnet-b0 --precision 16.16 --loss-scaling 128 --gradient-accumulation 2",
    "ema": "--model resnet8-cifar --ema-half-life 1",
    "class weights": "--model resnet8-cifar --class-weights balanced",
    "sgd_combined": "--model resnet8-cifar --optimizer sgd_combined",
    "adamw": "--model resnet8-cifar --optimizer adamw",
    "adamw by depth": "--model resnet8-cifar --optimizer adamw --layer-decay 0.7 --precision 16.16",
    "rmsprop": "--model resnet8-cifar --optimizer rmsprop",
    "rmsprop_tf": "--model resnet8-cifar --optimizer rmsprop_tf --optimizer-eps 0.001",
    "lars": "--model resnet8-cifar --optimizer lars",
    "16.16": "--model resnet8-cifar --precision 16.16 --enable-stochastic-rounding --loss-scaling 128",
    "16.16 lars": "--model resnet8-cifar --precision 16.16 --optimizer lars --loss-scaling 128",
    "16.32": "--model resnet8-cifar --precision 16.32 --optimizer rmsprop_tf --optimizer-eps 0.001",
    "bf16.bf16": "--model resnet8-cifar --precision bf16.bf16 --optimizer adamw --enable-stochastic-rounding",
    "bf16.32": "--model resnet8-cifar --precision bf16.32",
    "stepped scale": (
        "--model resnet8-cifar --precision 16.16 --initial-loss-scaling 64 --loss-scaling 128 --epoch 2 --iterations 4"
    ),
    "automatic scale, skipped updates": (
        "--model resnet8-cifar --precision 16.16 --auto-loss-scaling --loss-scaling 16777216"
    ),
    "recompute": "--model resnet8-cifar --enable-recompute",
    "recompute with drop path": "--model efficientnet-b0 --efficientnet-drop-path 0.3 --enable-recompute",
    "group norm": "--model resnet8-cifar --norm-type group --norm-num-groups 8",
    "muon": "--model speednet8-cifar --optimizer muon",
    **{
        f"freezing, {rule}": (
            f"--model {model} --freeze conv1 --freeze-after 1 --precision 16.32 --loss-scaling 128 --optimizer {rule}"
        )
        for rule, model in (("sgd", "resnet8-cifar"), ("lars", "resnet8-cifar"), ("muon", "speednet8-cifar"))
    },
    **{
        f"freezing, {rule}, without a scale": (
            f"--model {model} --freeze conv1 --freeze-after 1 --precision bf16.32 --ema-half-life 1 --optimizer {rule}"
        )
        for rule, model in (
            ("sgd", "resnet8-cifar"),
            ("adamw", "resnet8-cifar"),
            ("rmsprop", "resnet8-cifar"),
            ("rmsprop_tf", "resnet8-cifar --optimizer-eps 0.001"),
            ("lars", "resnet8-cifar"),
            ("muon", "speednet8-cifar"),
        )
    },
}


def built(line, world=None):
    launch = launched(f"{SMALL} {line}")
    site = open_site(launch)
    return BuiltPhase(launch, replace(site, world=world, grid=divide(world, stages=1)) if world else site)


class Trained:
    """A phase whose updates are made one by one."""

    def __init__(self, line, world=None):
        self.phase = built(line, world)
        self.state = self.phase.new_state()
        self.step = self.phase.step(self.state)
        self.made, self.skipped = [], []

    def update(self, micro_batches):
        number = len(self.made)
        made = self.step(micro_batches, update=number, lr=0.001 * (number + 1))
        self.made.append(made.loss)
        self.skipped.append(made.skipped)

    def updates(self):
        loader = self.phase.placement.loader()
        try:
            return [each for epoch in range(2) for each in loader.updates(epoch)][:UPDATES]
        finally:
            loader.close()

    def tensors(self):
        state = self.state
        found = dict(state.model.state_dict())
        found |= {f"{n}/{slot}": v for n, p in enumerate(state.optimizer.state.values()) for slot, v in p.items()}
        if state.ema:
            found |= {f"ema/{name}": t for name, t in state.ema.state_tensors().items()}
        if state.scale:
            found |= {f"scale/{name}": t for name, t in state.scale.state_tensors().items()}
        return found | {"losses": torch.stack(self.made), "skipped": torch.stack(self.skipped)}


def assert_same(one, other):
    left, right = one.tensors(), other.tensors()
    assert left.keys() == right.keys()
    different = [name for name, tensor in left.items() if not torch.equal(tensor, right[name])]
    assert different == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_captured_updates_are_the_others_bit_for_bit(case, capfd):
    line = f"--iterations 4 --epoch 2 {CASES[case]}"
    captured, plain = Trained(line), Trained(f"{line} --no-capture")
    for micro_batches in captured.updates():
        captured.update(micro_batches)
        plain.update(micro_batches)
    assert_same(captured, plain)
    assert "not captured" not in capfd.readouterr().out


@pytest.fixture
def eager_updates(monkeypatch):
    """Gets the micro-batches of each update that a captured step makes without a graph."""
    made, plain = [], CapturedStep._eager

    def noted(step, micro_batches):
        made.append(micro_batches)
        return plain(step, micro_batches)

    monkeypatch.setattr(CapturedStep, "_eager", noted)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "warm"),
    [
        ("freezing, sgd, without a scale", 1),
        ("freezing, adamw, without a scale", 1),
        ("freezing, muon, without a scale", 1),
        ("freezing, muon", 1),
        ("freezing, sgd", 2),  # whose tables are uploaded
        ("freezing, rmsprop_tf, without a scale", 2),
    ],
)
def test_after_freezing_updates_are_captured_at_once_unless_their_rule_uploads(case, warm, eager_updates, capfd):
    trained = Trained(f"--iterations 4 --epoch 2 {CASES[case]}")
    for micro_batches in trained.updates():
        trained.update(micro_batches)
    assert len(trained.step._graphs) == 2
    assert len(eager_updates) == warm
    assert "not captured" not in capfd.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["plain", "16.16 lars", "sgd_combined"])
def test_batches_of_two_sizes_have_a_graph_each(case, capfd):
    captured, plain = Trained(CASES[case]), Trained(f"{CASES[case]} --no-capture")
    whole = [Trained.updates(captured)[number][0] for number in range(4)]
    for number, size in enumerate([8] * 5 + [4] + [8] * 2 + [4] * 5 + [8, 4, 8, 4]):
        batch = whole[number % 4]
        part = batch._replace(images=batch.images[:size], labels=batch.labels[:size])
        captured.update([part])
        plain.update([part])
    assert_same(captured, plain)
    assert "not captured" not in capfd.readouterr().out


@contextmanager
def no_waits():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["dropout in half", "ema", "rmsprop_tf", "automatic scale, skipped updates"])
def test_no_captured_update_waits_for_the_host(case):
    trained = Trained(f"--iterations 4 --epoch 2 {CASES[case]}")
    updates = trained.updates()
    for micro_batches in updates[: WARM + 1]:
        trained.update(micro_batches)
    with no_waits():
        for micro_batches in updates[WARM + 1 :]:
            trained.update(micro_batches)


RUN = f"train {SMALL} --iterations 6 --epoch 2 --logs-per-epoch 3"
RUNS = {
    "dropout": CASES["dropout"],
    "half": f"{CASES['16.16']} --ema-half-life 1",
    "unfreezing": "--model resnet8-cifar --freeze 2 --unfreeze-after 1 --optimizer adamw --precision 16.16",
    "half resolution": (
        "--model resnet8-cifar --half-res-training --fine-tune-epoch 1 --weight-avg-strategy mean --image-size 64"
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RUNS)
def test_captured_runs_are_the_others_bit_for_bit(falconet, kind):
    captured = falconet(f"{RUN} {RUNS[kind]} --run-dir captured")
    assert captured.code == 0, captured.err
    assert "not captured" not in captured.out
    assert "updates: captured as CUDA graphs\n" in Path("captured/plan.txt").read_text()
    plain = falconet(f"{RUN} {RUNS[kind]} --no-capture --run-dir plain")
    assert "updates: not captured: --no-capture\n" in plain.out
    assert_bitwise(Path("captured"), Path("plain"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dropout", "unfreezing"])
def test_a_restored_run_captures_again_and_continues_bit_for_bit(falconet, monkeypatch, kind):
    assert falconet(f"{RUN} {RUNS[kind]} --run-dir straight").code == 0
    with monkeypatch.context() as patched:
        stop_at(patched, 5)
        assert falconet(f"{RUN} {RUNS[kind]} --run-dir other").code == 130
    assert falconet("restore other").code == 0
    assert_bitwise(Path("straight"), Path("other"))


LATE = f"train {SMALL} --iterations 6 --epoch 3 --log-interval 1000 --checkpoint-save-freq 3 --validation-mode after"


@pytest.mark.gpu
@pytest.mark.parametrize("stopped", [5, 6, 7])
def test_a_run_restored_around_an_epoch_that_is_reported_late_is_the_straight_one(falconet, monkeypatch, stopped):
    line = f"{LATE} {CASES['freezing, muon, without a scale']}"
    straight = falconet(f"{line} --run-dir straight")
    assert straight.code == 0
    with monkeypatch.context() as patched:
        stop_at(patched, stopped)
        first = falconet(f"{line} --run-dir other")
    assert first.code == 130
    second = falconet("restore other")
    assert second.code == 0
    assert_bitwise(Path("straight"), Path("other"))
    rows = [re.findall(r"^ +(\d/3 +\S+ +\S+)", out, re.MULTILINE) for out in (straight.out, first.out + second.out)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3


@pytest.mark.gpu
def test_captured_updates_in_a_row_are_the_same(falconet):
    for number in (1, 4):
        assert falconet(f"{RUN} {RUNS['dropout']} --device-iterations {number} --run-dir r{number}").code == 0
    assert_bitwise(Path("r1"), Path("r4"))


@pytest.fixture
def fail_in_a_capture(monkeypatch):
    """Let every loss that is computed in a capture call `act` with the number of images."""

    def patch(act):
        plain = Loss.scored

        def scored(self, logits, *others, **named):
            if torch.cuda.is_current_stream_capturing():
                act(len(logits))
            return plain(self, logits, *others, **named)

        monkeypatch.setattr(Loss, "scored", scored)
        return lambda: monkeypatch.setattr(Loss, "scored", plain)

    return patch


def invalidate(_):
    torch.ones((), device="cuda").item()  # which CUDA ends the capture for


def refuse(_):
    raise RuntimeError("cannot be captured\nand more lines")


@pytest.mark.gpu
@pytest.mark.parametrize("act", [invalidate, refuse])
def test_a_run_whose_capture_fails_goes_on_without_one(falconet, fail_in_a_capture, act):
    line = f"{RUN} {CASES['dropout']} --optimizer sgd_combined --gradient-accumulation 2 --batchnorm-per-update"
    assert falconet(f"{line} --no-capture --run-dir plain").code == 0
    mend = fail_in_a_capture(act)
    answer = falconet(f"{line} --run-dir failed")
    assert answer.code == 0, answer.err
    assert answer.out.count("note: updates are not captured as CUDA graphs, which takes longer: ") == 1
    assert_bitwise(Path("plain"), Path("failed"))
    mend()  # and the next run of the process is captured
    answer = falconet(f"{line} --run-dir again")
    assert (answer.code, answer.out.count("not captured")) == (0, 0), answer.out
    assert_bitwise(Path("plain"), Path("again"))


@pytest.mark.gpu
def test_memory_that_runs_out_in_a_capture_is_answered_with_what_fits(falconet, fail_in_a_capture):
    def short(images):
        if images > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")

    fail_in_a_capture(short)
    answer = falconet(f"{RUN} {CASES['plain']} --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert "out of memory on the device (tried to allocate 2.00 GiB); " in answer.err
    assert "--micro-batch-size 4 --gradient-accumulation 2 fits here" in answer.err
    assert falconet(f"{RUN} {CASES['plain']} --micro-batch-size 4 --gradient-accumulation 2 --run-dir r").code == 0


@pytest.mark.gpu
@pytest.mark.parametrize("points", ["--logs-per-epoch 1", "--log-interval 1000 --checkpoint-save-freq 2"])
def test_a_loss_that_is_not_finite_ends_a_captured_run_as_any_other(falconet, points):
    """The loss of the second update is; it is read after the sixth, when the seventh is under way with rare points."""
    line = f"train {SMALL} --iterations 6 --epoch 2 {CASES['plain']} --lr 1e20 --validation-mode after {points}"
    answers = [falconet(f"{line} {switch} --run-dir r{switch}") for switch in ("", "--no-capture")]
    assert answers[0].err == answers[1].err
    assert "the loss is nan" in answers[0].err


# Replicas: NCCL takes one process per GPU, so on one GPU a replica exchanges its gradients with itself.

REPLICAS = {
    "accumulation, scale, moving average": (
        "--model resnet8-cifar --precision 16.16 --loss-scaling 128 --gradient-accumulation 3 --ema-half-life 1"
        " --bucket-size 0.05"
    ),
    "fused, automatic scale": "--model efficientnet-b0 --precision 16.16 --auto-loss-scaling --loss-scaling 16777216",
    "sgd_combined": "--model resnet8-cifar --optimizer sgd_combined --gradient-accumulation 2",
    "sharded adamw": "--model resnet8-cifar --optimizer adamw --enable-optimizer-rts --bucket-size 0.05",
    "sharded lars in half": (
        "--model resnet8-cifar --optimizer lars --enable-optimizer-rts --precision 16.16 --loss-scaling 128"
    ),
}
MESSAGES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")


@pytest.fixture(scope="module")
def one_rank():
    """A world of one process that exchanges its gradients over NCCL."""
    environment, hook = dict(os.environ), sys.excepthook
    place = Place(launcher="test", rank=0, size=1, local_rank=0, local_size=1, port=free_port())
    with join(place, torch.device("cuda", 0), timeout=60) as world:
        yield world
    sys.excepthook = hook
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def sent(monkeypatch):
    """The messages that Python sends, by name; `sent.fails` lets the second of every capture fail."""
    found = SimpleNamespace(names=[], fails=False)

    def counted(name, send):
        def message(*args, **kwargs):
            found.names.append(name)
            found.in_capture = found.in_capture + 1 if torch.cuda.is_current_stream_capturing() else 0
            if found.fails and found.in_capture == 2:
                raise RuntimeError("NCCL cannot be captured here")
            return send(*args, **kwargs)

        return message

    found.in_capture = 0
    for name in MESSAGES:
        monkeypatch.setattr(dist, name, counted(name, getattr(dist, name)))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", REPLICAS)
def test_captured_updates_of_a_replica_are_the_others_bit_for_bit(one_rank, sent, case, capfd):
    line = f"--iterations 4 --epoch 2 {REPLICAS[case]}"
    captured, plain = Trained(line, one_rank), Trained(f"{line} --no-capture", one_rank)
    assert isinstance(captured.phase.replicas, AveragedReplicas)
    updates, counts = captured.updates(), []
    for micro_batches in updates:
        before = len(sent.names)
        captured.update(micro_batches)
        counts.append(len(sent.names) - before)
        plain.update(micro_batches)
    assert counts[0] > 1
    # The messages of an update and one more, in which replicas wait for compiled kernels, or agree on the capture.
    assert counts[1] == counts[0]
    assert counts[2:] == [0] * (UPDATES - 2), "the graph has them"
    assert_same(captured, plain)
    assert "not captured" not in capfd.readouterr().out


SPANS = {
    "shortcuts and a pool": "--model resnet18 --gradient-accumulation 2",
    "gates in half": "--model efficientnet-b0 --precision 16.16 --loss-scaling 128 --ema-half-life 1",
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", SPANS)
def test_captured_updates_with_norms_over_replicas_are_the_others_bit_for_bit(one_rank, sent, case, capfd, monkeypatch):
    monkeypatch.setattr(
        build, "span_batchnorm", lambda model, grid, *, span: over(model, Span(grid.world, dist.group.WORLD))
    )
    line = f"--iterations 4 --epoch 2 {SPANS[case]}"
    captured, plain = Trained(line, one_rank), Trained(f"{line} --no-capture", one_rank)
    updates, gathered = captured.updates(), []
    for micro_batches in updates:
        before = sent.names.count("all_gather_into_tensor")
        captured.update(micro_batches)
        gathered.append(sent.names.count("all_gather_into_tensor") - before)
        plain.update(micro_batches)
    norms = captured.phase.placement.fused_norms[0]
    each = 2 * norms * len(updates[0])  # forward and backward
    assert gathered == [each] * (WARM + 1) + [0] * (UPDATES - WARM - 1)
    assert_same(captured, plain)
    assert "not captured" not in capfd.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(("more", "warm"), [("", 1), ("--enable-optimizer-rts --bucket-size 0.05", 2)])
def test_a_replica_captures_fewer_weights_at_once_unless_its_state_is_sharded(
    one_rank, eager_updates, more, warm, capfd
):
    line = f"--iterations 4 --epoch 2 {CASES['freezing, adamw, without a scale']} {more}"
    captured, plain = Trained(line, one_rank), Trained(f"{line} --no-capture", one_rank)
    for micro_batches in captured.updates():
        captured.update(micro_batches)
        plain.update(micro_batches)
    assert len(eager_updates) == warm
    assert_same(captured, plain)
    assert "not captured" not in capfd.readouterr().out


@pytest.mark.gpu
def test_no_captured_update_of_a_replica_waits_for_the_host(one_rank):
    trained = Trained(f"--iterations 4 --epoch 2 {REPLICAS['accumulation, scale, moving average']}", one_rank)
    updates = trained.updates()
    for micro_batches in updates[: WARM + 1]:
        trained.update(micro_batches)
    with no_waits():
        for micro_batches in updates[WARM + 1 :]:
            trained.update(micro_batches)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["accumulation, scale, moving average", "sgd_combined", "sharded adamw"])
def test_a_replica_whose_messages_cannot_be_captured_continues_without_graphs(one_rank, sent, case, capfd):
    line = f"--iterations 4 --epoch 2 {REPLICAS[case]}"
    failed, plain = Trained(line, one_rank), Trained(f"{line} --no-capture", one_rank)
    sent.fails = True
    for micro_batches in failed.updates():
        failed.update(micro_batches)
        plain.update(micro_batches)
    assert_same(failed, plain)
    out = capfd.readouterr().out
    assert out.count("not captured as CUDA graphs, which takes longer: NCCL cannot be captured here") == 1


HANGS = """
import torch
from falconet.parallel import collectives
from falconet.parallel.environment import Place

collectives.MARGIN = 0.0
place = Place(launcher="test", rank=0, size=1, local_rank=0, local_size=1, port=int({port}))
world = collectives.join(place, torch.device("cuda", 0), timeout=2.0)
world.at("update 7")
replayed, graph = world.replay_watch(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    torch.cuda._sleep(1 << 40)
graph.replay()
replayed()
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_a_replay_that_never_ends_ends_its_process_while_it_waits_for_the_device():
    script = HANGS.format(port=free_port())
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "rank 0: timed out after 2 s in update 7: " in done.stderr
