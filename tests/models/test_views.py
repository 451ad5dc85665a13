"""Test-time augmentation: against plain arithmetic on views made by hand, and the same in every command."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import falconet as fn
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, normaliser
from falconet.infer.predictor import Classifier, Predictor
from falconet.models import views
from falconet.numerics.precision import REGIMES
from tiny import TINY


class Probe(nn.Module):
    """Logits that tell every pixel apart, and not linearly."""

    def __init__(self, side=6):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3 * side * side, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, images):
        return torch.tanh(images.flatten(1)) @ self.weights


IMAGES = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def moved(images, by):
    """Shifted down and right by indexing a reflected border: -1 is row 1, 6 is row 4."""
    places = np.abs(np.arange(6) - by)
    places = np.where(places > 5, 10 - places, places)
    return images[:, :, places][:, :, :, places]


def test_a_mirror_image_counts_as_much_as_the_image():
    model = Probe()
    found = views.averaged(model, "flip")(IMAGES)
    torch.testing.assert_close(found, (model(IMAGES) + model(IMAGES.flip(3))) / 2)


def test_shifted_views_have_half_of_the_weight():
    model = Probe()
    expected = 0
    for by, weight in ((0, 0.5), (1, 0.25), (-1, 0.25)):
        view = moved(IMAGES, by)
        expected = expected + weight * (model(view) + model(view.flip(3))) / 2
    torch.testing.assert_close(views.averaged(model, "flip-shift")(IMAGES), expected)


@pytest.mark.parametrize("kind", ["flip", "flip-shift"])
def test_weights_of_views_add_up_to_one(kind):
    assert sum(weight for _, weight in views.views_of(kind)) == 1


def test_without_views_the_model_is_the_same_object():
    model = Probe()
    assert views.averaged(model, "none") is model


def test_a_predictor_averages_as_validation_does():
    preprocessing = Preprocessing(image_size=6, resize=6, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    about = Classifier(
        name="probe",
        model=Probe(),
        preprocessing=preprocessing,
        class_names=tuple("abcd"),
        regime=REGIMES["32.32"],
        device=torch.device("cpu"),
        tta="flip",
    )
    pixels = torch.randint(0, 256, (5, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    found = Predictor(about, max_batch=8).logits(pixels)
    inputs = normaliser(preprocessing)(pixels)
    torch.testing.assert_close(found, (about.model(inputs) + about.model(inputs.flip(3))) / 2)


def measured():
    """Top 1 and loss as `validate` has written them."""
    row = Path("r/validation.csv").read_text().splitlines()[1].split(",")
    return row[2], row[4]


def test_validate_and_training_average_over_the_same_views(falconet):
    trained = falconet(f"train {TINY} --data digits --image-size 8 --updates 30 --tta flip --run-dir r")
    assert trained.code == 0, trained.err
    words = "averages the logits of 2 views, the image and its mirror image\n"
    assert f"validation {words}" in trained.out
    again = falconet("validate --checkpoint-input-path r")  # the checkpoint remembers
    assert again.code == 0, again.err
    assert words in again.out
    averaged = measured()
    without = falconet("validate --checkpoint-input-path r --tta none")
    assert words not in without.out
    logged = json.loads(Path("r/metrics.jsonl").read_text().splitlines()[-1])
    assert averaged == (f"{logged['validation/accuracy']:.2f}", f"{logged['validation/loss']:.4f}") != measured()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tta mirror", "--tta: got 'mirror', expected none, flip or flip-shift"),
        (
            "--tta flip --pipeline-splits layer2/0",
            "--tta: does not work with --pipeline-splits, whose stages validate one view of an image",
        ),
    ],
)
def test_a_mistake_is_one_line(falconet, line, message):
    answer = falconet(f"train {TINY} {line}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err


def test_predictions_average_as_the_validations_of_the_run(falconet, image_folder):
    line = "train photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1 --threads 1 --device cpu"
    assert falconet(f"{line} --warmup-epoch 0 --run-dir r --tta flip").code == 0
    words = "averages the logits of 2 views, the image and its mirror image"
    answer = falconet("predict r photos/val --csv --batch-size 8 --embeddings e.npz")
    assert words in answer.err
    assert falconet("validate r --predictions p.csv").code == 0
    with Path("p.csv").open(newline="") as file:
        expected = [row["probability"] for row in csv.DictReader(file)]
    found = [row["probability"] for row in csv.DictReader(io.StringIO(answer.out))]
    assert [f"{float(each):.6f}" for each in found] == [f"{float(each):.6f}" for each in expected]
    assert fn.evaluate("r").loss == pytest.approx(fn.Run("r").metrics[-1]["validation/loss"], rel=1e-6)
    plain = falconet("predict r photos/val --csv --batch-size 8 --tta none --embeddings plain.npz")
    assert words not in plain.err
    assert plain.out != answer.out
    assert np.array_equal(*(np.load(name)["embeddings"] for name in ("e.npz", "plain.npz")))  # of the photo itself
    picture = Path("photos/val/dark/0.png")
    both, one = (fn.load("r", tta=tta).predict(Image.open(picture)).probability for tta in ("flip", "none"))
    assert both == pytest.approx(fn.load("r").predict(picture).probability, rel=1e-5) != pytest.approx(one, rel=1e-5)
    assert words in falconet("bench serve --checkpoint-input-path r --iterations 1 --clients 1 --check-answers").out
