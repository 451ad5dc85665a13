"""`falconet data bench`: every step with a number, the slowest named, on any data."""

import json
import re
from pathlib import Path

import pytest

from falconet.data.measure import BATCH, COPY, DECODE, READ, TOGETHER, Stage, limiting

FAST = "--seconds 0.05 --micro-batch-size 8 --device cpu"


@pytest.mark.usefixtures("image_folder")
@pytest.mark.parametrize("split", ["train", "validation"])
def test_stages_of_photos_are_measured_and_the_slowest_named(falconet, split):
    line = (
        f"data bench --data folder --data-dir photos --image-size 32 {FAST} --split {split} --output r.json --passes 2"
    )
    answer = falconet(line)
    assert answer.code == 0, answer.err
    for stage in (READ, DECODE, BATCH, TOGETHER):
        assert re.search(rf"^{stage} +[\d,]+  ", answer.out, re.M), answer.out
    assert re.search(rf"^{COPY} +-  the images are not copied$", answer.out, re.M)
    named = re.search(r"^limited by: (.*)$", answer.out, re.M)[1]
    rates = re.findall(r"^Throughput of the iteration:(\d+\.\d) img/sec$", answer.out, re.M)
    mean = re.search(r"^mean throughput: (\d+\.\d) imgs/sec$", answer.out, re.M)[1]
    assert len(rates) == 2
    assert float(mean) == pytest.approx(sum(map(float, rates)) / 2, abs=0.11)  # of numbers rounded to tenths
    written = json.loads(Path("r.json").read_text())
    assert set(written["stages"]) == {READ, DECODE, BATCH, COPY, TOGETHER}
    assert written["limiting"] == named
    assert len(written["passes"]) == 2
    assert all(rate > 0 for name, rate in written["stages"].items() if name != COPY)


@pytest.mark.usefixtures("image_folder")
@pytest.mark.parametrize("folder", ["photos", "--data-dir photos"])
def test_a_folder_alone_means_photos_as_in_training(falconet, folder):
    answer = falconet(f"data bench {folder} --image-size 32 {FAST}")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("data folder: ")


def test_every_stage_is_measured_once_however_late_its_threads_start(falconet):
    """On a busy machine they begin when the seconds are over: here they always do."""
    answer = falconet(
        "data bench --data digits --seconds 1e-9 --micro-batch-size 8 --device cpu --dataloader-workers 2"
    )
    assert answer.code == 0, answer.err
    assert all(int(rate.replace(",", "")) > 0 for rate in re.findall(r"^[a-z ]+? +([\d,]+)  ", answer.out, re.M))
    assert re.search(rf"^{TOGETHER} +[\d,]+  ", answer.out, re.M)


@pytest.mark.parametrize("data", ["--data digits", "--data generated --image-size 8 --iterations 4 --classes 3"])
def test_data_in_memory_has_nothing_to_read(falconet, data):
    answer = falconet(f"data bench {data} {FAST}")
    assert answer.code == 0, answer.err
    assert re.search(rf"^{READ} +-  the images are in memory$", answer.out, re.M)


def test_synthetic_data_is_refused_because_nothing_is_read(falconet):
    answer = falconet("data bench --data synthetic")
    assert answer.code == 2
    assert (
        answer.err == "falconet data bench: --data synthetic: exists only on the device; expected data that is read\n"
    )


def test_slowest_stage_is_the_limit():
    stages = [Stage(READ, 10.0, ""), Stage(DECODE, 4.0, ""), Stage(COPY, None, ""), Stage(TOGETHER, 3.0, "")]
    assert limiting(stages) == DECODE


@pytest.mark.usefixtures("image_folder")
def test_md5_of_another_folder_is_exit_code_2(falconet):
    answer = falconet("data bench --data folder --data-dir photos --md5")
    assert answer.code == 2
    assert (
        len(re.findall(r"^\w+: md5 [0-9a-f]{32} of .*: corrupted, or not the ILSVRC 2012 folder$", answer.out, re.M))
        == 2
    )


def test_md5_needs_class_folders(falconet):
    answer = falconet("data bench --md5")
    assert answer.code == 2
    assert answer.err == "falconet data bench: --md5: needs class folders, which --data digits is not\n"


@pytest.mark.usefixtures("image_folder")
def test_unwritable_output_is_one_line(falconet):
    answer = falconet(f"data bench {FAST} --output nowhere/r.json")
    assert answer.code == 2
    assert answer.err.startswith("falconet data bench: --output: cannot write nowhere/r.json")


@pytest.mark.usefixtures("image_folder")
def test_boxes_are_read_if_crops_must_overlap_them(falconet):
    answer = falconet(f"data bench --data folder --data-dir photos --image-size 32 --use-bbox-info {FAST}")
    assert answer.code == 2
    assert answer.err.startswith("falconet data bench: photos: no bounding boxes there; expected")
