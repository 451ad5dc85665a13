"""Batches are the same for any workers, replicas and restarts; every validation image comes once."""

import hashlib
import itertools
import threading
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import runs
from falconet.config.options import Augmentation
from falconet.data import keyed
from falconet.data.buffers import Buffers, PixelRows, ValueRows
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, EvaluationLoader, Loader, LoaderByEpoch, Resources, SyntheticLoader
from falconet.data.mixing import draw
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Normalise, Preprocessing
from falconet.data.readers import reader_for
from falconet.data.storage import ArraySource, FileSource
from falconet.errors import DataError

MIXING = Augmentation(mixup_alpha=0.2, cutmix_lambda_low=0.3, cutmix_lambda_high=0.9, cutmix_disable_prob=0.2)
COUNT = 70
PREPROCESSING = Preprocessing(image_size=8, resize=8, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def array_source():
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8)
    images[:, 4, 4, 0] = np.arange(COUNT)  # each image says its number, wherever no augmentation moves it
    return ArraySource(images, np.arange(COUNT) % 10, tuple("0123456789"))


@pytest.fixture(scope="module")
def file_source(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    (root / "cat").mkdir()
    for number, image in enumerate(array_source().images):
        Image.fromarray(image).resize((20 + number % 7, 30)).save(root / "cat" / f"{number:03}.png")
    names = [f"{number:03}.png" for number in range(COUNT)]
    return FileSource.of(root, names=names, labels=[0] * COUNT, class_names=("cat",))


def reader(source, augment):
    bad = BadImages(100, note=lambda message: None)
    return reader_for(source, crops=Crops(preprocessing=PREPROCESSING, augment=augment, seed=6), bad=bad)


def loader(source=None, *, augment="shift-flip", workers=0, augmentation=MIXING, **shape):
    source = array_source() if source is None else source
    return Loader(
        PixelRows(reader(source, augment)),
        labels=source.labels,
        shape=BatchShape(**({"micro_batch": 6, "accumulation": 2} | shape)),
        seed=6,
        augmentation=augmentation,
        resources=Resources(workers=workers),
    )


def digest(batch):
    tensors = (batch.images, batch.labels, *(batch.mix or ()))
    content = b"".join(np.ascontiguousarray(tensor.numpy()).tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()


def digests(updates):
    return [[digest(batch) for batch in update] for update in updates]


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("falconet-data")]


@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip", "crop-flip"])
def test_the_batches_are_the_same_for_0_1_and_3_workers(augment):
    alone, *others = (digests(loader(augment=augment, workers=workers).updates(2)) for workers in (0, 1, 3))
    assert len(alone) == 5
    for other in others:
        assert other == alone


def test_batches_of_files_are_the_same_for_0_1_and_3_workers(file_source):
    alone, *others = (
        digests(loader(file_source, augment="crop-flip", workers=workers).updates(2)) for workers in (0, 1, 3)
    )
    for other in others:
        assert other == alone


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("skip", [0, 1, 4, 5])
def test_skipping_updates_equals_dropping_them(skip, workers):
    assert digests(loader(workers=workers).updates(1, skip=skip)) == digests(loader().updates(1))[skip:]


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("skip", [0, 3])
def test_epochs_that_are_read_ahead_have_the_same_batches(skip, workers):
    expected = [digests(loader().updates(epoch)) for epoch in range(1, 4)]
    batches = loader(workers=workers)
    found = [digests(batches.updates(epoch, skip=skip if epoch == 1 else 0, until=4)) for epoch in range(1, 4)]
    assert found == [expected[0][skip:], *expected[1:]]
    assert data_threads() == []


def test_the_next_epoch_is_read_while_this_one_is_used():
    """Its first images are read before they are asked for, but none of the epoch before which training ends."""
    source, rows = array_source(), PixelRows(reader(array_source(), "none"))
    read = []

    class Noted(PixelRows):
        def read(self, indices, *, epoch, out):
            read.append(epoch)
            return rows.read(indices, epoch=epoch, out=out)

    shape, resources = BatchShape(micro_batch=12), Resources(workers=2)
    noted = Noted(reader(source, "none"))
    batches = Loader(noted, labels=source.labels, shape=shape, seed=6, resources=resources)
    list(batches.updates(0, until=2))
    runs.wait_for(lambda: 1 in read, "the next epoch to be read")
    list(batches.updates(1, until=2))
    batches.close()
    assert sorted(set(read)) == [0, 1]
    assert len(read) == 2 * batches.updates_per_epoch


def test_loaders_of_several_sizes_take_turns_without_reading_for_each_other():
    small, large = loader(workers=2), loader(workers=2, augment="none")
    both = LoaderByEpoch({0: small, 2: large})
    found = [digests(both.updates(epoch, until=4)) for epoch in range(4)]
    expected = [digests(each.updates(epoch)) for epoch, each in enumerate((small, small, large, large))]
    assert found == expected
    both.close()


@pytest.mark.parametrize(("replicas", "accumulation"), [(2, 1), (2, 2), (4, 1)])
def test_replicas_together_have_the_micro_batches_of_one(replicas, accumulation):
    one = digests(loader(accumulation=replicas * accumulation).updates(3))
    parts = [
        digests(loader(accumulation=accumulation, replicas=replicas, replica=replica).updates(3))
        for replica in range(replicas)
    ]
    assert [list(chain(*update)) for update in zip(*parts, strict=True)] == one


def test_epochs_differ():
    batches = loader(augmentation=None)
    assert digests(batches.updates(0))[0] != digests(batches.updates(1))[0]


def test_an_update_takes_its_stretch_of_the_epochs_order():
    order = keyed.permutation(COUNT, seed=6, epoch=7)
    for number, update in enumerate(loader(augment="none", augmentation=None).updates(7)):
        numbers = torch.cat([batch.images[:, 0, 4, 4] for batch in update])
        labels = torch.cat([batch.labels for batch in update])
        expected = order[number * 12 : (number + 1) * 12]
        assert numbers.tolist() == expected.tolist()
        assert labels.tolist() == (expected % 10).tolist()


def test_the_ragged_tail_is_dropped():
    batches = loader()
    assert batches.updates_per_epoch == COUNT // 12
    assert len(list(batches.updates(0))) == COUNT // 12


def test_images_are_uint8_in_channels_last_memory():
    batch = next(loader().updates(0))[0]
    assert batch.images.shape == (6, 3, 8, 8)
    assert batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.dtype == torch.int64
    assert batch.mix.mixup.shape == (6,)
    assert batch.mix.box.shape == (4,)


def test_mixes_are_keyed_by_the_images_and_the_global_number_of_the_micro_batch():
    order = keyed.permutation(COUNT, seed=6, epoch=1)
    given = [batch.mix for update in loader(accumulation=1, replicas=2, replica=1).updates(1) for batch in update]
    for mix, number in zip(given, (1, 3, 5, 7, 9), strict=True):
        indices = order[number * 6 : (number + 1) * 6]
        expected = draw(MIXING, indices=indices, micro_batch=number, side=8, seed=6, epoch=1)
        assert torch.equal(mix.mixup, expected.mixup)
        assert torch.equal(mix.box, expected.box)
    assert len({tuple(mix.box.tolist()) for mix in given}) > 1


def test_without_mixing_there_is_no_mix():
    assert next(loader(augmentation=None).updates(0))[0].mix is None


def test_a_bad_image_is_labelled_minus_one(file_source, tmp_path):
    (tmp_path / "cat").symlink_to(file_source.root / "cat")
    gone = FileSource.of(tmp_path, names=["000.png", "gone.png"] * 3, labels=[0] * 6, class_names=("cat",))
    batch = next(loader(gone, augment="crop-flip", accumulation=1).updates(0))[0]
    order = keyed.permutation(6, seed=6, epoch=0)
    assert batch.labels.tolist() == [-1 if index % 2 else 0 for index in order]


def test_too_few_images_for_one_update_are_refused():
    with pytest.raises(DataError) as caught:
        loader(micro_batch=36, accumulation=2)
    expected = "70 training images are fewer than the 72 of one update: micro-batch 36 x accumulation 2 x replicas 1"
    assert str(caught.value) == expected


def test_leaving_early_and_closing_end_the_threads():
    batches = loader(workers=3)
    updates = batches.updates(0)
    next(updates)
    assert data_threads()
    batches.close()
    assert data_threads() == []
    assert list(updates) == []


def test_closing_ends_what_is_read_ahead_for_the_next_epoch():
    batches = loader(workers=3)
    list(batches.updates(0, until=3))
    assert data_threads()
    batches.close()
    assert data_threads() == []


def test_a_closed_loader_begins_anew():
    batches = loader(workers=2)
    updates = batches.updates(0, until=3)
    next(updates)
    batches.close()
    assert list(updates) == []
    assert digests(batches.updates(1, until=3)) == digests(loader().updates(1))
    batches.close()


def test_reading_ahead_for_another_place_is_ended():
    batches = loader(workers=1)
    list(batches.updates(0, until=3))
    assert digests(batches.updates(1, skip=2, until=3)) == digests(loader().updates(1))[2:]
    assert len(data_threads()) == 1  # those of epoch 2
    batches.close()
    assert data_threads() == []


def test_skipping_more_updates_than_an_epoch_has_leaves_none():
    assert list(loader().updates(0, skip=9, until=2)) == []


def test_an_error_in_a_worker_keeps_its_type_and_ends_the_threads(file_source):
    names = [f"gone-{number}.png" for number in range(12)]
    gone = FileSource.of(file_source.root, names=names, labels=[0] * 12, class_names=("cat",))
    strict = reader_for(gone, crops=Crops(preprocessing=PREPROCESSING), bad=BadImages(3, note=lambda message: None))
    shape, resources = BatchShape(micro_batch=12), Resources(workers=2)
    batches = Loader(PixelRows(strict), labels=gone.labels, shape=shape, seed=1, resources=resources)
    with pytest.raises(DataError, match=r"gone-\d+.png: cannot be decoded .* bad images, at most 3 allowed"):
        next(batches.updates(0))
    assert data_threads() == []


def evaluation(*, batch, replicas=1, replica=0, workers=0):
    source = array_source()
    shape = BatchShape(micro_batch=batch, replicas=replicas, replica=replica)
    rows, resources = PixelRows(reader(source, "none")), Resources(workers=workers)
    return EvaluationLoader(rows, labels=source.labels, shape=shape, resources=resources)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [1, 16, 70, 128])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_shows_every_image_once_in_order(replicas, batch, workers):
    seen, counts = [], set()
    for replica in range(replicas):
        given = list(evaluation(batch=batch, replicas=replicas, replica=replica, workers=workers).batches())
        counts.add(len(given))
        for images, labels, mix, _ in given:
            assert images.shape == (batch, 3, 8, 8)
            assert mix is None
            assert not images[labels < 0].any()
            seen += images[labels >= 0][:, 0, 4, 4].tolist()
            assert (labels[labels >= 0] == images[labels >= 0][:, 0, 4, 4].long() % 10).all()
    assert seen == list(range(COUNT))
    assert len(counts) == 1  # so that replicas can agree after each batch


