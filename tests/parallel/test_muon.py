"""Muon and whitened first layers in several processes: averaged replicas, stages of a pipeline, what is refused."""

import numpy as np
import pytest
import torch

import gloo
import pipeline_scenarios
from falconet.cli import main

pytestmark = pytest.mark.dist

LINE = (
    "--data generated --classes 10 --image-size 16 --iterations 4 --micro-batch-size 4 --gradient-accumulation 4"
    " --epoch 1 --warmup-epoch 0 --threads 1 --dataloader-workers 0 --device cpu --lr-schedule step"
    " --model speednet8-cifar --speednet-widths 24 24 32 --optimizer muon --lr 0.05 --lr-share fc=20 .*/bias=2"
)
GROUP = f"{LINE} --norm-type group --norm-num-groups 4 --ema-half-life 0.5 --muon-rescale"
HALF = f"{GROUP} --precision 16.16 --loss-scaling 64"  # by the optimizers for scaled gradients


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def found():
    lines = [f"{GROUP} --replicas 2", f"{HALF} --replicas 2", f"{LINE} --pipeline-splits layer2"]
    return gloo.in_world(2, pipeline_scenarios.several, lines)


def test_two_replicas_match_one_with_twice_the_accumulation(found):
    whole = pipeline_scenarios.alone(f"{GROUP} --gradient-accumulation 8")["tensors"]
    for name, values in whole.items():
        np.testing.assert_allclose(found[0][0]["tensors"][name], values, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("number", [0, 1])
def test_replicas_stay_equal(found, number):
    one, other = (found[rank][number]["tensors"] for rank in (0, 1))
    for name in one.keys() & other.keys():
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_stages_match_one_process_bit_for_bit_whitened_filters_included(found):
    alone = pipeline_scenarios.alone(LINE)["tensors"]
    assert found[0][2]["tensors"].keys() == alone.keys()
    for name, values in alone.items():
        np.testing.assert_array_equal(found[0][2]["tensors"][name], values, err_msg=name)
    filters = alone["model:conv1.weight"]
    np.testing.assert_array_equal(filters[:12], -filters[12:])


@pytest.mark.parametrize("option", ["--enable-optimizer-rts", "--offload-optimizer"])
def test_pieces_of_weights_are_refused_in_one_line(option, capsys):
    assert main(["train", *LINE.split(), "--replicas", "2", "--plan", option]) == 2
    assert f"{option}: does not work with --optimizer muon" in capsys.readouterr().err
