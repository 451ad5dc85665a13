"""`train` and `validate` on folders of photos, as people have them."""

import re
import shutil

import pytest
from PIL import Image

SMALL = (
    "--model resnet10 --image-size 16 --micro-batch-size 4 --epoch 1 --threads 1 --dataloader-workers 1 --device cpu"
)


@pytest.fixture
def heap(tmp_path):
    """Two classes, dark and light, of 12 photos each, in one heap."""
    for name, level in (("dark", 40), ("light", 220)):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (20 + number, 16), (level, level + number, level)).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


@pytest.fixture
def trained(falconet, heap):
    answer = falconet(f"train photos {SMALL} --run-dir run")
    assert answer.code == 0, answer.err
    return answer


def test_what_was_found_is_printed_before_training(trained):
    lines = trained.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("photos: "))
    assert lines[at].startswith("photos: 2 classes, 24 photos (12 per class)")
    assert lines[at].endswith(", class folders")
    assert lines[at + 1].startswith("split by file name: ")
    assert lines[at + 1].endswith(" to validate (--val-fraction 0.2)")


def validated(answer):
    """How many images were measured."""
    assert answer.code == 0, answer.err
    header, row = (line.split() for line in answer.out.splitlines()[:2])
    return int(row[header.index("images")])


def test_validation_uses_the_photos_that_training_held_out(falconet, trained):
    held_out = int(re.search(r"(\d+) to validate", trained.out)[1])
    assert validated(falconet("validate --checkpoint-input-path run")) == held_out
    assert validated(falconet("validate --checkpoint-input-path run --val-fraction 1")) == 24


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("place", ["new/test", "new"])
def test_validation_needs_no_photos_to_train_on_and_not_every_class(falconet, heap, place):
    target = heap.parent / "new/test/light"
    target.mkdir(parents=True)
    for number in range(5):
        shutil.copy(heap / f"light/{number}.jpg", target)
    assert validated(falconet(f"validate --checkpoint-input-path run --data-dir {place}")) == 5


@pytest.mark.usefixtures("trained")
def test_a_class_that_the_checkpoint_does_not_know_is_named(falconet, heap):
    (heap.parent / "new/test/grey").mkdir(parents=True)
    shutil.copy(heap / "light/1.jpg", heap.parent / "new/test/grey")
    answer = falconet("validate --checkpoint-input-path run --data-dir new")
    assert answer.code == 2
    assert "was trained on 2 classes, the data has 1, 'grey' where it has 'dark'" in answer.err


def only_validated(root):
    (root / "val").mkdir()
    for name in ("dark", "light"):
        (root / name).rename(root / "val" / name)


MISTAKES = {
    "one class": (
        lambda root: shutil.rmtree(root / "light"),
        "photos: all photos are of one class, 'dark'; expected at least two, each in a folder of its own",
    ),
    "only validation": (
        only_validated,
        "photos: no photos to train on, only 24 to validate; expected train/ as well, or `falconet validate`",
    ),
    "several labels": (
        lambda root: (root / "labels.csv").write_text("image,label\ndark/1.jpg,dark|old\nlight/2.jpg,light\n"),
        "photos: photos with several labels cannot be trained yet; expected one label each",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_folder_that_cannot_be_trained_on_is_answered_in_one_line(falconet, heap, change, message):
    change(heap)
    answer = falconet(f"train photos {SMALL}")
    assert answer.code == 2
    assert answer.err.splitlines()[-1] == f"falconet train: {message}"


@pytest.mark.parametrize("given", ["0", "1.5", "-0.1"])
@pytest.mark.usefixtures("heap")
def test_a_fraction_to_validate_is_more_than_nothing(falconet, given):
    answer = falconet(f"train photos {SMALL} --val-fraction {given}")
    assert answer.code == 2
    assert "--val-fraction: got" in answer.err
    assert "expected a number, more than 0 and at most 1" in answer.err
