"""Stages in separate processes match one process with the same accumulation."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import gloo
import pipeline_scenarios
from falconet.parallel.pipeline import in_flight
from falconet.train import processes

pytestmark = pytest.mark.dist

LINE = (
    "--data generated --classes 10 --image-size 8 --iterations 6 --micro-batch-size 4 --gradient-accumulation 4"
    " --epoch 1 --warmup-epoch 0 --threads 1 --dataloader-workers 0 --device cpu --lr-schedule step --max-restarts 3"
)
GROUP = f"{LINE} --norm-type group --norm-num-groups 4"

# What one process does with the first part, stages do with both.
TWO_STAGES = {
    "grouped": ("", "--pipeline-splits layer2/0"),
    "interleaved": ("", "--pipeline-splits layer2/0 --pipeline-schedule interleaved"),
    "sequential": ("", "--pipeline-splits layer2.0 --pipeline-schedule sequential"),
    "inside a block": ("", "--pipeline-splits layer2/0/conv2"),
    "measured": ("", "--pipeline-splits auto:2"),
    "nothing recomputed": ("", "--pipeline-splits layer2/0/bn2 --recompute-mode none"),
    "some layers kept": ("", "--pipeline-splits layer2/0 --enable-recompute --recompute-checkpoints .*conv.* add"),
    "mixed": (
        "--mixup-alpha 0.4 --cutmix-lambda-low 0.3 --cutmix-lambda-high 0.8 --label-smoothing 0.1 --ema-half-life 0.1",
        "--pipeline-splits layer2/0 --pipeline-schedule interleaved",
    ),
    "adamw": ("--optimizer adamw --norm-type group --norm-num-groups 4", "--pipeline-splits layer3/0"),
    "combined": ("--optimizer sgd_combined", "--pipeline-splits layer2/0 --pipeline-schedule interleaved"),
    "one pass": ("--disable-stable-batchnorm --input-image-padding", "--pipeline-splits layer3/0"),
    "loss scale": ("--loss-scaling 1024 --optimizer lars", "--pipeline-splits layer2/0"),
    "half": (
        "--precision 16.16 --auto-loss-scaling --loss-scaling 64 --enable-stochastic-rounding",
        "--pipeline-splits layer2/0",
    ),
    "bf16": ("--precision bf16.32", "--pipeline-splits layer2/0/conv2 --pipeline-schedule interleaved"),
    "torn photo": (
        "--data folder --data-dir {photos} --image-size 16 --gradient-accumulation 2 --check-images no"
        " --bad-images-allowed 9",
        "--pipeline-splits layer2/0",
    ),
    "synthetic": ("--data synthetic --mixup-alpha 0.4", "--pipeline-splits layer2/0"),
}


def same(found, expected, tolerance=0.0):
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, values in expected["tensors"].items():
        np.testing.assert_allclose(found["tensors"][name], values, rtol=0, atol=tolerance, err_msg=name)
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=tolerance)
    assert found["counts"] == expected["counts"]
    for figure in ("evaluation", "averaged"):
        if expected[figure] is not None:
            mine, theirs = found[figure], expected[figure]
            assert (mine.images, mine.top1, mine.top5) == (theirs.images, theirs.top1, theirs.top5)
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-6)


@pytest.fixture(autouse=True)
def one_thread():
    """As the processes have: the number changes bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photos of two classes, of which one in training and one in validation are torn."""
    home, noise = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for label in ("dark", "light"):
            folder = home / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                path = folder / f"{number}.png"
                Image.fromarray(noise.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
                if (label, number) == ("light", 1):
                    path.write_bytes(path.read_bytes()[:100])
    return home


@pytest.fixture(scope="module")
def two_stages(photos):
    lines = [f"{LINE} {recipe} {stages}".format(photos=photos) for recipe, stages in TWO_STAGES.values()]
    return gloo.in_world(2, pipeline_scenarios.several, lines)


@pytest.mark.parametrize("number", range(len(TWO_STAGES)), ids=TWO_STAGES.keys())
def test_two_stages_match_one_process_bit_for_bit(two_stages, photos, number):
    recipe, _ = list(TWO_STAGES.values())[number]
    found, last = two_stages[0][number], two_stages[1][number]
    same(found, pipeline_scenarios.alone(f"{LINE} {recipe}".format(photos=photos)))
    assert found["read"] != "IdleLoader"
    assert last["read"] == "IdleLoader"  # photos are decoded where they are needed


def test_an_unreadable_image_does_not_count_on_the_last_stage(two_stages):
    found = two_stages[0][list(TWO_STAGES).index("torn photo")]
    assert found["evaluation"].images == 9
    assert [Path(name).name for name in found["evaluation"].left_out] == ["1.png"]
    assert sum(images for _, images, _ in found["counts"]) == 3 * 8 - 1


def test_a_gradient_that_is_not_finite_on_one_stage_is_reported_on_all():
    found = gloo.in_world(2, pipeline_scenarios.non_finite)
    assert found == [[(False, -1), (True, 4), (True, 1)]] * 2


def test_every_process_has_the_loss_and_counts_at_a_log_point(two_stages):
    for first, last in zip(*two_stages, strict=True):
        assert first["losses"] == last["losses"]
        assert first["counts"] == last["counts"]
        # Each process names the images that it could not read itself.
        assert replace(first["evaluation"], left_out=()) == last["evaluation"]


def test_plan_lists_layers_weights_and_memory_per_stage(two_stages):
    number = list(TWO_STAGES).index("interleaved")
    lines = two_stages[0][number]["lines"]
    begin = lines.index(
        "pipeline of 2 stages, interleaved: 4 micro-batches per update; each stage recomputes its blocks"
    )
    assert lines[begin + 1].startswith(
        "stage 0: conv1 to layer1/0/relu2, 5,136 parameters, 2 micro-batches in flight, "
    )
    assert lines[begin + 2].startswith("stage 1: layer2/0/conv1 to fc, 70,154 parameters, 1 micro-batch in flight, ")
    assert lines[begin + 2].endswith(" GiB predicted")


def test_micro_batches_in_flight_are_started_and_unfinished_ones():
    stages, kinds = range(4), ("grouped", "interleaved", "sequential")
    found = {kind: [in_flight(kind, stage=s, stages=4, micro_batches=1024) for s in stages] for kind in kinds}
    assert found == {"grouped": [8, 7, 6, 5], "interleaved": [4, 3, 2, 1], "sequential": [1, 1, 1, 1]}
    assert in_flight("interleaved", stage=0, stages=4, micro_batches=3) == 3
    assert in_flight("grouped", stage=0, stages=4, micro_batches=6) == 6


@pytest.mark.parametrize("micro_batches", [2, 6, 20])
def test_grouped_holds_at_most_twice_the_stages(micro_batches):
    found = gloo.in_world(4, pipeline_scenarios.flights, "grouped", micro_batches)
    expected = [in_flight("grouped", stage=s, stages=4, micro_batches=micro_batches) for s in range(4)]
    assert [most for most, _, _ in found] == expected
    assert [left for _, left, _ in found] == [0, 0, 0, 0]
    one_at_a_time = gloo.in_world(4, pipeline_scenarios.flights, "sequential", micro_batches)
    for (_, _, mine), (_, _, theirs) in zip(found, one_at_a_time, strict=True):
        np.testing.assert_array_equal(mine, theirs)


MESHES = {  # replicas x stages -> one process with the same global batch
    "4 stages": (
        f"{LINE} --pipeline-splits layer1/0/conv2 layer2/0 layer3/0/bn1 --pipeline-schedule interleaved",
        LINE,
        0.0,
    ),
    "2 x 2": (
        f"{GROUP} --ema-half-life 0.1 --replicas 2 --gradient-accumulation 2 --pipeline-splits layer2/0",
        f"{GROUP} --ema-half-life 0.1",
        1e-6,
    ),
    "4 stages, grouped": (
        f"{LINE} --gradient-accumulation 12 --pipeline-splits layer1/0/conv2 layer2/0 layer3/0/bn1",
        f"{LINE} --gradient-accumulation 12",
        0.0,
    ),
    "any model of timm": (
        f"{LINE} --model timm:regnetx_002 --image-size 32 --pipeline-splits s1/b1 s2/b1/conv2 s3/b2",
        f"{LINE} --model timm:regnetx_002 --image-size 32",
        0.0,
    ),
}
SPAN = (
    f"{LINE} --gradient-accumulation 2 --batchnorm-span 2 --replicas 2 --pipeline-splits layer2/0/conv2"
    " --pipeline-schedule interleaved --enable-optimizer-rts --bucket-size 0.05"
)
SPANNING = {
    "no scale": SPAN,
    "everything": f"{SPAN} --loss-scaling 1024",
}


@pytest.fixture(scope="module")
def four_processes():
    lines = [*(line for line, _, _ in MESHES.values()), *SPANNING.values()]
    return gloo.in_world(4, pipeline_scenarios.several, lines, 2)[0]


@pytest.mark.parametrize("number", range(len(MESHES)), ids=MESHES.keys())
def test_replicas_times_stages_match_one_process(four_processes, number):
    _, line, tolerance = list(MESHES.values())[number]
    same(four_processes[number], pipeline_scenarios.alone(line, updates=2), tolerance)


@pytest.mark.parametrize("number", range(len(SPANNING)), ids=SPANNING.keys())
def test_batch_norm_over_replicas_of_a_stage_matches_one_process(four_processes, number):
    recipe = f"{LINE} --micro-batch-size 8 --gradient-accumulation 2" + (" --loss-scaling 1024" if number else "")
    expected = pipeline_scenarios.together(recipe, replicas=2, updates=2)
    same(four_processes[len(MESHES) + number], expected, 1e-6)


MIXED = "--mixup-alpha 0.4 --cutmix-lambda-low 0.3 --cutmix-lambda-high 0.8"
FOLDED = {  # with batch norm over replicas: four processes against fewer, whose micro-batches run together
    "a span in each process": f"{LINE} --gradient-accumulation 2 --replicas 4 --batchnorm-span 2",
    "a span of two processes": f"{LINE} --gradient-accumulation 1 --replicas 4 --batchnorm-span 4",
    "mixed": f"{LINE} --gradient-accumulation 2 --replicas 4 --batchnorm-span 2 {MIXED}",
    "once per update": f"{LINE} --gradient-accumulation 2 --replicas 4 --batchnorm-span 2 --batchnorm-per-update",
}


@pytest.fixture(scope="module")
def spans():
    lines = list(FOLDED.values())
    return [gloo.in_world(size, pipeline_scenarios.several, lines, 2)[0] for size in (4, 2)]


@pytest.mark.parametrize("number", range(len(FOLDED)), ids=FOLDED)
def test_batch_norm_over_folded_replicas_matches_as_many_processes(spans, monkeypatch, number):
    monkeypatch.setattr(processes, "devices_of", lambda _: (1, "1 device is available"))
    real, halved = (each[number] for each in spans)
    alone = pipeline_scenarios.alone(list(FOLDED.values())[number], updates=2)
    for found in (halved, alone):
        same(_without_running(found), _without_running(real), 2e-6)


def _without_running(found):
    """Folded replicas move batch norm's running statistics one after the other, with or without a span."""
    tensors = {name: t for name, t in found["tensors"].items() if "running_" not in name and "tracked" not in name}
    return {**found, "tensors": tensors, "evaluation": None}


