"""Kernels compiled before they run: exactly those that an update launches, whatever happens meanwhile.

An H200 is only described here: kernels are compiled for it, or looked up, and never launched.
"""

import copy
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from falconet.data.buffers import Batch
from falconet.data.mixing import Mix
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Normalise, Preprocessing
from falconet.evaluation.loss import Loss
from falconet.models import zoo
from falconet.models.fused import fusion, pointwise
from falconet.models.norms import move_once
from falconet.numerics.kernels import FUSED
from falconet.numerics.loss_scale import FixedScale, Offender
from falconet.numerics.precision import REGIMES
from falconet.numerics.recompute import recompute
from falconet.numerics.rounding import Rounding
from falconet.parallel.batchnorm import Span, over
from falconet.train import build
from falconet.train.step import LocalStep, Moving, PlainMove, ScaledMove
from half_rules import optimizer_of

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from falconet.numerics.kernels import compilation  # noqa: E402
from falconet.numerics.kernels.compilation import Compilation  # noqa: E402

SIDE, IMAGES, CLASSES = 32, 2, 10


class H200:
    """What Triton asks a driver before it launches anything."""

    def __init__(self):
        self.launchers = []  # signatures of those that were built
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            load_binary=lambda *args: (object(), object(), 32, 0, 1024),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, src, metadata):
        self.launchers.append(tuple(src.signature.values()))
        return pytest.fail  # which nothing may call

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture(autouse=True)
def described(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "compiled"))
    gpu = H200()
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(pointwise, "_has_room", lambda device: True)
    monkeypatch.setattr(pointwise, "NOISE", 1)
    monkeypatch.setattr(pointwise, "_agree", lambda *pairs, what: True)
    for tried in (pointwise._tried_forward, pointwise._tried_backward):
        tried.cache_clear()
    forget()
    yield gpu
    forget()


def forget():
    """Let every kernel be new to this process."""
    for kernel in (first, second, broken):
        kernel.device_caches.clear()


# What is listed is what an update launches.


class Rehearsed(Compilation):
    """Lists kernels, and compiles none of them."""

    def _compile(self, launches, *, of):
        self.note(launches)


def step_of(name, *, rule="momentum descent", rounding=None, stored=(), change=lambda model: model):
    """A step of the model in bf16, which is fast on a CPU, and otherwise as it is on CUDA."""
    model = change(zoo.build(name, classes=CLASSES, seed=0)).bfloat16().to(memory_format=torch.channels_last).train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.float()
    device = torch.device("cpu")
    optimizer = optimizer_of(rule, list(model.parameters()), rounding)
    optimizer._fuses = True
    move = ScaledMove(model, optimizer, FixedScale(128.0, device=device), offender=Offender(device))
    forward, channels = model, 3
    if stored:
        recompute(model, stored, change=lambda pieces: [piece.model for piece in fusion.fuse_pieces(pieces)])
    else:
        fused = fusion.fuse(model)
        forward, channels = fused.model, fused.channels
    pixels = Preprocessing(image_size=SIDE, resize=SIDE, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    return LocalStep(
        Moving(model=model, move=move),
        normalise=Normalise(pixels, dtype=torch.bfloat16, channels=channels),
        loss=Loss(CLASSES, 0.1),
        regime=REGIMES["32.32"],  # of a CPU, where it leaves formats alone
        forward=forward,
    )


def batch_of(mix=None, side=SIDE):
    images = torch.zeros(IMAGES, 3, side, side, dtype=torch.uint8).to(memory_format=torch.channels_last)
    return Batch(images, torch.zeros(IMAGES, dtype=torch.int64), mix)


def rehearsed(rehearse):
    """The kernels that a rehearsal finds, by Triton's own keys."""
    found = []
    Rehearsed(workers=1, report=print, note=found.extend).ahead(rehearse)
    with asked_for() as keys:
        for launch in found:
            launch.compile()
    assert len(keys) == len(found)  # each once
    return keys


@contextmanager
def asked_for():
    """The keys of kernels that are launched within, none of which runs."""
    keys, run = set(), JITFunction.run

    def look_up(kernel, *args, grid, warmup, **named):
        return run(kernel, *args, grid=grid, warmup=True, **named)

    def missing(*, key, fn, **_):
        keys.add((fn.jit_function.fn.__module__, fn.name, key))
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", look_up)
        patch.setattr(knobs.runtime, "jit_cache_hook", missing)
        yield keys


def launched(step, batch):
    with asked_for() as keys:
        step(2 * [batch], update=0, lr=0.1)
    return keys


@pytest.mark.run
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("resnet50", "momentum descent"),
        ("resnext50", "lars"),
        ("efficientnet-b0", "momentum rmsprop"),
        ("mobilenet-v3-large", "adamw"),
        ("resnet8-cifar", "descent"),
    ],
)
def test_a_rehearsal_finds_exactly_the_kernels_of_an_update(name, rule):
    step, batch = step_of(name, rule=rule), batch_of()
    found = rehearsed(lambda: step.rehearse(batch))
    assert len(found) > 10
    assert found == launched(step, batch)


