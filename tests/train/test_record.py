"""What is recorded for a report: the batch as the step gets it, layers, energy, and how often the page is written."""

import types

import numpy as np
import pytest
import torch
from timm.models.resnet import resnet18
from torch import nn

from falconet.data import mixing
from falconet.data.buffers import Batch, join
from falconet.train import record
from falconet.train.layer_table import layer_table

CLASSES = ("a", "b", "c")


def dataset(*, on_host=False, standardised=False):
    """What is asked of a dataset."""
    training = types.SimpleNamespace(standardised=standardised, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    return types.SimpleNamespace(label_sets=None, classes=3, class_names=CLASSES, on_host=on_host, training=training)


def batch(images, *, mixed):
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, 8, 8), generator=draw, dtype=torch.uint8)
    labels = torch.arange(images) % 3
    weights = 0.5 + 0.5 * torch.rand(images, generator=draw)
    mix = mixing.Mix(weights, torch.tensor([2, 6, 1, 5])) if mixed else None
    return Batch(pixels, labels, mix)


def decoded(picture):
    import base64
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["data"]))).convert("RGB"))


@pytest.mark.parametrize("images", [2, 8, 33, 35, 36, 200])
@pytest.mark.parametrize("mixed", [False, True])
def test_pictures_of_a_batch_are_what_the_step_computes(images, mixed):
    given = batch(images, mixed=mixed)
    kept = []
    step = record.SeenStep(lambda micro_batches, *, update, lr: None, kept.append)
    step([given, batch(images, mixed=mixed)], update=0, lr=0.1)
    step([given], update=1, lr=0.1)
    assert len(kept) == 1
    shown = record._seen(kept[0], dataset())
    one_hot = lambda labels: nn.functional.one_hot(labels, 3).float()  # noqa: E731
    inputs = mixing.mixed_images(given.images.float(), given.mix)
    targets = mixing.mixed_targets(given.labels, given.mix, targets=one_hot, side=inputs.shape[-1])
    assert len(shown) == min(images, record.SEEN_IMAGES)
    for each, pixels, shares in zip(shown, inputs, targets, strict=False):
        assert np.array_equal(decoded(each), pixels.round().byte().permute(1, 2, 0).numpy())
        largest = CLASSES[int(shares.argmax())]
        assert each["label"].startswith(largest)
        assert ("%" in each["label"]) == bool(shares.max() < 0.995)


def test_of_joined_micro_batches_the_first_is_kept():
    parts = [batch(8, mixed=True), batch(8, mixed=True)]
    alone, joined = (record._seen(record._excerpt(each), dataset()) for each in (parts[0], join(parts)))
    assert alone == joined


def test_values_from_the_host_become_pixels_again():
    pixels = batch(4, mixed=False)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    values = pixels._replace(images=(pixels.images.float() / 255 - mean) / std)
    shown = record._seen(values, dataset(on_host=True))
    for each, stored in zip(shown, pixels.images, strict=True):
        assert np.abs(decoded(each).astype(int) - stored.permute(1, 2, 0).numpy()).max() <= 1
    standard = record._seen(values, dataset(on_host=True, standardised=True))
    assert all((decoded(each).min(), decoded(each).max()) == (0, 255) for each in standard)


def test_photos_become_small_jpegs_and_tiny_images_stay_exact():
    draw = np.random.default_rng(0)
    tiny = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    assert np.array_equal(decoded(record.picture(tiny)), tiny)
    photo = record.picture(draw.integers(0, 256, (224, 224, 3), dtype=np.uint8))
    assert photo["kind"] == "jpeg"
    assert decoded(photo).shape == (record.SIDE, record.SIDE, 3)
    assert len(photo["data"]) < 20_000


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_layers_have_the_shapes_and_multiplications_of_the_literature(on):
    model = resnet18(num_classes=1000)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    rows = layer_table(model, image_size=224, on=on)
    assert sum(row["parameters"] for row in rows) == 11_689_512
    assert sum(row.get("multiplications", 0) for row in rows) == pytest.approx(
        1.8141e9, rel=1e-3
    )  # torchvision: 1.81 G
    assert rows[0] == {
        "name": "conv1",
        "kind": "Conv2d",
        "parameters": 9408,
        "output": "64 x 112 x 112",
        "multiplications": 9408 * 112 * 112,
    }
    assert rows[-1]["name"] == "fc"
    # Only looked at.
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_cannot_be_looked_through_has_its_weights_listed():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, images):
            raise RuntimeError("no")

    assert layer_table(Odd(), image_size=8, on="cpu") == [{"name": "linear", "kind": "Linear", "parameters": 8}]


def test_a_page_is_written_for_a_hundredth_of_the_time(monkeypatch, tmp_path):
    now = [0.0]

    def write(folder, state):
        now[0] += 2.0

    monkeypatch.setattr(record.run_page, "write_own", write)
    page = record.Page(draws=False, clock=lambda: now[0])
    assert page.is_due()
    page.write(tmp_path, "going")
    assert not page.is_due()
    now[0] += 199.0
    assert not page.is_due()
    now[0] += 1.0
    assert page.is_due()
