"""On a GPU: updates compile nothing that was not compiled ahead of them."""

import sys

import pytest

from phases import built

pytestmark = pytest.mark.gpu

DATA = "--data generated --classes 10 --micro-batch-size 8 --iterations 3 --epoch 2 --warmup-epoch 0 --device cuda"
HALF = "--precision 16.16 --loss-scaling 128"
CASES = {
    "resnet50": f"--model resnet50 --image-size 224 {HALF}",
    "resnext50": f"--model resnext50 --image-size 64 {HALF} --optimizer lars",
    "efficientnet-b0": "--model efficientnet-b0 --image-size 64 --precision bf16.32 --optimizer adamw",
    "mobilenet-v3-large": f"--model mobilenet-v3-large --image-size 64 {HALF} --optimizer rmsprop_tf",
    "cifar": "--model resnet8-cifar --image-size 32 --precision 32.32",
    "cifar, stochastic rounding": f"--model resnet8-cifar --image-size 32 {HALF} --enable-stochastic-rounding",
    "accumulation, mixup": (
        f"--model resnet8-cifar --image-size 32 {HALF} --mixup-alpha 0.2 --gradient-accumulation 2"
        " --batchnorm-per-update"
    ),
    "rmsprop_tf in fp32": "--model resnet8-cifar --image-size 32 --optimizer rmsprop_tf --optimizer-eps 0.001",
    "recompute": f"--model resnet8-cifar --image-size 32 {HALF} --enable-recompute",
    "group norm": f"--model resnet8-cifar --image-size 32 {HALF} --norm-type group --norm-num-groups 8",
}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Names of the kernels that are compiled, ahead and when they are launched, as if this machine had none."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = {True: [], False: []}

    def note(*, fn, is_manual_warmup, **_):
        names[is_manual_warmup].append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("falconet.")]
    for kernel in (value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)):
        kernel.device_caches.clear()
    return names


@pytest.mark.parametrize("case", CASES)
def test_updates_compile_nothing_that_was_not_compiled_ahead(case, compiled, capfd):
    phase = built(f"{DATA} {CASES[case]}")
    step, loader = phase.step(phase.new_state()), phase.placement.loader()
    try:
        for number, micro_batches in enumerate(each for epoch in range(2) for each in loader.updates(epoch)):
            step(micro_batches, update=number, lr=0.001)
    finally:
        loader.close()
    assert compiled[False] == []
    assert len(set(compiled[True])) > 5 or case == "group norm"
    assert "note: " not in capfd.readouterr().out
