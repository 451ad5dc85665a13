"""NativeReader: PillowReader's contract and crops, with the native decoder's speed."""

import gc
import hashlib
import io
import threading
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from falconet.data.buffers import PixelRows
from falconet.data.crops import Crops, crop_draws, flips, random_resized_crop
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, EvaluationLoader, Loader, Resources
from falconet.data.native.binding import Status, Workspace
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import NativeReader, PillowReader, reader_for
from falconet.data.storage import FileSource
from falconet.errors import ConfigError, DataError

SIZE = 48
PREPROCESSING = Preprocessing(image_size=SIZE, resize=56, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def save(path, image, kind="JPEG", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, kind, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, photo):
    """Twelve photos in two classes: ten for the native decoder, a progressive one and a PNG."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(12):
        image = photo(90 + 13 * number, 150 - 7 * number, number)
        kind, options = "JPEG", {"subsampling": number % 3, "quality": 90}
        if number == 10:
            options["progressive"] = True
        if number == 11:
            kind, options = "PNG", {}
        save(root / f"class {number % 2}" / f"{number:02d}.jpg", image, kind, **options)
    names = [f"{number:02d}.jpg" for number in range(12)]
    return FileSource.of(
        root, names=names, labels=[number % 2 for number in range(12)], class_names=("class 0", "class 1")
    )


def readers(library, source, kind, *, allowed=0, noted=None):
    bad = BadImages(allowed, note=(noted if noted is not None else []).append)
    crops = Crops(preprocessing=PREPROCESSING, augment=kind, seed=3, objects=source.objects)
    pillow = PillowReader(source, crops=crops, bad=bad)
    native = NativeReader(source, library=library, crops=crops, pillow=pillow)
    return native, pillow


def read(reader, indices, *, epoch=2):
    out = np.full((len(indices), SIZE, SIZE, 3), 77, np.uint8)
    return out, reader.read(np.asarray(indices), epoch=epoch, out=out)


def psnr(a, b):
    return 10 * np.log10(255**2 / max(1e-9, np.mean((a.astype(float) - b) ** 2)))


@pytest.mark.parametrize("kind", ["crop-flip", "none"])
def test_the_native_reader_agrees_with_pillow(library, folder, kind):
    native, pillow = readers(library, folder, kind)
    for epoch in (0, 7):
        ours, ok = read(native, range(12), epoch=epoch)
        theirs, _ = read(pillow, range(12), epoch=epoch)
        assert ok.all()
        assert min(psnr(a, b) for a, b in zip(ours, theirs, strict=True)) > 45


@pytest.mark.parametrize("kind", ["crop-flip", "none"])
def test_images_left_to_pillow_equal_pillows_bit_for_bit(library, folder, kind):
    native, pillow = readers(library, folder, kind)
    ours, _ = read(native, [10, 0, 11])
    theirs, _ = read(pillow, [10, 0, 11])
    np.testing.assert_array_equal(ours[[0, 2]], theirs[[0, 2]])
    _, statuses = Workspace(library).open([bytes(folder.path(10)), bytes(folder.path(11))])
    assert statuses.tolist() == [Status.UNSUPPORTED, Status.NOT_JPEG]


def test_a_picture_does_not_depend_on_its_neighbours(library, folder):
    native, _ = readers(library, folder, "crop-flip")
    together, _ = read(native, [4, 10, 1, 7, 11])
    for row, index in enumerate([4, 10, 1, 7, 11]):
        np.testing.assert_array_equal(read(native, [index])[0][0], together[row])


def test_an_empty_part_is_read(library, folder):
    for kind in ("crop-flip", "none"):
        images, ok = read(readers(library, folder, kind)[0], np.zeros(0, np.int64))
        assert (images.shape, len(ok)) == ((0, SIZE, SIZE, 3), 0)


def digest(batches):
    total = hashlib.sha256()
    for batch in batches:
        total.update(batch.images.numpy().tobytes() + batch.labels.numpy().tobytes())
    return total.hexdigest()


def test_batches_are_the_same_for_any_number_of_threads(library, folder, monkeypatch):
    native, _ = readers(library, folder, "crop-flip")
    monkeypatch.setattr(NativeReader, "rows", 2)

    shape, labels = BatchShape(micro_batch=5), folder.labels

    def training(workers):
        resources = Resources(workers=workers)
        loader = Loader(PixelRows(native), labels=labels, shape=shape, seed=1, resources=resources)
        return digest(batch for epoch in (0, 1) for update in loader.updates(epoch) for batch in update)

    assert len({training(workers) for workers in (0, 1, 3)}) == 1

    def evaluated(workers):
        resources = Resources(workers=workers)
        return digest(EvaluationLoader(PixelRows(native), labels=labels, shape=shape, resources=resources).batches())

    assert evaluated(0) == evaluated(3)


def test_the_memory_of_a_thread_is_freed_with_it(library, folder, monkeypatch):
    native, _ = readers(library, folder, "none")
    gc.collect()  # what other tests left is not counted
    freed = []
    original = Workspace.__del__
    monkeypatch.setattr(Workspace, "__del__", lambda self: (freed.append(self._handle), original(self)))
    thread = threading.Thread(target=read, args=(native, [0, 1]))
    thread.start()
    thread.join()
    assert len(freed) == 1


def bad_files(tmp_path, photo, jpeg):
    good = jpeg(photo(90, 80, 1))
    contents = {"good.jpg": good, "cut.jpg": good[: len(good) // 2], "empty.jpg": b"", "page.jpg": b"<html></html>"}
    (tmp_path / "c").mkdir()
    for name, data in contents.items():
        (tmp_path / "c" / name).write_bytes(data)
    return FileSource.of(tmp_path, names=[*contents, "missing.jpg"], labels=[0] * 5, class_names=("c",))


def test_bad_images_are_black_named_and_counted_as_pillow_counts_them(library, tmp_path, photo, jpeg):
    noted = []
    native, _ = readers(library, bad_files(tmp_path, photo, jpeg), "crop-flip", allowed=4, noted=noted)
    images, ok = read(native, range(5))
    assert ok.tolist() == [True, False, False, False, False]
    assert (images[1:] == 0).all()
    assert images[0].std() > 5
    reasons = [note.split(": ", 1)[1].split(";")[0] for note in noted]
    assert reasons == [
        "cannot be decoded (truncated)",
        "cannot be decoded (empty file)",
        "cannot be decoded (not an image)",
        "cannot be decoded (No such file or directory)",
    ]


def test_one_bad_image_too_many_ends_the_run(library, tmp_path, photo, jpeg):
    native, _ = readers(library, bad_files(tmp_path, photo, jpeg), "none", allowed=1)
    with pytest.raises(DataError, match=r"empty\.jpg: cannot be decoded .*; 2 bad images, at most 1 allowed"):
        read(native, range(5))


def test_pillows_limit_on_pixels_applies(library, folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    native, _ = readers(library, folder, "none", allowed=12)
    assert not read(native, range(12))[1].any()


def test_exif_orientation_is_ignored_as_the_peers_ignore_it(library, tmp_path, photo):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    save(tmp_path / "c" / "turned.jpg", photo(80, 100, 2), exif=exif, subsampling=0)
    save(tmp_path / "c" / "plain.jpg", photo(80, 100, 2), subsampling=0)
    source = FileSource.of(tmp_path, names=["turned.jpg", "plain.jpg"], labels=[0, 0], class_names=("c",))
    images, _ = read(readers(library, source, "none")[0], [0, 1])
    np.testing.assert_array_equal(images[0], images[1])


def test_names_of_any_bytes_are_opened(library, tmp_path, photo):
    name = "b\udcff \N{SNOWMAN}.jpg"
    save(tmp_path / "c", photo(60, 60, 1))
    (tmp_path / "k").mkdir()
    (tmp_path / "c").rename(tmp_path / "k" / name)
    source = FileSource.of(tmp_path, names=[name], labels=[0], class_names=("k",))
    noted = []
    _, ok = read(readers(library, source, "none", noted=noted)[0], [0])
    assert ok.all()
    _, statuses = Workspace(library).open([bytes(source.path(0))])
    assert statuses.tolist() == [Status.OK]


def test_photos_are_read_natively_if_possible(library, folder):
    bad = BadImages(0, note=print)
    crops = Crops(preprocessing=PREPROCESSING, augment="crop-flip")
    assert isinstance(reader_for(folder, crops=crops, bad=bad), NativeReader)
    with pytest.raises(ConfigError, match="augmentation of photos: got 'shift'"):
        reader_for(folder, crops=replace(crops, augment="shift"), bad=bad)


def test_without_the_library_pillow_reads(folder, monkeypatch):
    monkeypatch.setattr("falconet.data.native.library", lambda: None)
    reader = reader_for(folder, crops=Crops(preprocessing=PREPROCESSING), bad=BadImages(0, note=print))
    assert isinstance(reader, PillowReader)


def test_the_box_is_drawn_from_the_size_in_the_header(library, folder):
    """The comparison does not use the reader: keyed draws, Pillow's size, Pillow's crop."""
    native, _ = readers(library, folder, "crop-flip")
    images, _ = read(native, [3], epoch=5)
    image = Image.open(io.BytesIO(folder.path(3).read_bytes())).convert("RGB")
    draws = crop_draws(np.array([3]), seed=3, epoch=5)
    box = random_resized_crop(np.array([image.width]), np.array([image.height]), draws)[0].tolist()
    expected = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))
    if flips("crop-flip", np.array([3]), seed=3, epoch=5)[0]:
        expected = expected[:, ::-1]
    assert psnr(images[0], expected) > 45
