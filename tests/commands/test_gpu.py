"""On a CUDA device: no wait for the device in an update, and a restored run that equals the straight one."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from phases import built
from runs import assert_bitwise, stop_at

pytestmark = pytest.mark.gpu

LINE = (
    "--data generated --image-size 32 --classes 10 --iterations 6 --micro-batch-size 16 --gradient-accumulation 2"
    " --epoch 2 --warmup-epoch 0 --device cuda --mixup-alpha 0.2 --cutmix-lambda-low 0.3 --cutmix-lambda-high 0.9"
)
RUNS = {
    "fp32 sgd ema": "--model resnet20-cifar --ema-half-life 1",
    "bf16 adamw": "--model resnet20-cifar --optimizer adamw --lr 0.001 --precision bf16.32",
    "dropout rmsprop_tf": "--model efficientnet-b0 --optimizer rmsprop_tf --lr 0.001 --optimizer-eps 0.001",
    "lars group norm": "--model resnet20-cifar --optimizer lars --norm-type group --norm-num-groups 8",
    "sgd_combined": "--model mobilenet-v3-small --optimizer sgd_combined",
    "16.16 stochastic automatic": (
        "--model resnet20-cifar --precision 16.16 --enable-stochastic-rounding --auto-loss-scaling --loss-scaling 128"
    ),
    "16.32 adamw stepped": (
        "--model resnet20-cifar --precision 16.32 --optimizer adamw --lr 0.001 --loss-scaling 128"
        " --initial-loss-scaling 64"
    ),
    "bf16.bf16 rmsprop_tf": (
        "--model efficientnet-b0 --precision bf16.bf16 --optimizer rmsprop_tf --lr 0.001 --optimizer-eps 0.001"
        " --enable-stochastic-rounding"
    ),
    "16.16 lars fast group norm": (
        "--model resnet20-cifar --precision 16.16 --loss-scaling 128 --optimizer lars --norm-type group"
        " --norm-num-groups 8 --enable-fast-groupnorm"
    ),
    "offloaded adamw": "--model resnet20-cifar --optimizer adamw --lr 0.001 --offload-optimizer --bucket-size 0.1",
    "offloaded 16.16": (
        "--model resnet20-cifar --precision 16.16 --enable-stochastic-rounding --auto-loss-scaling --offload-optimizer"
        " --bucket-size 0.1"
    ),
    "recompute": "--model resnet20-cifar --enable-recompute",
    "stages that share the device": "--model resnet20-cifar --pipeline-splits layer2/0 layer3/0/conv2",
    "one pass": "--model resnet20-cifar --disable-stable-batchnorm",
    "16.16 proxy norm fast group norm": (
        "--model efficientnet-cifar --norm-type group --norm-num-groups 4 --enable-fast-groupnorm --proxy-norm"
        " --precision 16.16 --loss-scaling 128 --optimizer rmsprop_tf --lr 0.001 --optimizer-eps 0.001"
    ),
    "kept proxy norm strided group norm": (
        "--model efficientnet-cifar --norm-type group --norm-num-groups 4 --norm-grouping strided --proxy-norm"
        " --no-proxy-recompute --precision 16.32 --loss-scaling 128"
    ),
    "squeezenet": "--model squeezenet --squeezenet-bypass --precision 16.16 --loss-scaling 128 --lr 0.01",
}


@pytest.mark.parametrize("extra", RUNS.values(), ids=RUNS.keys())
def test_no_update_waits_for_the_device(extra):
    """Warm up until a graph is captured, then run updates with every hidden synchronisation an error."""
    from falconet.train.capture import WARM

    run = built(f"{LINE} {extra}")
    state = run.new_state()
    step = run.step(state)
    loader = run.placement.loader()
    updates = list(loader.updates(0))
    for number, micro_batches in enumerate(updates[: WARM + 1]):
        step(micro_batches, update=number, lr=0.01)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, micro_batches in enumerate(updates[WARM + 1 :], start=WARM + 1):
            step(micro_batches, update=number, lr=0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.parametrize("extra", RUNS.values(), ids=RUNS.keys())
def test_a_run_stopped_on_the_gpu_continues_bit_for_bit(falconet, monkeypatch, extra):
    line = f"train {LINE} {extra} --logs-per-epoch 3"
    assert falconet(f"{line} --run-dir straight").code == 0
    with monkeypatch.context() as patched:
        stop_at(patched, 5)
        assert falconet(f"{line} --run-dir other").code == 130
    assert falconet("restore --checkpoint-input-path other").code == 0
    assert_bitwise(Path("straight"), Path("other"))


@pytest.mark.parametrize("options", ["--decode-device cpu", "--decode-device cuda", "--no-eight-bit-io"])
def test_restore_on_the_gpu_with_photos_continues_bit_for_bit(falconet, image_folder, monkeypatch, options):

    line = (
        "train --data folder --data-dir photos --model resnet20-cifar --image-size 32 --micro-batch-size 4 --epoch 2"
        f" --warmup-epoch 0 --device cuda --logs-per-epoch 3 {options}"
    )
    for number, path in enumerate(sorted(image_folder.rglob("*.png"))):
        Image.open(path).save(path.with_suffix(".jpg"), subsampling=number % 3)
        path.unlink()
    assert falconet(f"{line} --run-dir straight").code == 0
    with monkeypatch.context() as patched:
        stop_at(patched, 7)
        assert falconet(f"{line} --run-dir other").code == 130
    assert falconet("restore --checkpoint-input-path other").code == 0
    assert_bitwise(Path("straight"), Path("other"))
