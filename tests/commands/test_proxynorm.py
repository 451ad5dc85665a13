"""Proxy norm from the command line to the accuracy."""

import json
import re
from pathlib import Path

import pytest
import torch

import runs
from runs import assert_bitwise, state, stop_at
from tiny import TINY

# EfficientNet's seven stages with one block each, 8 to 80 channels wide.
SLIM = (
    "--model efficientnet-cifar --efficientnet-width 0.25 --efficientnet-depth 0.3 --efficientnet-top-width 256"
    " --norm-type group --norm-num-groups 4 --proxy-norm"
)


@pytest.mark.slow
def test_small_network_learns_the_digits(falconet):
    answer = falconet(
        f"train {SLIM} --image-size 16 --epoch 2 --micro-batch-size 32 --optimizer adamw --lr 0.005"
        " --efficientnet-drop-path 0 --warmup-epoch 0.5 --threads 1 --device cpu --run-dir r"
    )
    assert answer.code == 0, answer.err
    assert json.loads(Path("r/summary.json").read_text())["metrics"]["validation/accuracy"] > 55  # chance is 10
    proxies = {
        name: tensor for name, tensor in state(Path("r")).items() if name.endswith(("proxy_scale", "proxy_shift"))
    }
    assert proxies
    assert all(tensor.any() for tensor in proxies.values())  # they are trained, too


@pytest.mark.parametrize("extra", ["--precision 16.16 --loss-scaling 128", "--precision bf16.32 --ema-half-life 1"])
def test_restore_continues_bit_for_bit_and_is_averaged_and_validated(falconet, monkeypatch, extra):
    line = f"train {TINY} {SLIM} {extra} --classes 10 --checkpoints-kept all"
    assert falconet(f"{line} --run-dir straight").code == 0
    with monkeypatch.context() as patched:
        stop_at(patched, 3)
        assert falconet(f"{line} --run-dir other").code == 130
    assert falconet("restore --checkpoint-input-path other").code == 0
    assert_bitwise(Path("straight"), Path("other"))
    assert falconet("average --checkpoint-input-path straight --checkpoint-output-path mean").code == 0
    answer = falconet("validate --checkpoint-input-path mean")
    assert answer.code == 0, answer.err


RECOMPUTED = {
    "in the backward pass": "",
    "kept": "--no-proxy-recompute",
    "with whole blocks": "--enable-recompute",
}


def test_recomputation_changes_no_weight(falconet):
    states = {}
    for name, extra in RECOMPUTED.items():
        run = name.replace(" ", "-")
        answer = falconet(f"train {TINY} {SLIM} --classes 10 --epoch 1 --iterations 2 {extra} --run-dir {run}")
        assert answer.code == 0, answer.err
        states[name] = state(Path(run))
    first, kept, blocks = states.values()
    assert all(torch.equal(tensor, blocks[name]) for name, tensor in first.items())
    for name, tensor in first.items():  # torch's own derivatives add up in another order
        torch.testing.assert_close(kept[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.dist
@pytest.mark.slow
def test_two_stages_train_like_one_process(tmp_path):
    # Without drop path, of which every stage draws its own.
    line = (
        f"train {TINY} {SLIM} --classes 10 --epoch 1 --iterations 2 --gradient-accumulation 2 --precision 16.32"
        " --efficientnet-drop-path 0"
    )
    for name, extra in {"one": "--recompute-mode auto", "two": "--pipeline-splits blocks/4/0/bn2"}.items():
        code, _, err = runs.finish(runs.begin(f"{line} {extra} --run-dir {name}", tmp_path))
        assert code == 0, err
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    weights = {key: tensor for key, tensor in one.items() if key.startswith("model")}
    assert any(key.endswith("proxy_scale") for key in weights)
    for key, tensor in weights.items():
        torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=1e-5)


def test_recomputation_needs_no_more_memory_than_no_proxy_norm(falconet):
    line = f"train {TINY} {SLIM} --plan --recompute-mode auto --micro-batch-size 64"
    predicted = {}
    for name, given in {
        "none": line.replace(" --proxy-norm", ""),
        "recomputed": line,
        "kept": f"{line} --no-proxy-recompute",
    }.items():
        predicted[name] = float(re.search(r"instead of (\S+) GiB", falconet(given).out)[1])
    assert predicted["recomputed"] <= 1.05 * predicted["none"]
    assert predicted["kept"] > 1.3 * predicted["none"]
