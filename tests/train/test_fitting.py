"""Memory that does not suffice: one line with the micro-batch that does, found by trying; predictions; no traceback."""

import errno
import io
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from falconet.bench import model_speed
from falconet.checkpoint import format
from falconet.commands import data_bench
from falconet.config.commands import TrainOptions
from falconet.config.load import load
from falconet.data import buffers, dataset, loader
from falconet.data.buffers import Batch
from falconet.data.input import Input
from falconet.errors import memory_shortage
from falconet.infer.predictor import Predictor
from falconet.models import fusion, zoo
from falconet.numerics.precision import REGIMES
from falconet.parallel.collectives import Processes
from falconet.serve import app, connections
from falconet.serve.batching import _failure
from falconet.train import build, defaults, evaluate, memory, processes, step
from layouts import class_folders
from runs import assert_bitwise, begin, finish, stop_at
from tiny import TINY

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB")
HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you")
SHORTAGES = {
    "torch on the host": HOST,
    "torch on the device": CUDA,
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "python": MemoryError(),
    "numpy": np._core._exceptions._ArrayMemoryError((1 << 40,), np.dtype(np.uint8)),
    "system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "a library": ImportError("libx.so: failed to map segment from shared object: Cannot allocate memory"),
}
AUTO = f"{TINY} --micro-batch-size auto"


@pytest.mark.parametrize("most", range(1, 25))
@pytest.mark.parametrize("total", [1, 7, 24])
def test_the_largest_that_fits_is_found_in_few_trials(most, total):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= most

    sizes = memory.divisors(total)
    assert memory.largest(sizes, fits) == max(size for size in sizes if size <= most)
    assert len(tried) <= 1 + len(sizes).bit_length()
    assert tried[0] == total


def test_nothing_is_found_where_nothing_fits():
    assert memory.largest([2, 3, 6], lambda _: False) is None
    assert memory.largest([], lambda _: True) is None


def test_divisors_leave_partners_for_mixing():
    assert memory.divisors(12) == [1, 2, 3, 4, 6, 12]
    assert memory.divisors(12, least=3) == [3, 4, 6, 12]


@pytest.fixture
def limited(monkeypatch):
    """Let micro-batches of more than some images fail, as if the host had no more memory; returns those tried."""

    def limit(most, error=HOST):
        plain, tried = step.LocalStep.__call__, []

        def until_short(self, batches, *, update, lr):
            tried.append(len(batches[0].labels))
            if tried[-1] > most:
                raise error
            return plain(self, batches, update=update, lr=lr)

        monkeypatch.setattr(step.LocalStep, "__call__", until_short)
        return tried

    return limit


def test_auto_is_the_largest_that_fits_and_trains_as_if_it_had_been_typed(falconet, limited, tmp_path):
    limited(20)
    answer = falconet(f"train {AUTO} --run-dir found")
    assert answer.code == 0, answer.err
    assert "global batch 64 = micro-batch 16 x accumulation 4 x replicas 1\n" in answer.out
    note = "note: --micro-batch-size auto: 16, the largest that fits, for updates of 64 images per replica\n"
    assert note in answer.out
    assert falconet(f"train {TINY} --micro-batch-size 16 --gradient-accumulation 4 --run-dir typed").code == 0
    assert_bitwise(tmp_path / "found", tmp_path / "typed")
    stored = format.verify(format.checkpoints_in(tmp_path / "found")[-1]).config
    assert (stored["micro-batch-size"]["value"], stored["gradient-accumulation"]["value"]) == ("16", "4")


@pytest.mark.parametrize("extra", ["", "--gradient-accumulation 2"])
def test_the_config_of_a_run_states_the_updates_that_auto_found(falconet, limited, extra):
    limited(20)
    assert falconet(f"train {AUTO} {extra} --run-dir r").code == 0
    stated, found = Path("r/config.yaml").read_text(), 8 if extra else 4
    assert "micro-batch-size: 16  # trials of --micro-batch-size auto\n" in stated
    assert f"gradient-accumulation: {found}  # trials of --micro-batch-size auto\n" in stated
    again = falconet("train --config r/config.yaml --plan")
    assert f"global batch {16 * found} = micro-batch 16 x accumulation {found} x replicas 1\n" in again.out


