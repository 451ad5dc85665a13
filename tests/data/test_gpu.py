"""Decoding on the device: the host's crops and flips, close to Pillow; the host decodes what the device refuses."""

import io
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from falconet.data import gpu
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, EvaluationLoader, Loader, Resources
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import PillowReader
from falconet.data.storage import FileSource

pytestmark = pytest.mark.gpu

PREPROCESSING = Preprocessing(image_size=64, resize=73, mean=IMAGENET_MEAN, std=IMAGENET_STD)
COUNT = 24
DEVICE = torch.device("cuda", 0)


def photo(number, side=160):
    """A smooth picture with edges and different colours, as in photos."""
    y, x = np.mgrid[0 : side + number, 0 : side + 3 * number] / side
    waves = [np.sin(6 * x + number), np.cos(5 * y - number), np.sin(4 * (x + y))]
    pixels = np.stack(waves, axis=-1) * 90 + 128
    pixels[30:60, 40:90] = (200, 30 + number, 90)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def jpeg(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=92, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """JPEG files of every subsampling, grey, progressive, CMYK, RGB, a PNG in disguise, and broken files."""
    root = tmp_path_factory.mktemp("photos")
    (root / "cat").mkdir()
    files = [jpeg(photo(number), subsampling=number % 3) for number in range(COUNT - 8)]
    whole = jpeg(photo(3))
    files += [
        jpeg(photo(1).convert("L")),
        jpeg(photo(2), progressive=True),
        jpeg(photo(4).convert("CMYK")),
        jpeg(photo(5), keep_rgb=True),
        _png(photo(6)),
        whole[: len(whole) // 2],
        b"<html>not a photo</html>",
        whole[:400] + bytes(300) + whole[700:],
    ]
    names = [f"{number:02}.jpg" for number in range(COUNT)]
    for name, content in zip(names, files, strict=True):
        (root / "cat" / name).write_bytes(content)
    return FileSource.of(root, names=names, labels=[0] * COUNT, class_names=("cat",))


def _png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


SAMPLED = replace(PREPROCESSING, antialias=False)
BICUBIC = replace(PREPROCESSING, interpolation="bicubic")


def device_rows(source, augment, preprocessing=PREPROCESSING):
    crops, host = Crops(preprocessing=preprocessing, augment=augment, seed=6), pillow(source, augment, preprocessing)
    return gpu.DeviceRows(DEVICE, source=source, crops=crops, host=host, rows=7)


def resources(workers):
    return Resources(workers=workers, device=DEVICE, buffers=gpu.DeviceBuffers(DEVICE))


def pillow(source, augment, preprocessing=PREPROCESSING):
    bad = BadImages(100, note=lambda message: None)
    crops = Crops(preprocessing=preprocessing, augment=augment, seed=6, objects=None)
    return PillowReader(source, crops=crops, bad=bad)


def decibels(one, other):
    return 10 * np.log10(255**2 / max(((one.astype(float) - other) ** 2).mean(), 1e-6))


@pytest.mark.parametrize("preprocessing", [PREPROCESSING, SAMPLED, BICUBIC], ids=["antialiased", "sampled", "bicubic"])
@pytest.mark.parametrize("augment", ["crop-flip", "none"])
def test_rows_agree_with_pillow_which_decodes_what_the_device_refuses(source, augment, preprocessing):
    indices, host = np.arange(COUNT), pillow(source, augment, preprocessing)
    expected = np.empty((COUNT, 64, 64, 3), np.uint8)
    expected_read = host.read(indices, epoch=3, out=expected)
    rows = device_rows(source, augment, preprocessing)
    images = resources(0).batch_for(rows, COUNT).images.permute(0, 2, 3, 1)
    read = rows.read(indices, epoch=3, out=images)
    found = images.cpu().numpy()
    assert read[:-1].tolist() == expected_read[:-1].tolist()  # the last one is garbage to both
    whole = COUNT - 8
    agreement = [decibels(found[row], expected[row]) for row in range(whole)]
    least = 45 if preprocessing.antialias else 42  # single pixels differ by more than means of many
    assert min(agreement[0::3]) > least  # 4:4:4
    assert min(agreement) > 30, agreement  # subsampled: nvJPEG enlarges colours in its own way
    assert decibels(found[whole], expected[whole]) > least  # grey
    assert (found[whole + 1 : whole + 7] == expected[whole + 1 : whole + 7]).all()


def read(source):
    rows = device_rows(source, "crop-flip")
    indices = np.random.default_rng(0).permutation(COUNT - 1)  # without the last, which is garbage
    images = resources(0).batch_for(rows, len(indices)).images.permute(0, 2, 3, 1)
    rows.read(indices, epoch=3, out=images)
    return dict(zip(indices.tolist(), images.cpu().numpy(), strict=True))


def test_files_read_in_python_give_the_same_pixels(source, monkeypatch):
    natively = read(source)
    monkeypatch.setattr("falconet.data.native.library", lambda: None)
    in_python = read(source)
    assert all((natively[index] == in_python[index]).all() for index in natively)


def test_a_part_of_large_photos_is_decoded_in_portions_with_the_same_pixels(source, monkeypatch):
    together, calls = read(source), []
    decode_jpegs = gpu.decode_jpegs
    monkeypatch.setattr(gpu, "PORTION_PIXELS", 60_000)  # two photos
    monkeypatch.setattr(gpu, "decode_jpegs", lambda *given: calls.append(len(given[0])) or decode_jpegs(*given))
    apart = read(source)
    assert len(calls) > 5
    assert max(calls) <= 2
    assert all((together[index] == apart[index]).all() for index in together)


def loader_of(source, workers, **shape):
    rows, shape = device_rows(source, "crop-flip"), BatchShape(**shape)
    return Loader(rows, labels=source.labels, shape=shape, seed=6, resources=resources(workers))


def test_batches_are_the_same_for_1_and_3_workers_and_leave_no_thread(source):
    def batches(workers):
        updates = loader_of(source, workers, micro_batch=6, accumulation=2).updates(1)
        return [(batch.images.cpu(), batch.labels.cpu()) for update in updates for batch in update]

    one, three = batches(1), batches(3)
    assert len(one) == 4
    for (images, labels), (others, other_labels) in zip(one, three, strict=True):
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("falconet-data")]


def test_evaluation_pads_with_black(source):
    rows, shape = device_rows(source, "none"), BatchShape(micro_batch=16)
    loader = EvaluationLoader(rows, labels=source.labels, shape=shape, resources=resources(2))
    *_, last = loader.batches()
    assert last.labels[COUNT - 16 :].eq(-1).all()
    assert last.images[COUNT - 16 :].sum().item() == 0


def test_memory_is_not_reused_while_the_consumer_computes(source):
    """Batches held for a while keep their pixels although others are decoded meanwhile."""
    loader = loader_of(source, 3, micro_batch=4)
    busy = torch.randn(4096, 4096, device=DEVICE)
    sums, expected = [], []
    for epoch in range(4):
        for update in loader.updates(epoch):
            for _ in range(5):
                busy = busy @ busy * 1e-3
            sums.append(update[0].images.long().sum())
            del update
    torch.cuda.synchronize()
    for epoch in range(4):
        for update in loader.updates(epoch):
            expected.append(update[0].images.long().sum())
            torch.cuda.synchronize()
    assert torch.equal(torch.stack(sums), torch.stack(expected))