def test_more_replicas_than_images_still_agree_on_the_batches():
    given = [list(evaluation(batch=4, replicas=80, replica=replica).batches()) for replica in (0, 79)]
    assert [len(batches) for batches in given] == [1, 1]
    assert given[1][0].labels.tolist() == [-1, -1, -1, -1]


def synthetic(seed=1, replica=0):
    shape = BatchShape(micro_batch=8, accumulation=3, replicas=2, replica=replica)
    options = {"image_size": 10, "classes": 5, "images": 480, "seed": seed, "device": torch.device("cpu")}
    return SyntheticLoader(shape, **options)


def test_synthetic_batches_are_one_random_batch():
    updates = list(synthetic().updates(0, skip=4))
    assert len(updates) == 480 // 48 - 4
    batches = [batch for update in updates for batch in update]
    assert len({batch.images.data_ptr() for batch in batches}) == 1
    images, labels, mix, _ = batches[0]
    assert images.shape == (8, 3, 10, 10)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.float().mean() == pytest.approx(127.5, abs=5 * 73.9 / 2400**0.5)
    assert labels.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert mix is None


def test_synthetic_batches_differ_by_seed_and_replica():
    first, again, seed, replica = (
        next(made.updates(0))[0].images for made in (synthetic(), synthetic(), synthetic(seed=2), synthetic(replica=1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, seed)
    assert not torch.equal(first, replica)


class Copied:
    """A copy that is already complete."""

    def synchronize(self):
        pass


def fed(loading, buffers, epoch):
    """Digests of an epoch's updates; each micro-batch is given back as soon as it has been seen."""
    found = []
    for update in loading.streamed(epoch):
        found.append([])
        for batch in update:
            found[-1].append(digest(batch))
            batch.images.fill_(255)  # a batch that still needed these pixels would show it
            buffers.give_back(batch, copied=Copied())
    return found


@pytest.mark.run
@pytest.mark.parametrize("ahead", [1, 192 * 7, 1 << 30])
@pytest.mark.parametrize("rows", [None, 1, 4, 5])
def test_buffers_used_again_and_the_size_of_parts_change_no_batch(file_source, rows, ahead):
    buffers, shape = Buffers(), BatchShape(micro_batch=6, accumulation=2)
    loading = Loader(
        PixelRows(reader(file_source, "crop-flip"), rows=rows),
        labels=file_source.labels,
        shape=shape,
        seed=6,
        augmentation=MIXING,
        resources=Resources(workers=3, buffers=buffers, ahead=ahead),
    )
    expected = digests(loader(file_source, augment="crop-flip").updates(2))
    assert fed(loading, buffers, 2) == expected
    allocated = buffers.allocated
    assert fed(loading, buffers, 2) == expected
    assert buffers.allocated == allocated


def test_the_buffers_of_an_update_are_bounded_however_many_micro_batches_it_has():
    source, buffers = array_source(), Buffers()
    rows = PixelRows(reader(source, "none"), rows=1)
    resources = Resources(workers=2, buffers=buffers, ahead=192 * 4)
    shape = BatchShape(micro_batch=2, accumulation=30)
    loading = Loader(rows, labels=source.labels, shape=shape, seed=6, resources=resources)
    assert len(fed(loading, buffers, 0)[0]) == 30
    assert buffers.allocated <= 4  # the one in use, two read ahead, and one started


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (5, 2)])
@pytest.mark.parametrize("ahead", [1, 7, 1000])
def test_what_waits_for_the_next_epoch_is_bounded(rows, shape, ahead):
    source, buffers = array_source(), Buffers()
    reading = PixelRows(reader(source, "none"), rows=rows)
    resources = Resources(workers=2, buffers=buffers, ahead=192 * ahead)
    shape = BatchShape(micro_batch=shape[0], accumulation=shape[1])
    batches = Loader(reading, labels=source.labels, shape=shape, seed=6, resources=resources)
    delivered = sum(map(len, batches.updates(0, until=9)))
    waiting = shape.micro_batch * (buffers.allocated - delivered)
    assert 0 < waiting <= resources.images_held(reading, shape)
    batches.close()