def test_auto_fills_updates_of_several_micro_batches(falconet, limited):
    limited(1000)
    answer = falconet(f"train {AUTO} --gradient-accumulation 2 --plan")
    assert "global batch 128 = micro-batch 128 x accumulation 1 x replicas 1\n" in answer.out


def test_auto_suits_fewer_photos_than_the_config_for_photos_expects(falconet, limited, tmp_path):
    photos = class_folders(tmp_path / "photos")
    limited(100)
    line = f"train {photos} --model resnet8-cifar --pretrained none --image-size 32 --epoch 1 --run-dir r"
    answer = falconet(f"{line} --micro-batch-size auto")
    assert answer.code == 0, answer.err
    assert "fits, for updates of 8 images" in answer.out


def test_auto_keeps_the_updates_of_a_config(falconet, limited):
    Path("mine.yaml").write_text("micro-batch-size: 24\ngradient-accumulation: 2\n")
    limited(20)
    answer = falconet(
        f"train {TINY.replace('--micro-batch-size 8', '')} --config mine.yaml --micro-batch-size auto --plan"
    )
    assert answer.code == 0, answer.err
    assert "global batch 48 = micro-batch 16 x accumulation 3 x replicas 1\n" in answer.out


def test_a_run_that_continues_keeps_what_it_found(falconet, limited, monkeypatch, tmp_path):
    limited(20)
    assert falconet(f"train {AUTO} --run-dir straight").code == 0
    with monkeypatch.context() as stopping:
        stop_at(stopping, 5)
        assert falconet(f"train {AUTO} --run-dir r").code == 130
    tried = limited(1000)  # more would fit now
    answer = falconet("restore --checkpoint-input-path r")
    assert answer.code == 0, answer.err
    assert set(tried) == {16}
    assert_bitwise(tmp_path / "r", tmp_path / "straight")


def test_resume_with_the_same_line_tries_nothing(falconet, limited, monkeypatch):
    limited(20)
    with monkeypatch.context() as stopping:
        stop_at(stopping, 3)
        assert falconet(f"train {AUTO} --run-dir r --resume").code == 130
    tried = limited(1000)
    answer = falconet(f"train {AUTO} --run-dir r --resume")
    assert answer.code == 0, answer.err
    assert set(tried) == {16}
    assert "trying" not in answer.out


def test_restore_can_look_for_another_micro_batch(falconet, limited):
    limited(1000)
    assert falconet(f"train {TINY} --run-dir r").code == 0
    limited(3)
    answer = falconet("restore --checkpoint-input-path r --epoch 3 --micro-batch-size auto")
    assert answer.code == 0, answer.err
    assert "global batch 8 = micro-batch 2 x accumulation 4 x replicas 1\n" in answer.out


def test_auto_refuses_where_nothing_fits(falconet, limited):
    limited(1)
    answer = falconet(f"train {AUTO} --cutmix-lambda-low 0.3 --cutmix-lambda-high 0.9 --run-dir r")
    assert (answer.code, answer.err) == (2, "falconet train: --micro-batch-size auto: not even 2 fits on cpu\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--pipeline-splits layer2/0",
            "--micro-batch-size auto: does not work with --pipeline-splits; expected a number",
        ),
        (
            "--half-res-training --fine-tune-epoch 1 --weight-avg-strategy mean --fine-tune-gradient-accumulation 2",
            "--micro-batch-size auto: --fine-tune-gradient-accumulation needs --fine-tune-micro-batch-size as well",
        ),
    ],
)
def test_auto_says_what_it_cannot_do(falconet, line, message):
    answer = falconet(f"train {AUTO} {line}")
    assert (answer.code, answer.err) == (2, f"falconet train: {message}\n")


def test_both_phases_of_a_half_resolution_run_are_tried(falconet, limited):
    tried = limited(20)
    line = "--half-res-training --fine-tune-epoch 1 --weight-avg-strategy mean --data generated --image-size 32"
    answer = falconet(f"train {AUTO} {line} --plan")
    assert answer.code == 0, answer.err
    assert [tried.count(size) for size in (64, 32, 16)] == [1, 1, 4]  # two updates of both phases
    assert answer.out.count("micro-batch 16 x accumulation 4") == 2


# Out of memory in training.