@pytest.mark.run
def test_a_rehearsal_finds_the_kernels_of_recomputed_segments():
    step, batch = step_of("resnet8-cifar", stored=["layer1", "layer2"]), batch_of()
    found = rehearsed(lambda: step.rehearse(batch))
    assert len(found) > 10
    assert found == launched(step, batch)


def test_a_rehearsal_finds_the_kernels_of_norms_over_replicas_and_exchanges_nothing(monkeypatch):
    span = Span(world=None, group=SimpleNamespace(size=lambda: 2))  # which cannot exchange anything
    step, batch = step_of("resnet8-cifar", change=lambda model: over(model, span)), batch_of()
    found = rehearsed(lambda: step.rehearse(batch))
    assert {module for module, *_ in found} > {"falconet.models.fused.span_kernels"}
    monkeypatch.setattr(Span, "gathered", lambda self, values: values.repeat(2, 1))
    assert found == launched(step, batch)


def test_a_rehearsal_finds_the_kernels_of_mixed_images_and_rounded_weights():
    mix = Mix(torch.ones(IMAGES), torch.zeros(4, dtype=torch.int64))
    step, batch = step_of("resnet8-cifar", rule="adamw", rounding=Rounding(3)), batch_of(mix)
    assert rehearsed(lambda: step.rehearse(batch)) == launched(step, batch)


def test_a_rehearsal_finds_the_kernels_of_an_update_without_a_loss_scale():
    step, batch = step_of("resnet8-cifar", rule="momentum rmsprop"), batch_of()
    move = PlainMove(step.moving.move.optimizer, device=torch.device("cpu"))
    step.moving = replace(step.moving, move=move)
    assert rehearsed(lambda: step.rehearse(batch)) == launched(step, batch)


