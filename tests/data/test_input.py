"""The input pipeline's options: what they change, and that they do not change the result."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from falconet.checkpoint import format
from falconet.config import options
from falconet.data import input
from falconet.data.cache import can_keep
from falconet.data.loader import BatchShape
from falconet.data.preprocessing import Preprocessing
from falconet.data.storage import FileSource
from falconet.infer.classifier import Classifier
from falconet.infer.predictor import Predictor
from falconet.numerics.precision import REGIMES
from falconet.parallel.world import World

LINE = (
    "train --data folder --data-dir photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 2"
    " --warmup-epoch 0 --threads 1 --device cpu"
)


@pytest.fixture
def photos(tmp_path):
    """Two classes of JPEG photos of several sizes."""
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for label, level in (("dark", 60), ("light", 190)):
            folder = tmp_path / "photos" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(level - 50, level + 50, (30 + number, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")


def outcome(name):
    """What a run logged and learned, and how it says that its input was prepared."""
    lines = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    losses = [
        {key: value for key, value in line.items() if key.endswith(("loss", "accuracy"))}
        for line in lines
        if "train/loss" in line or "validation/loss" in line
    ]
    newest = format.checkpoints_in(Path(name))[-1]
    manifest = format.verify(newest)
    weights = format.read_tensors(newest, "model", verified=manifest)
    return losses, {key: tensor.tolist() for key, tensor in weights.items()}, manifest.preprocessing


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize(
    "options",
    [
        "--no-eight-bit-io",
        "--no-eight-bit-io --normalization-location host",
        "--dataloader-rebatch-size 3",
        "--dataloader-rebatch-size 100 --dataloader-workers 0",
        "--dataset-cache",
        "--decode-device cpu",
    ],
)
def test_the_form_of_the_input_changes_no_bit_of_the_result(falconet, options):
    assert falconet(f"{LINE} --run-dir plain").code == 0
    answer = falconet(f"{LINE} {options} --run-dir other")
    assert answer.code == 0, answer.err
    assert outcome("other") == outcome("plain")


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--no-eight-bit-io --normalization-location host",
        "--normalization-location none",
        "--normalization image",
        "--normalization image --no-eight-bit-io --normalization-location host",
    ],
)
def test_validate_prepares_images_as_training_did(falconet, options):
    answer = falconet(f"{LINE} {options} --run-dir r")
    assert answer.code == 0, answer.err
    trained = outcome("r")[0][-1]["validation/loss"]
    answer = falconet("validate r --checkpoint last")
    assert answer.code == 0, answer.err
    assert f" {trained:.4f} " in answer.out


@pytest.mark.usefixtures("photos")
def test_without_normalisation_the_checkpoint_stores_plain_pixels(falconet):
    assert falconet(f"{LINE} --normalization-location none --run-dir r").code == 0
    preprocessing = Preprocessing.from_json(outcome("r")[2])
    assert preprocessing.mean == (0, 0, 0)
    assert preprocessing.std == pytest.approx((1 / 255, 1 / 255, 1 / 255))


@pytest.mark.usefixtures("photos")
def test_prediction_standardises_images_as_training_did(falconet):
    """The model does not see brightness and contrast: a photo and a fainter print of it have the same scores."""
    assert falconet(f"{LINE} --normalization image --run-dir r").code == 0
    preprocessing = Preprocessing.from_json(outcome("r")[2])
    assert preprocessing.standardised
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 2))
    classifier = Classifier(
        name="r",
        model=model,
        preprocessing=preprocessing,
        class_names=("dark", "light"),
        regime=REGIMES["32.32"],
        device=torch.device("cpu"),
    )
    photo = torch.randint(0, 100, (1, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        scores = Predictor(classifier, max_batch=2).logits(torch.cat((photo, 2 * photo + 30)))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "--normalization-location host",
            "--normalization-location host: contradicts --eight-bit-io, which copies pixels as bytes; expected device,"
            " or --no-eight-bit-io as well",
        ),
        (
            "--decode-device cuda --no-eight-bit-io",
            "--decode-device cuda: contradicts --no-eight-bit-io, because pixels stay bytes there; expected cpu",
        ),
        ("--decode-device cuda", "photos cannot be decoded on cuda, because the run is on the CPU"),
    ],
)
def test_contradictions_are_refused_in_one_line(falconet, options, line):
    answer = falconet(f"{LINE} {options}")
    assert answer.code == 2
    assert answer.err == f"falconet train: {line}\n"


@pytest.mark.usefixtures("photos")
def test_the_plan_shows_read_ahead_and_caches(falconet):
    out = falconet(f"{LINE} --dataset-cache --plan").out
    assert "loader: reads at most 1,074 MB ahead, pixels copied as bytes and normalised on the device" in out
    assert "validation cache: 10 of 10 images decoded, 0 MB" in out
    if can_keep():
        assert "training cache: 24 encoded images, about 0 MB" in out
    out = falconet(f"{LINE} --dataset-cache --augment none --no-eight-bit-io --normalization-location host --plan").out
    assert "pixels copied as values and normalised on the host" in out
    assert "training cache: 24 of 24 images decoded, 0 MB" in out


@pytest.mark.usefixtures("photos")
def test_images_that_do_not_fit_are_not_cached_and_the_plan_shows_it(falconet, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(input, "free_memory", lambda: 4 * 16 * 16 * 3 * 7)
        out = falconet(f"{LINE} --dataset-cache --plan").out
        assert falconet(f"{LINE} --dataset-cache --run-dir small").code == 0
    assert "validation cache: 7 of 10 images decoded, 0 MB" in out
    if can_keep():
        assert "training cache: none, because 0 MB is more than a quarter of the free memory" in out
    assert falconet(f"{LINE} --run-dir plain").code == 0
    assert outcome("small") == outcome("plain")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--data synthetic --no-eight-bit-io", "--eight-bit-io has no effect without data from the host"),
        ("--data generated --dataset-cache", "--dataset-cache has no effect without --data imagenet or folder"),
        ("--data generated --decode-device cuda", "--decode-device has no effect without --data imagenet or folder"),
    ],
)
def test_options_without_effect_are_reported(falconet, options, said):
    answer = falconet(f"train {options} --image-size 8 --iterations 1 --plan --epoch 1")
    assert answer.code == 0, answer.err
    assert f"note: {said}" in answer.out


@pytest.mark.usefixtures("photos")
def test_images_decoded_on_the_device_are_not_cached(falconet, monkeypatch):
    monkeypatch.setattr(input, "decode_device", lambda data, source, device: "cuda")
    monkeypatch.setattr(input, "most_ahead", lambda data, source, device: 1 << 20)  # there may be no CUDA to ask
    out = falconet(f"{LINE} --dataset-cache --decode-device cuda --plan").out
    assert "note: --dataset-cache has no effect without --decode-device cpu" in out
    assert " cache:" not in out


@pytest.mark.parametrize(("decoded", "threads"), [("auto", 8), ("cpu", 8), ("cuda", 3)])
def test_photos_are_read_by_one_thread_per_core_or_three_for_the_device(monkeypatch, decoded, threads):
    monkeypatch.setattr(input.world, "cores", lambda processes=1: 8)
    assert input.workers(options.Data(decode_device=decoded)) == threads
    assert input.workers(options.Data(decode_device=decoded, dataloader_workers=2)) == 2


ON_DEVICE = {  # options, the device, bytes free on it, and images that wait on it; an update has 8, of 10 x 10 pixels
    "decoded on the host": ({"decode_device": "cpu"}, "cuda", 1 << 40, 0),
    "a run on the CPU": ({"decode_device": "cpu"}, "cpu", 1 << 40, 0),
    "decoded on the device": ({"decode_device": "cuda"}, "cuda", 1 << 40, 2 * 3 * 8 + 2 * 4),  # two parts per thread
    "three at once": ({"decode_device": "cuda", "dataloader_rebatch_size": 3}, "cuda", 1 << 40, 2 * 3 * 3 + 2 * 4),
    "with little memory": ({"decode_device": "cuda"}, "cuda", 4 * 300 * 5, 5 + 2 * 4),
    "made up": ({"data": "synthetic", "decode_device": "cuda"}, "cuda", 1 << 40, 0),
}


@pytest.mark.parametrize("named", ON_DEVICE)
def test_images_that_wait_on_the_device_are_known(monkeypatch, named):
    asked, device, free, images = ON_DEVICE[named]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    photos = FileSource.of(Path(), names=["a"], labels=[0], class_names=("c",))
    data = options.Data(**{"data": "imagenet", "dataloader_workers": 3, "micro_batch_size": 4} | asked)
    reading = input.Input(data=data, regime=REGIMES["32.32"], world=World(device=torch.device(device)), note=print)
    assert reading.images_on_device(photos, shape=BatchShape(micro_batch=4, accumulation=2), side=10) == images


@pytest.mark.parametrize(("decoded", "free"), [("cpu", 400), ("cuda", 80)])
def test_read_ahead_is_bounded_by_the_memory_it_uses(monkeypatch, decoded, free):
    monkeypatch.setattr(input, "free_memory", lambda: 400)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80, 1000))
    photos = FileSource.of(Path(), names=["a"], labels=[0], class_names=("c",))
    asked = options.Data(data="imagenet", decode_device=decoded)
    assert input.most_ahead(asked, photos, torch.device("cuda", 0)) == free // 4