@pytest.mark.parametrize("at", [0, 5], ids=["first update", "later update"])
def test_out_of_memory_names_the_micro_batch_that_fits(falconet, monkeypatch, at):
    plain = step.LocalStep.__call__

    def until_short(self, batches, *, update, lr):
        if len(batches[0].labels) > 3 and update >= at:
            raise HOST
        return plain(self, batches, update=update, lr=lr)

    monkeypatch.setattr(step.LocalStep, "__call__", until_short)
    answer = falconet(f"train {TINY} --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    newest = "the newest checkpoint is r/checkpoints/resnet8-cifar_generated_1" if at else "there is no checkpoint yet"
    fitting = 4 if at else 2  # a trial makes updates 0 and 1, which only the run from its first update cannot make
    assert answer.err == (
        f"falconet train: out of memory on the host; --micro-batch-size {fitting} --gradient-accumulation"
        f" {8 // fitting} fits here, with the same updates of 8 images; {newest}\n"
    )
    if at:
        continued = f"restore --checkpoint-input-path r --micro-batch-size {fitting - 2} --gradient-accumulation 4"
        assert falconet(continued).code == 0


FINE_TUNED = (
    f"{TINY} --half-res-training --weight-avg-strategy mean --fine-tune-epoch 1 --fine-tune-micro-batch-size 8"
    " --fine-tune-gradient-accumulation 1 --fine-tune-lr 0.1"
)


@pytest.fixture
def limited_at(monkeypatch):
    """Let micro-batches of more than some images of one size fail."""

    def limit(side, most):
        plain = step.LocalStep.__call__

        def until_short(self, batches, *, update, lr):
            if batches[0].images.shape[-1] == side and len(batches[0].labels) > most:
                raise HOST
            return plain(self, batches, update=update, lr=lr)

        monkeypatch.setattr(step.LocalStep, "__call__", until_short)

    return limit


def test_out_of_memory_in_the_fine_tuning_names_its_own_options(falconet, limited_at):
    limited_at(16, 3)
    answer = falconet(f"train {FINE_TUNED} --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    fitting = "--fine-tune-micro-batch-size 2 --fine-tune-gradient-accumulation 4"
    assert f"; {fitting} fits here, with the same updates of 8 images; the newest checkpoint is r/" in answer.err
    continued = falconet(f"restore r {fitting}")
    assert continued.code == 0, continued.err
    assert "global batch 8 = micro-batch 2 x accumulation 4 x replicas 1\n" in continued.out


def test_out_of_memory_that_nothing_avoids_in_the_fine_tuning_names_its_options_too(falconet, limited_at):
    limited_at(16, 0)
    answer = falconet(f"train {FINE_TUNED} --run-dir r")
    assert "; expected a smaller --fine-tune-micro-batch-size with more --fine-tune-gradient-accumulation" in answer.err


@pytest.mark.parametrize("given", ["--fine-tune-micro-batch-size 8", "--fine-tune-gradient-accumulation 1"])
def test_no_micro_batch_is_named_that_would_change_the_updates_of_the_fine_tuning(falconet, limited_at, given):
    limited_at(12, 3)
    both = "--fine-tune-micro-batch-size 8 --fine-tune-gradient-accumulation 1"
    fits = "--micro-batch-size 2 --gradient-accumulation 4 fits here"
    assert fits in falconet(f"train {FINE_TUNED} --run-dir both").err
    answer = falconet(f"train {FINE_TUNED.replace(both, given)} --run-dir one")
    assert answer.err.startswith("falconet train: out of memory on the host; expected a smaller --micro-batch-size")


def test_out_of_memory_that_no_micro_batch_avoids_says_what_else_helps(falconet, limited):
    limited(0)
    answer = falconet(f"train {TINY} --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert answer.err.endswith(
        "; expected a smaller --micro-batch-size with more --gradient-accumulation, a smaller --validation-batch-size,"
        " or --enable-recompute; there is no checkpoint yet\n"
    )


def test_a_trial_includes_the_validation(falconet, monkeypatch):
    plain = memory._validate

    def too_large(built, state, batch):
        if batch > 2:
            raise HOST
        plain(built, state, batch)

    def fail(*_, **__):
        raise HOST

    monkeypatch.setattr(memory, "_validate", too_large)
    monkeypatch.setattr(evaluate, "evaluate", fail)
    answer = falconet(f"train {TINY} --run-dir r")
    assert "; --micro-batch-size 2 --gradient-accumulation 4 fits here" in answer.err


def test_nothing_of_a_failed_run_is_left_when_others_are_tried(falconet, monkeypatch):
    """Weights of the failed run would take the memory that the trials need."""
    import weakref

    built, kept, alive = build.BuiltPhase.new_state, [], []

    def new_state(self):
        alive.append(sum(each() is not None for each in kept))
        made = built(self)
        kept.append(weakref.ref(made.model))
        return made

    def fail(self, batches, *, update, lr):
        raise MemoryError

    monkeypatch.setattr(build.BuiltPhase, "new_state", new_state)
    monkeypatch.setattr(step.LocalStep, "__call__", fail)
    falconet(f"train {TINY} --run-dir r")
    assert len(alive) >= 3
    assert set(alive) == {0}


# Predictions.


def built(line):
    from falconet.config.fields import options_of
    from falconet.config.settings import from_line

    loaded = load(TrainOptions, from_line(line.split(), options_of(TrainOptions)))
    launch = processes.prepare(loaded)
    return build.BuiltPhase(launch, build.open_site(launch))


MODELS = (
    "resnet8-cifar",
    "mobilenet-v3-small",
    "resnet18 --precision bf16.bf16",
    "resnet18 --precision bf16.32",
    "efficientnet-b0 --precision bf16.32",
)


@pytest.mark.parametrize("model", MODELS)
def test_predicted_activations_are_what_a_training_pass_keeps(model):
    phase = built(f"{TINY} --image-size 64 --model {model}")
    made = phase.new_state()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    need = memory.predicted(phase, made.model)
    after = made.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)  # nothing has changed
    kept = {}
    known = {memory._storage(p) for p in (*made.model.parameters(), *made.model.buffers())}
    alive = []

    def keep(tensor):
        alive.append(tensor)
        kept[memory._storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    setup = phase.placement.setup
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        setup.regime.run(made.model.train(), setup.normalise(memory._black(8, 64, setup.device)))
    training = [count for storage, count in kept.items() if storage not in known]
    pixels = 3 * 64 * 64
    weights = 4 * sum(p.numel() for p in made.model.parameters()) * 3  # with gradients and momentum
    beside = 8 * 4 * pixels + 2 * 8 * pixels + (weights if "bf16.bf16" not in model else need.fixed - 2 * 8 * pixels)
    assert sum(training) <= need.of(8) - beside <= sum(training) + max(training)


def test_weights_gradients_and_state_are_predicted_exactly():
    phase = built(f"{TINY} --optimizer adamw --ema-half-life 1")
    weights = sum(p.numel() for p in phase.model.parameters())
    assert memory.predicted(phase, phase.model).fixed == 5 * 4 * weights + 2 * 8 * 3 * 16 * 16


def test_images_that_wait_on_the_device_are_counted_in_updates_and_validations(monkeypatch):
    phase, held = built(TINY), []
    without = memory.predicted(phase, phase.model).fixed
    monkeypatch.setattr(Input, "images_on_device", lambda *_, **__: 5)
    assert memory.predicted(phase, phase.model).fixed == without + 5 * 3 * 16 * 16
    black = memory._black
    monkeypatch.setattr(memory, "_black", lambda images, *rest: held.append(black(images, *rest)) or held[-1])
    memory._try(phase, messages=False)
    assert len(held[0]) == 2 * 8 + 5


def test_weights_cast_by_autocast_are_counted_once_not_per_image():
    line = f"{TINY} --image-size 64 --model resnet50"
    half, full = (built(f"{line} --precision {name}") for name in ("bf16.32", "32.32"))
    need, other = (memory.predicted(phase, phase.model) for phase in (half, full))
    casts = 2 * sum(p.numel() for p in half.model.parameters() if p.ndim > 1)
    assert need.fixed - other.fixed == pytest.approx(casts, rel=0.01)
    assert need.per_image < 0.6 * other.per_image  # with the casts it was more


def test_a_micro_batch_of_one_is_predicted_from_one_image(monkeypatch):
    phase, sizes = built(f"{TINY} --micro-batch-size 1"), []
    black = memory._black
    monkeypatch.setattr(memory, "_black", lambda images, *rest: sizes.append(images) or black(images, *rest))
    assert memory.predicted(phase, phase.model) is not None
    assert sizes == [1]


def test_too_little_memory_is_a_warning_before_the_first_update(falconet, monkeypatch):
    phase = built(TINY)
    need = memory.predicted(phase, phase.model)
    monkeypatch.setattr(memory, "capacity", lambda *_: need.of(5))
    answer = falconet(f"train {TINY} --run-dir r")
    assert answer.code == 0
    (line,) = [line for line in answer.out.splitlines() if "warning" in line]
    assert line.startswith(
        "warning: predicted to need 0.00 GiB, but cpu has 0.00 GiB; --micro-batch-size 4 --gradient-"
    )
    assert line.endswith("--gradient-accumulation 2 is predicted to need 0.00 GiB")
    assert answer.out.index(line) < answer.out.index("train loss")


def test_a_plan_warns_of_too_little_memory(falconet, monkeypatch):
    phase = built(TINY)
    need = memory.predicted(phase, phase.model)
    monkeypatch.setattr(memory, "capacity", lambda *_: need.of(5))
    answer = falconet(f"train {TINY} --plan")
    assert "; --micro-batch-size 4 --gradient-accumulation 2 is predicted to need 0.00 GiB\n" in answer.out
    assert "warning" not in falconet(f"train {TINY} --micro-batch-size 4 --gradient-accumulation 2 --plan").out


STAGED = f"{TINY} --model resnet20-cifar --image-size 64 --gradient-accumulation 16 --pipeline-splits layer2/0"


@pytest.mark.parametrize(
    ("schedule", "size", "advice"),
    [
        ("interleaved", 8, "--pipeline-schedule interleaved is"),
        ("interleaved", 4, "--pipeline-schedule interleaved --micro-batch-size 4 --gradient-accumulation 32 is"),
        ("interleaved", 1, "--pipeline-schedule interleaved --micro-batch-size 1 --gradient-accumulation 128 is"),
    ],
)
def test_stages_that_do_not_fit_are_a_warning_with_what_does(falconet, monkeypatch, schedule, size, advice):
    phase = built(f"{STAGED} --device cpu")
    monkeypatch.setattr(memory, "capacity", lambda *_: sum(phase.placement.needs(size, schedule)) // 2 + 1)
    answer = falconet(f"train {STAGED} --plan")
    (line,) = [line for line in answer.out.splitlines() if "warning" in line]
    assert line.startswith("warning: a stage on average is predicted to need 0.0")
    assert f" GiB for each; {advice}" in line


def test_stages_of_which_nothing_fits_are_a_warning(falconet, monkeypatch):
    monkeypatch.setattr(memory, "capacity", lambda *_: 1000)
    answer = falconet(f"train {STAGED} --plan")
    assert "for each; expected more --pipeline-splits, fewer images per update or smaller ones\n" in answer.out


def test_stages_that_fit_are_not_mentioned(falconet, monkeypatch):
    phase = built(f"{STAGED} --device cpu")
    monkeypatch.setattr(memory, "capacity", lambda *_: sum(phase.placement.needs(8, "grouped")) // 2 + 1)
    assert "warning" not in falconet(f"train {STAGED} --plan").out


def test_the_processes_of_a_plan_share_the_memory_of_the_host(monkeypatch):
    monkeypatch.setattr(memory.host, "available", lambda: 1200)
    assert memory.capacity(torch.device("cpu")) == 1200
    assert memory.capacity(torch.device("cpu"), 4) == 300


def test_enough_memory_is_not_mentioned(falconet):
    assert "predicted" not in falconet(f"train {TINY} --run-dir r").out


def test_recomputed_layers_by_name_are_not_predicted():
    phase = built(f"{TINY} --enable-recompute --recompute-checkpoints layer1/.*")
    assert memory.predicted(phase, phase.model) is None


# No traceback, wherever memory runs out.


@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES)
def test_every_way_to_say_so_is_recognised(shortage):
    where = "device" if "CUDA" in str(shortage) else "host"
    found = memory_shortage(shortage)
    assert found.startswith(f"out of memory on the {where}")
    assert ("2.50 GiB" in found) == (shortage is CUDA)
    assert ("1.00 TiB" in found) == isinstance(shortage, np._core._exceptions._ArrayMemoryError)


@pytest.mark.parametrize("other", [RuntimeError("no"), OSError(errno.ENOENT, "no"), ValueError("out of memory")])
def test_other_errors_are_not_taken_for_it(other):
    assert memory_shortage(other) is None


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


PLACES = {
    "opening data": (dataset, "open_dataset", "train {tiny} --run-dir r", defaults),
    "building a model": (build.BuiltPhase, "new_state", "train {tiny} --run-dir r", None),
    "a loader thread": (buffers.PixelRows, "read", "train {tiny} --run-dir r", None),
    "pinned buffers": (loader.Resources, "batch_for", "train {tiny} --run-dir r", None),
    "saving": (format, "write", "train {tiny} --run-dir r", None),
    "measuring speed": (model_speed, "_held", "bench infer {tiny}", None),
    "measuring data": (data_bench, "_pipeline", "data bench --data digits --device cpu", None),
}


@pytest.mark.parametrize("shortage", [CUDA, MemoryError(), SHORTAGES["system"]], ids=["torch", "python", "system"])
@pytest.mark.parametrize("place", PLACES)
def test_running_out_of_memory_is_one_line(falconet, monkeypatch, place, shortage):
    owner, name, line, importer = PLACES[place]
    monkeypatch.setattr(importer or owner, name, failing(shortage))
    if place == "measuring speed":
        monkeypatch.setattr(model_speed, "BatchShape", failing(shortage))
    answer = falconet(line.format(tiny=TINY if "train" in line else "--data generated --image-size 8 --device cpu"))
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert ": out of memory on the " in answer.err


@pytest.mark.parametrize("command", ["validate", "average", "restore"])
def test_running_out_of_memory_with_a_checkpoint_is_one_line(falconet, monkeypatch, command):
    assert falconet(f"train {TINY} --run-dir r").code == 0
    monkeypatch.setattr(format, "read_tensors", failing(MemoryError()))
    more = {"restore": " --epoch 3", "average": " --weight-avg-N 1"}.get(command, "")
    answer = falconet(f"{command} --checkpoint-input-path r{more}")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert "out of memory on the host" in answer.err


def test_a_server_that_does_not_fit_says_so_when_it_starts(falconet, monkeypatch):
    monkeypatch.setattr(Predictor, "lanes", failing(CUDA))
    answer = falconet(
        "serve --model resnet8-cifar --image-size 8 --classes 5 --port 0 --threads 1 --device cpu --engine torch"
    )
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert answer.err.startswith("falconet serve: out of memory on the device (tried to allocate 2.50 GiB)")


@pytest.mark.parametrize(("error", "lines"), [(CUDA, 1), (RuntimeError("no"), 3)])
def test_a_server_logs_a_shortage_in_one_line_and_a_fault_with_its_traceback(error, lines):
    import asyncio

    async def handler(_):
        raise _failure(error)

    written = io.StringIO()
    logged = logging.StreamHandler(written)
    connections.LOG.addHandler(logged)
    try:
        answer = asyncio.run(app._in_one_line(SimpleNamespace(), handler))
    finally:
        connections.LOG.removeHandler(logged)
    assert answer.status == 500
    assert (written.getvalue().count("\n") == 1) == (lines == 1)
    assert ("Traceback" in written.getvalue()) == (lines > 1)


@pytest.mark.parametrize("error", [CUDA, SHORTAGES["cublas"]])
def test_a_shortage_among_processes_is_not_taken_for_a_lost_one(error):
    world = object.__new__(Processes)
    object.__setattr__(world, "alive", SimpleNamespace(doing=""))
    with pytest.raises(type(error), match=r"CUDA"), world.waiting("summing"):
        raise error


@pytest.mark.dist
def test_replicas_agree_on_a_micro_batch(tmp_path):
    """One of two processes has less memory."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK'):\n"
        "    most = 40 if os.environ['RANK'] == '0' else 10\n"
        "    from falconet.train import step\n"
        "    plain = step.LocalStep.__call__\n"
        "    def until_short(self, batches, *, update, lr):\n"
        "        if len(batches[0].labels) > most:\n"
        "            raise MemoryError\n"
        "        return plain(self, batches, update=update, lr=lr)\n"
        "    step.LocalStep.__call__ = until_short\n"
    )
    line = f"train {AUTO} --replicas 2 --epoch 1 --run-dir r"
    code, out, err = finish(begin(line, tmp_path, variables={"PYTHONPATH": str(tmp_path)}))
    assert code == 0, err
    assert "global batch 128 = micro-batch 8 x accumulation 8 x replicas 2\n" in out


# On a GPU.

GPU = "--data generated --image-size 224 --classes 1000 --iterations 2 --epoch 1 --warmup-epoch 0 --device cuda"


@pytest.fixture
def small_device():
    """A device with as much memory as is asked for, GiB."""
    whole = torch.cuda.get_device_properties(0).total_memory

    def limit(gigabytes):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(gigabytes * 2**30 / whole)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    memory.release(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32.32", "16.32 --loss-scaling 128"])
def test_a_small_device_gets_the_micro_batch_that_fits(falconet, small_device, precision):
    line = f"train {GPU} --model resnet50 --precision {precision}"
    small_device(4)
    answer = falconet(f"{line} --micro-batch-size 128 --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert "out of memory on the device" in answer.err
    fitting = answer.err.partition("); ")[2].partition(" fits here")[0]
    again = falconet(f"{line} {fitting} --run-dir again")
    assert again.code == 0, again.err
    found = falconet(f"{line} --micro-batch-size auto --gradient-accumulation 2 --run-dir found")
    assert found.code == 0, found.err
    size = int(found.out.partition("= micro-batch ")[2].split()[0])
    assert int(fitting.split()[1]) <= size < 128  # the line is careful: it must be right without a second trial


def kept_by(model, precision, *, side):
    """Bytes of each tensor that the backward pass of the fused model keeps, of one image and for each further one."""
    fused, regime = fusion.fuse(model).model, REGIMES[precision]

    def forward(images, keep):
        regime.run(memory._Fused(fused, keep).run, torch.zeros(images, side, side, 3).permute(0, 3, 1, 2))

    one, two = (memory._saved(model, partial(forward, images)) for images in (1, 2))
    return one, [more - less for less, more in zip(one, two, strict=True)]


@pytest.mark.run
def test_a_fused_group_norm_keeps_as_much_as_a_fused_batch_norm():
    batch, group = (
        zoo.build("resnet8-cifar", classes=10, seed=0, norm_type=norm, norm_num_groups=4) for norm in ("batch", "group")
    )
    (_, each), (_, other) = (kept_by(model, "32.32", side=32) for model in (batch, group))
    assert sorted(each) == sorted(other)


@pytest.mark.run
@pytest.mark.parametrize(
    ("name", "precision", "allocated"),  # GiB, on an H200, 64 images of 224 x 224, with sgd
    [("resnet18", "32.32", 1.36), ("resnet18", "bf16.32", 0.81), ("mobilenet-v3-large", "32.32", 2.47)],
)
def test_what_fused_layers_keep_is_what_they_were_seen_to_take(name, precision, allocated):
    model = zoo.build(name, classes=1000, seed=0)
    one, growth = kept_by(model, precision, side=224)
    state = 3 * 4 * sum(weight.numel() for weight in model.parameters())  # weights, gradients, velocities
    need = state + sum(one) - sum(growth) + 64 * (sum(growth) + max(growth) + 18 * 224 * 224)
    assert 0.9 < need / (allocated * 2**30) < 1.1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model",
    ["resnet18", "resnet50", "efficientnet-b0", "mobilenet-v3-large", "resnet50 --norm-type group"],
)
@pytest.mark.parametrize("precision", ["32.32", "16.32", "bf16.32"])
def test_the_prediction_is_near_what_torch_allocates(model, precision):
    """Prints both, for docs/using/troubleshooting.md."""
    phase = built(f"{GPU} --model {model} --precision {precision} --micro-batch-size 64")
    made = phase.new_state()
    need = memory.predicted(phase, made.model).of(64)
    memory.release(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    stepping, held = phase.step(made), [memory._black(128, 224, torch.device("cuda"))]
    batch = Batch(memory._black(64, 224, torch.device("cuda")), torch.zeros(64, dtype=torch.int64, device="cuda"), None)
    for update in range(2):
        stepping([batch], update=update, lr=0.0)
    peak = torch.cuda.max_memory_allocated()
    print(f"{model} {precision}: predicted {need / 2**30:.2f} GiB, allocated {peak / 2**30:.2f} GiB, {need / peak:.2f}")
    del held
    assert 0.6 < need / peak < 1.2


def test_the_run_folder_of_a_run_that_did_not_fit_is_usable(falconet, limited):
    limited(3)
    assert falconet(f"train {TINY} --run-dir r").code == 2
    answer = falconet(f"train {TINY} --micro-batch-size 2 --gradient-accumulation 4 --run-dir r")
    assert answer.code == 0, answer.err
    assert Path("r/summary.json").exists()
