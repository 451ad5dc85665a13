"""The sample photos of `make get-data`: free, few, with classes where they are plain, and used by the benchmarks."""

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from timm.data import ImageNetInfo

from falconet.legacy.programs import main

DATA = Path(__file__).parents[2] / "compat/pytorch/data"
PHOTOS = sorted(path.name for path in (DATA / "samples").glob("*.jpg"))
FREE = re.compile(r"CC0|public domain")


def test_every_photo_is_listed_with_free_terms():
    rows = re.findall(
        r"^\| `(.*)\.jpg` \| .* \| `(.*)` \| (.*) \| .*\|$", (DATA / "samples/README.md").read_text(), re.M
    )
    assert [f"{name}.jpg" for name, _, _ in rows] == PHOTOS
    assert all(FREE.search(terms) for _, _, terms in rows)


def test_photos_are_whole_and_small():
    for name in PHOTOS:
        with Image.open(DATA / "samples" / name) as photo:
            photo.load()
            assert min(photo.size) >= 300
    assert sum((DATA / "samples" / name).stat().st_size for name in PHOTOS) < 400_000


def test_labels_have_the_numbers_of_imagenets_classes():
    with (DATA / "samples/labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["photo"] for row in rows} <= {*PHOTOS}
    names = ImageNetInfo()
    assert all(names.index_to_description(int(row["class"])).split(",")[0] == row["name"] for row in rows)


@pytest.fixture
def programs(tmp_path, capfd):
    """Run a program of a copy of the originals' folders that has the samples, but not yet copied."""
    shutil.copytree(DATA, tmp_path / "data", ignore=shutil.ignore_patterns("images"))

    def call(program, line):
        script = program.partition(":")[2]
        return main(program, str(tmp_path / script), line.split()), *capfd.readouterr()

    return call


INFERENCE, HOST = "pytorch:inference/run_benchmark.py", "pytorch:datasets/host_benchmark.py"
SMALL = "-- --image-size 32 --threads 1 --device cpu"


@pytest.mark.parametrize("line", [INFERENCE, f"{HOST} --data real"])
def test_before_make_get_data_a_benchmark_of_photos_names_it(programs, tmp_path, line):
    code, out, err = programs(line.split()[0], line.partition(" ")[2])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path}/data/images: no such folder; `make get-data` in {tmp_path} puts sample photos there" in err


def test_benchmarks_take_the_flat_folder_of_make_get_data(programs, tmp_path):
    said = subprocess.run(["sh", tmp_path / "data/get_data.sh"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"{len(PHOTOS)} sample photos in {tmp_path}/data/images")
    assert sorted(path.name for path in (tmp_path / "data/images").iterdir()) == PHOTOS
    line = "--model resnet18 --iterations 2 --micro-batch-size 4 --random-weights --precision 32.32"
    code, out, err = programs(INFERENCE, f"{line} {SMALL}")
    assert code == 0, err
    assert "data_mode: real" in out
    code, out, err = programs(HOST, f"--data real --micro-batch-size 4 --iterations 1 {SMALL} --seconds 0.05")
    assert code == 0, err
    assert f"{len(PHOTOS)} validation images of 1,000 classes" in out


def test_training_still_needs_classes(falconet, tmp_path):
    shutil.copytree(DATA / "samples", tmp_path / "flat", ignore=shutil.ignore_patterns("*.csv", "*.md"))
    answer = falconet("train --data folder --data-dir flat --pretrained none --run-dir r")
    assert answer.code == 2
    assert f"flat: {len(PHOTOS)} photos, but no classes; expected a folder per class" in answer.err