def test_running_statistics_are_those_of_the_span_where_all_of_it_is_folded(spans, monkeypatch):
    monkeypatch.setattr(processes, "devices_of", lambda _: (1, "1 device is available"))
    number = list(FOLDED).index("a span of two processes")
    same(pipeline_scenarios.alone(list(FOLDED.values())[number], updates=2), spans[0][number], 2e-6)


@pytest.mark.parametrize("mixed", ["", MIXED], ids=["plain", "mixed"])
def test_batch_norm_over_folded_replicas_in_stages_matches_one_process(monkeypatch, mixed):
    monkeypatch.setattr(processes, "devices_of", lambda _: (1, "1 device is available"))
    line = f"{LINE} --gradient-accumulation 2 --replicas 4 --batchnorm-span 2 --ema-half-life 0.1 {mixed}"
    (found,) = gloo.in_world(2, pipeline_scenarios.several, [f"{line} --pipeline-splits layer2/0/conv2"], 2)[0]
    same(found, pipeline_scenarios.alone(line, updates=2))
    assert (
        "pipeline of 2 stages, grouped: 4 micro-batches per update; each stage recomputes its blocks" in found["lines"]
    )


def test_a_run_moved_from_two_stages_to_one_process_to_four_is_unchanged(tmp_path):
    recipe = f"{GROUP} --ema-half-life 0.1 --optimizer adamw"
    first, second = str(tmp_path / "first" / "c"), str(tmp_path / "second" / "c")
    line = f"{recipe} --pipeline-splits layer2/0 --pipeline-schedule interleaved"
    gloo.in_world(2, pipeline_scenarios.saving, line, 2, None, first)
    pipeline_scenarios.alone("--pipeline-splits", updates=1, checkpoint=first, save=second)
    line = "--replicas 2 --pipeline-splits layer3/0 --pipeline-schedule grouped"
    found = gloo.in_world(4, pipeline_scenarios.saving, line, 2, second, None)[0]
    straight = pipeline_scenarios.alone(recipe, updates=5)
    same(found, {**straight, "losses": straight["losses"][3:], "counts": straight["counts"][3:]}, 1e-6)


LEAVING = {
    # Of 24 validation images in batches of 4: six on each stage. The answer comes one batch late.
    "the first stage asks": (2, "", 0, 2, [("left", 4, 24)] * 2),
    "the last stage asks": (2, "", 1, 2, [("left", 4, 24)] * 2),
    "neither asks": (2, "", 9, 0, [(24, 6, 24)] * 2),
    "too late": (2, "", 0, 5, [(24, 6, 24)] * 2),
    # The other replica counts all of its images and stops after that.
    "one of two replicas asks": (4, "--replicas 2", 1, 0, [("left", 2, 48)] * 2 + [("left", 6, 48)] * 2),
}


@pytest.mark.parametrize(("size", "more", "rank", "after", "expected"), LEAVING.values(), ids=LEAVING)
def test_all_stages_leave_a_stopped_validation_at_the_same_batch(size, more, rank, after, expected):
    line = f"{LINE} --iterations 15 --pipeline-splits layer2/0 {more}"
    assert gloo.in_world(size, partial(pipeline_scenarios.left, rank=rank, after=after), line) == expected