def test_without_threads_nothing_waits_for_the_next_epoch():
    source, buffers, shape = array_source(), Buffers(), BatchShape(micro_batch=5, accumulation=2)
    reading, resources = PixelRows(reader(source, "none")), Resources(workers=0, buffers=buffers)
    batches = Loader(reading, labels=source.labels, shape=shape, seed=6, resources=resources)
    assert sum(map(len, batches.updates(0, until=9))) == buffers.allocated
    assert resources.images_held(reading, shape) == 5  # the one that is being read


@pytest.mark.parametrize(("ahead", "images"), [(1 << 30, 100), (192 * 10, 10), (192 * 10 - 1, 9), (1, 1)])
def test_as_many_images_are_read_ahead_as_the_memory_holds(ahead, images):
    pixels = reader(array_source(), "none")
    half = ValueRows(pixels, Normalise(PREPROCESSING, dtype=torch.float16))
    assert Resources(ahead=ahead).images_ahead(PixelRows(pixels), 50) == images
    assert Resources(ahead=2 * ahead).images_ahead(half, 50) == images


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(source, batches):
    """The growth of memory over `batches` batches, in bytes per batch, by a line through it."""
    rows, buffers = PixelRows(reader(source, "crop-flip")), Buffers()
    shape, resources = BatchShape(micro_batch=10), Resources(workers=2, buffers=buffers)
    loading = Loader(rows, labels=source.labels, shape=shape, seed=6, resources=resources)
    sizes, epoch = [], 0
    while len(sizes) < batches:
        for _ in fed(loading, buffers, epoch):
            sizes.append(resident())
        epoch += 1
    settled = np.array(sizes[batches // 5 :], dtype=np.float64)
    return np.polyfit(np.arange(len(settled)), settled, 1)[0]


@pytest.mark.run
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figures")
def test_memory_stays_flat_over_1500_batches(jpeg_source):
    threads = set(threading.enumerate())
    # A leaked batch would be 1,920 bytes, a leaked thread more. What else this process does may take memory once.
    slopes = list(itertools.takewhile(lambda slope: slope >= 1000, (soak(jpeg_source, 1500) for _ in range(3))))
    assert len(slopes) < 3, slopes
    assert not set(threading.enumerate()) - threads


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figures")
def test_memory_stays_flat_over_10000_batches(jpeg_source):
    slope = soak(jpeg_source, 10_000)
    assert slope < 100, slope


@pytest.fixture(scope="module")
def jpeg_source(tmp_path_factory):
    """A source with few batches per epoch, so that leaks of iterators add up over many epochs."""
    root = tmp_path_factory.mktemp("small photos")
    (root / "cat").mkdir()
    for number in range(50):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16 + number % 3, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "cat" / f"{number:02}.jpg")
    return FileSource.of(
        root, names=[f"{number:02}.jpg" for number in range(50)], labels=[0] * 50, class_names=("cat",)
    )
