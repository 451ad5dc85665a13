"""What a run has trained is never lost: full disks, failed validations, too little memory, unreadable photos."""

import json
from pathlib import Path

import pytest
import torch

from falconet.checkpoint import disk, format
from falconet.errors import DataError
from falconet.evaluation import evaluate
from falconet.train import save, step
from tiny import TINY


def checkpoint():
    """The one checkpoint of the run in r/."""
    (folder,) = format.checkpoints_in(Path("r"))
    return format.verify(folder)


def no_room(*_):
    raise OSError(28, "No space left on device")


def test_without_room_for_a_checkpoint_nothing_is_trained(falconet, monkeypatch):
    monkeypatch.setattr(disk, "reserve", no_room)
    answer = falconet(f"train {TINY} --run-dir r")
    assert answer.code == 2
    assert answer.err.startswith("falconet train: r/checkpoints: no room for a checkpoint of 0.7 MB (No space left")
    assert "1/2" not in answer.out


def test_a_run_whose_disk_stays_full_exits_with_1_and_names_the_newest_checkpoint(falconet, monkeypatch):
    plain = format.write

    def until_full(folder, *rest):
        if folder.name.endswith("_1"):
            plain(folder, *rest)
            monkeypatch.setattr(disk, "reserve", no_room)
        else:
            raise format.CheckpointError(f"cannot save {folder}: No space left on device")

    monkeypatch.setattr(format, "write", until_full)
    for name in ("SHORTEST", "LONGEST", "GLANCE", "PATIENCE"):
        monkeypatch.setattr(save, name, 0.01)
    answer = falconet(f"train {TINY} --epoch 3 --run-dir r")
    assert answer.code == 1
    assert "_2: No space left on device; saving again\n" in answer.out
    assert "_3: No space left on device; paused, and trying again for up to " in answer.out
    newest = "r/checkpoints/resnet8-cifar_generated_1"
    assert answer.err.count("\n") == 1
    assert f"; the newest whole checkpoint is {newest}; to continue: falconet restore " in answer.err
    assert checkpoint().progress.epoch == 1


SHORTAGES = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of"),
    "host": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    ),
    "python": MemoryError(),
}
HELP = (
    "; expected a smaller --micro-batch-size with more --gradient-accumulation, a smaller --validation-batch-size, or"
    " --enable-recompute; "
)


@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES)
def test_out_of_memory_is_one_line_with_the_newest_checkpoint(falconet, monkeypatch, shortage):
    plain = step.LocalStep.__call__

    def until_short(self, batches, *, update, lr):
        if update == 5:
            raise shortage
        return plain(self, batches, update=update, lr=lr)

    monkeypatch.setattr(step.LocalStep, "__call__", until_short)
    answer = falconet(f"train {TINY} --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert answer.err.startswith("falconet train: out of memory on the ")
    # Where the host ran out of memory, a CPU looks for a micro-batch that fits: tests/train/test_fitting.py.
    fits = "; --micro-batch-size 4 --gradient-accumulation 2 fits here, with the same updates of 8 images; "
    helps = HELP if isinstance(shortage, torch.OutOfMemoryError) else fits
    assert answer.err.endswith(f"{helps}the newest checkpoint is r/checkpoints/resnet8-cifar_generated_1\n")
    assert ("(tried to allocate 2.50 GiB)" in answer.err) == isinstance(shortage, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("error", "words"), [(SHORTAGES["device"], "out of memory on the device"), (DataError("gone"), "gone")]
)
@pytest.mark.parametrize("frequency", [1, 5], ids=["a save is due", "no save is due"])
def test_a_failed_validation_keeps_its_epoch_and_is_made_up_for(falconet, monkeypatch, error, words, frequency):
    line = f"train {TINY} --epoch 2 --checkpoint-save-freq {frequency}"
    assert falconet(f"{line} --run-dir straight").code == 0

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(evaluate, "evaluate", fail)
        answer = falconet(f"{line} --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert words in answer.err
    found = checkpoint()
    assert (found.progress.epoch, found.meter["unvalidated"], "score" in found.metrics) == (1, True, False)
    answer = falconet("restore --checkpoint-input-path r")
    assert answer.code == 0, answer.err
    measured = [accuracies(Path(run)) for run in ("r", "straight")]
    assert measured[0] == measured[1]
    last = [format.verify(format.checkpoints_in(Path(run))[-1]) for run in ("r", "straight")]
    assert last[0].files == last[1].files
    assert last[0].metrics["score"] == last[1].metrics["score"]
    assert last[0].content["best"] == last[1].content["best"]


def accuracies(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["update"]: line["validation/accuracy"] for line in lines if "validation/accuracy" in line}


PHOTOS = "--data-dir {photos} --model resnet8-cifar --image-size 32 --micro-batch-size 8 --threads 1 --device cpu"


def test_bad_validation_photos_are_left_out_of_every_epoch_and_named_at_the_end(falconet, image_folder):
    bad = image_folder / "val/light/0.png"
    bad.write_bytes(b"")
    line = PHOTOS.format(photos=image_folder)
    answer = falconet(f"train {line} --epoch 2 --run-dir r --check-images no")
    assert answer.code == 0, answer.err
    end = f"left out of the validation, because they cannot be read: 1 image: {bad}"
    assert f"\n{end}\n\nbest accuracy" in answer.out  # before the summary
    assert answer.out.count(f"{bad}: cannot be decoded (empty file); left out\n") == 1
    lines = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    assert [line["validation/images"] for line in lines if "validation/images" in line] == [7, 7]
    answer = falconet("validate --checkpoint-input-path r")
    assert answer.code == 0, answer.err
    assert f"{end}\n" in answer.out