def test_a_rehearsal_finds_the_kernels_of_what_is_frozen():
    step, batch = step_of("resnet8-cifar"), batch_of()
    whole = rehearsed(lambda: step.rehearse(batch))
    layers = [layer for layer in step.moving.model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers[:4]:
        layer.requires_grad_(False).eval()
    found = rehearsed(lambda: step.rehearse(batch))
    assert found == launched(step, batch)
    assert found != whole


def test_a_rehearsal_changes_nothing():
    step, batch = step_of("resnet8-cifar", rule="adamw"), batch_of()
    model, optimizer = step.moving.model, step.moving.move.optimizer
    move_once(model, micro_batches=2)
    step.forward._forward_pre_hooks = model._forward_pre_hooks
    names, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    momenta = [layer.momentum for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    rehearsed(lambda: step.rehearse(batch))
    assert all(model.get_parameter(name) is parameter for name, parameter in names.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert momenta == [layer.momentum for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert all(parameter.grad is None for parameter in names.values())
    assert not optimizer.state
    assert set(optimizer.parts) == set(names.values())


@pytest.mark.run
def test_a_rehearsal_draws_no_random_numbers():
    step, batch = step_of("efficientnet-b0"), batch_of()
    kinds = {type(layer).__name__ for layer in step.moving.model.modules()}
    assert kinds & {"Dropout", "DropPath", "StochasticDepth"}
    before = torch.get_rng_state()
    rehearsed(lambda: step.rehearse(batch))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_rehearses_each_shape_once():
    step, rehearsals = step_of("resnet8-cifar"), []
    step._prepare = rehearsals.append
    with asked_for():
        for side in (32, 32, 16, 32):
            step([batch_of(side=side)], update=0, lr=0.1)
        assert len(rehearsals) == 2
        for parameter in list(step.moving.model.parameters())[:2]:
            parameter.requires_grad_(False)
        step([batch_of()], update=1, lr=0.1)
    assert len(rehearsals) == 3


# How they are compiled.


@triton.jit(do_not_specialize=["count"])
def first(x, y, count, SIZE: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit
def second(x, SIZE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) + 1)


@triton.jit
def broken(x):
    tl.static_assert(False)


def launch_all():
    x, half = torch.zeros(64), torch.zeros(64, dtype=torch.float16)
    first[(1,)](x, x, 64, SIZE=64, **FUSED)
    first[(1,)](x, x, 63, SIZE=64, **FUSED)  # the same kernel
    first[(1,)](half, x, 64, SIZE=64, **FUSED)
    first[(1,)](x[1:], x, 64, SIZE=64, **FUSED)  # not aligned
    second[(1,)](x, SIZE=64, **FUSED)


KERNELS, SIGNATURES = 4, 3


@contextmanager
def counted():
    """Kernels that are compiled within, not read from disk."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        count = compilation._counted

        @contextmanager
        def both():
            with count() as kept:
                listen = knobs.compilation.listener

                def listener(*, src, cache_hit, **facts):
                    listen(src=src, cache_hit=cache_hit, **facts)
                    made.extend([] if cache_hit else [src.name])

                knobs.compilation.listener = listener
                yield kept

        patch.setattr(compilation, "_counted", both)
        yield made


def compile_ahead(rehearse=launch_all, **facts):
    lines = []
    Compilation(**{"workers": 2, "report": lines.append, "note": lines.append, **facts}).ahead(rehearse)
    return lines


@pytest.mark.run
def test_what_was_compiled_ahead_is_not_compiled_again():
    with counted() as made:
        assert compile_ahead() == []
    assert len(made) == KERNELS
    with asked_for() as keys:
        launch_all()
    assert not keys  # all are loaded


@pytest.mark.run
def test_one_launcher_is_built_ahead_for_each_signature(described):
    compile_ahead()
    assert len(described.launchers) == len(set(described.launchers)) == SIGNATURES


@pytest.mark.run
def test_the_next_process_finds_them_on_disk(monkeypatch):
    begun, submit = [], compilation._Pool.submit
    monkeypatch.setattr(compilation._Pool, "submit", lambda *given: begun.append(submit(*given)) or begun[-1])
    compile_ahead()
    assert [future.exception() for future in begun] == [None] * KERNELS
    forget()
    with counted() as made:
        compile_ahead()
    assert not made


@pytest.mark.run
def test_processes_of_a_host_compile_a_share_each():
    shares = []

    def other():
        forget()
        with counted() as own:
            compile_ahead(number=1, processes=2)
        shares.append(len(own))
        forget()

    with counted() as made:
        compile_ahead(number=0, processes=2, meet=other)
    assert shares == [KERNELS // 2]
    assert len(made) == KERNELS  # of both processes


@pytest.mark.run
def test_what_takes_long_is_reported_once(monkeypatch):
    monkeypatch.setattr(compilation, "PATIENCE", 0.0)
    assert compile_ahead() == [KERNELS]


@pytest.mark.run
def test_a_kernel_that_does_not_compile_is_left_to_its_launch():
    def rehearse():
        broken[(1,)](torch.zeros(1), **FUSED)
        launch_all()

    assert compile_ahead(rehearse) == []
    with asked_for() as keys:
        launch_all()
        assert not keys
        broken[(1,)](torch.zeros(1), **FUSED)
        assert [name for _, name, _ in keys] == ["broken"]


@pytest.mark.run
def test_a_rehearsal_that_fails_costs_a_line():
    def rehearse():
        second[(1,)](torch.zeros(64), SIZE=64, **FUSED)
        raise RuntimeError("no such operator\nand much more")

    said = "note: kernels are compiled when they first run, which takes longer: no such operator"
    assert compile_ahead(rehearse) == [said]
    with asked_for() as keys:
        second[(1,)](torch.zeros(64), SIZE=64, **FUSED)
    assert not keys


@pytest.mark.run
def test_an_interruption_ends_compilation_and_leaves_nothing_half_done(monkeypatch):
    monkeypatch.setattr(compilation, "PATIENCE", 0.0)

    def interrupt(number):
        raise KeyboardInterrupt

    threads = set(threading.enumerate())
    with counted() as made, pytest.raises(KeyboardInterrupt):
        compile_ahead(workers=1, report=interrupt)
    assert len(made) < KERNELS
    assert not set(threading.enumerate()) - threads
    with counted() as rest:
        compile_ahead()
    assert len(rest) == KERNELS - len(made)


def test_other_threads_launch_meanwhile(monkeypatch):
    """Photos are resized on the device by threads of the loader."""
    launches = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **named: launches.append(kernel))

    def rehearse():
        other = threading.Thread(target=lambda: second[(1,)](torch.zeros(64), SIZE=64, **FUSED))
        other.start()
        other.join()

    compile_ahead(rehearse)
    assert launches == [second]


@pytest.mark.run
@pytest.mark.parametrize(("is_shown", "printed"), [(True, ["compiling 4 kernels for resnet50"]), (False, [])])
def test_one_line_names_number_and_network_except_in_the_originals_output(is_shown, printed, monkeypatch):
    monkeypatch.setattr(compilation, "PATIENCE", 0.0)
    lines = []
    site = SimpleNamespace(
        world=SimpleNamespace(size=1, barrier=lambda operation: None), screen=SimpleNamespace(line=lines.append)
    )
    launch = SimpleNamespace(place=None, conventions=SimpleNamespace(shows_compilation=is_shown))
    build._compile_ahead(launch_all, launch=launch, site=site, network="resnet50")
    assert lines == printed
