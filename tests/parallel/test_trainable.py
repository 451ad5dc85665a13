"""Training some of the weights in several processes: frozen stages, sharded state, buckets of the rest."""

import numpy as np
import pytest
import torch

import gloo
import pipeline_scenarios
from falconet.models import zoo

pytestmark = pytest.mark.dist

LINE = (
    "--data generated --classes 10 --image-size 8 --iterations 6 --micro-batch-size 4 --gradient-accumulation 4"
    " --epoch 1 --warmup-epoch 0 --threads 1 --dataloader-workers 0 --device cpu --lr-schedule step"
)
# What is trained, what one process does, and what stages do beside it.
STAGES = {
    "nothing in the first": ("fc", "", "--pipeline-splits layer2/0"),
    "nothing in the last": ("conv1 bn1 layer1/0/conv1", "", "--pipeline-splits layer3/0"),
    "interleaved": (
        "fc layer3",
        "--optimizer adamw",
        "--pipeline-splits layer3/0 --pipeline-schedule interleaved --recompute-mode none",
    ),
    "sequential": (".*bias", "--optimizer sgd_combined", "--pipeline-splits layer2/0 --pipeline-schedule sequential"),
    "skipped weights of lars": (
        "fc layer3",
        "--optimizer lars --lars-skip fc/bias .*bn1",
        "--pipeline-splits layer3/0/conv2",
    ),
    "half": (
        "fc",
        "--precision 16.16 --auto-loss-scaling --loss-scaling 64 --enable-stochastic-rounding --optimizer lars",
        "--pipeline-splits layer2/0",
    ),
    "statistics once an update": (".*", "--batchnorm-per-update", "--pipeline-splits layer2/0"),
    "moving average": ("fc", "--ema-half-life 0.1 --norm-type group --norm-num-groups 4", "--pipeline-splits layer2/0"),
}
REPLICAS = {
    "averaged": "--trainable fc .*bn2",
    "divided": "--trainable fc layer3 --enable-optimizer-rts",
    "divided lars": "--trainable fc layer3 --optimizer lars --enable-optimizer-rts --lars-skip .*bias .*bn./weight",
    "divided half": "--trainable fc layer3 --enable-optimizer-rts --precision 16.16 --loss-scaling 64",
    "statistics without weights": "--trainable fc .*running_.*",
}


def test_sharded_lars_is_refused_where_a_process_has_nothing_to_adapt():
    line = f"{LINE} --replicas 2 --optimizer lars --enable-optimizer-rts --lars-skip conv1 bn1 layer.*"
    errors = gloo.errors_in_world(2, pipeline_scenarios.several, [line], expected=2)
    assert "--lars-skip: leaves too few weights to lars to shard its state over 2 replicas" in errors[0]


GROUP = f"{LINE} --norm-type group --norm-num-groups 4 --trainable fc layer3"  # which a divided batch does not touch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def found():
    """Of both processes: stages first, then replicas."""
    staged = [f"{LINE} {recipe} {stages} --trainable {trained}" for trained, recipe, stages in STAGES.values()]
    replicated = [f"{LINE} --replicas 2 {recipe}" for recipe in REPLICAS.values()]
    lines = [*staged, *replicated, f"{GROUP} --replicas 2"]
    return gloo.in_world(2, pipeline_scenarios.several, lines)


@pytest.mark.parametrize("number", range(len(STAGES)), ids=STAGES.keys())
def test_stages_match_one_process_bit_for_bit(found, number):
    trained, recipe, _ = list(STAGES.values())[number]
    mine, theirs = found[0][number], pipeline_scenarios.alone(f"{LINE} {recipe} --trainable {trained}")
    assert mine["tensors"].keys() == theirs["tensors"].keys()
    for name, values in theirs["tensors"].items():
        np.testing.assert_array_equal(mine["tensors"][name], values, err_msg=name)
    assert (mine["losses"], mine["counts"]) == (theirs["losses"], theirs["counts"])


@pytest.mark.parametrize("number", range(len(REPLICAS)), ids=REPLICAS.keys())
def test_replicas_train_only_the_chosen_weights(found, number):
    line = list(REPLICAS.values())[number]
    result = found[0][len(STAGES) + number]["tensors"]
    kind = torch.float16 if "16.16" in line else torch.float32
    expected = zoo.build("resnet8-cifar", classes=10, seed=0).state_dict()
    moved = set()
    for name, before in expected.items():
        now = torch.from_numpy(result[f"model:{name}"])
        before = before.to(now.dtype if now.dtype == kind else before.dtype)
        if not torch.equal(now, before):
            moved.add(name)
    patterns = {
        "averaged": ("fc.", "bn2."),
        "statistics without weights": ("fc.", "running_", "num_batches_tracked"),
    }.get(list(REPLICAS)[number], ("fc.", "layer3."))
    assert moved == {name for name in expected if any(part in name for part in patterns)}


def test_sharded_state_covers_only_the_trained_weights(found):
    for number in range(len(STAGES), len(STAGES) + len(REPLICAS)):
        names = {name.partition("/")[2] for name in found[0][number]["tensors"] if name.startswith("optimizer:")}
        assert names <= {name for name, _ in zoo.build("resnet8-cifar", classes=10, seed=0).named_parameters()}
        assert not any(name.startswith(("conv1", "bn1", "layer1.0.conv")) for name in names)


SPLIT = f"{GROUP} --replicas 2 --pipeline-splits layer2/0 --loss-scaling 64"  # whose first stage trains nothing


def test_replicas_divide_the_state_of_one_stage_and_nothing_of_another():
    recipes = ["", "--precision 16.16", "--optimizer lars"]
    lines = [f"{SPLIT} {recipe}{divided}" for recipe in recipes for divided in ("", " --enable-optimizer-rts")]
    found = gloo.in_world(4, pipeline_scenarios.several, lines)[0]
    for line, whole, divided in zip(lines[::2], found[::2], found[1::2], strict=True):
        assert_equal(divided, whole, within=1e-6 if "lars" in line else 0)  # its norms are summed in another order


def test_replicas_divide_the_state_of_lars_that_adapts_nothing():
    line = f"{GROUP} --replicas 2 --optimizer lars --lars-skip .*"
    whole, divided = gloo.in_world(2, pipeline_scenarios.several, [line, f"{line} --enable-optimizer-rts"])[0]
    assert_equal(divided, whole)


def assert_equal(divided, whole, *, within=0):
    assert divided["tensors"].keys() == whole["tensors"].keys()
    for name, values in whole["tensors"].items():
        np.testing.assert_allclose(divided["tensors"][name], values, rtol=0, atol=within, err_msg=name)
    np.testing.assert_allclose(divided["losses"], whole["losses"], rtol=0, atol=within)
    assert divided["counts"] == whole["counts"]


def test_two_replicas_match_one_with_twice_the_accumulation(found):
    whole = pipeline_scenarios.alone(f"{GROUP} --gradient-accumulation 8")["tensors"]
    for name, values in whole.items():
        np.testing.assert_allclose(found[0][-1]["tensors"][name], values, rtol=0, atol=2e-6, err_msg=name)
