"""Photos from memory: the same pixels as from files, limits, threads, and damage of every kind."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import hostile_photos
import layouts
from falconet.data import encoded as encoded_photos
from falconet.data import native
from falconet.data.crops import Crops
from falconet.data.encoded import PhotoDecoder
from falconet.data.image_files import BadImages, UnreadableImageError
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import NativeReader, PillowReader, reader_for
from falconet.data.storage import FileSource


def prepared(**options):
    return Preprocessing(**{"image_size": 32, "resize": 36, "mean": IMAGENET_MEAN, "std": IMAGENET_STD, **options})


PREPROCESSINGS = {
    "bilinear": prepared(),
    "bicubic": prepared(interpolation="bicubic"),
    "without antialiasing": prepared(antialias=False),
    "enlarged": prepared(image_size=96, resize=110),
    "the whole short side": prepared(image_size=40, resize=40, standardised=True),
}
# As in use, where Pillow's warnings about metadata are ignored.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:image file could not be identified")
PHOTO = layouts.photo(5, width=83, height=61)
FRAMES = [layouts.photo(seed, width=30, height=40) for seed in range(3)]


def saved(image, kind="JPEG", **options):
    return layouts.encoded(image, kind, **options)


def animated(kind):
    return saved(FRAMES[0], kind, save_all=True, append_images=FRAMES[1:], duration=40)


PHOTOS = {
    "4:4:4": saved(PHOTO, quality=92, subsampling=0),
    "4:2:2": saved(PHOTO, quality=92, subsampling=1),
    "4:2:0": saved(PHOTO, quality=85, subsampling=2),
    "restart markers": saved(PHOTO, quality=85, restart_marker_blocks=2),
    "progressive": saved(PHOTO, progressive=True),
    "grey": saved(PHOTO.convert("L")),
    "cmyk": saved(PHOTO.convert("CMYK")),
    "1 x 1": saved(PHOTO.resize((1, 1))),
    "1 x 301": saved(PHOTO.resize((1, 301))),
    "large": saved(layouts.photo(8, width=1001, height=667), quality=80),
    "turned by exif": saved(PHOTO, exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
    "bytes after the end": saved(PHOTO) + b"\xff\xda" * 1000,
    "png": saved(PHOTO, "PNG"),
    "palette": saved(PHOTO.convert("P"), "PNG"),
    "transparent palette": saved(PHOTO.convert("P"), "PNG", transparency=3),
    "alpha": saved(PHOTO.convert("RGBA"), "PNG"),
    "grey and alpha": saved(PHOTO.convert("LA"), "PNG"),
    "black and white": saved(PHOTO.convert("1"), "PNG"),
    "16 bit": saved(Image.fromarray(np.asarray(PHOTO.convert("L")).astype(np.uint16) * 257), "PNG"),
    "16 bit tiff": saved(Image.fromarray(np.asarray(PHOTO.convert("L")).astype(np.uint16) * 250), "TIFF"),
    "32 bit tiff": saved(Image.fromarray(np.asarray(PHOTO.convert("L")).astype(np.int32) * 300 - 2000), "TIFF"),
    "webp": saved(PHOTO, "WEBP", quality=80),
    "lossless webp": saved(PHOTO.convert("RGBA"), "WEBP", lossless=True),
    "gif": saved(PHOTO.convert("P"), "GIF"),
    "bmp": saved(PHOTO, "BMP"),
    "tiff": saved(PHOTO, "TIFF"),
    "compressed tiff": saved(PHOTO, "TIFF", compression="tiff_adobe_deflate"),
    "animated gif": animated("GIF"),
    "animated webp": animated("WEBP"),
    "animated png": animated("PNG"),
    "pages of a tiff": saved(FRAMES[0], "TIFF", save_all=True, append_images=FRAMES[1:]),
}


@pytest.fixture(params=["native", "Pillow"])
def decoder(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.why_not())
    return PhotoDecoder()


@pytest.mark.parametrize("preprocessing", PREPROCESSINGS.values(), ids=PREPROCESSINGS)
def test_pixels_from_memory_are_those_of_a_validation(tmp_path, decoder, preprocessing):
    for number, content in enumerate(PHOTOS.values()):
        (tmp_path / f"{number}.jpg").write_bytes(content)
    names = [f"{number}.jpg" for number in range(len(PHOTOS))]
    source = FileSource.of(tmp_path, names=names, labels=[0] * len(names), class_names=(".",))
    reader = reader_for(source, crops=Crops(preprocessing=preprocessing), bad=BadImages(0, note=lambda _: None))
    assert isinstance(reader, PillowReader if native.library() is None else NativeReader)
    expected = np.zeros((len(names), reader.size, reader.size, 3), np.uint8)
    assert reader.read(np.arange(len(names)), epoch=0, out=expected).all()
    for row, (name, content) in zip(expected, PHOTOS.items(), strict=True):
        for form in (content, bytearray(content), memoryview(b"?" + content + b"?")[1:-1]):
            found = decoder.decode(form, preprocessing)
            assert found.dtype == np.uint8
            assert np.array_equal(found, row), name


def test_only_the_first_frame_counts(decoder):
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        alone = saved(FRAMES[0], kind)
        several = PHOTOS["pages of a tiff"] if kind == "TIFF" else animated(kind)
        found, expected = (decoder.decode(each, prepared()).astype(int) for each in (several, alone))
        assert np.abs(found - expected).mean() < 3, kind  # another frame differs by about 60
        assert np.abs(found - decoder.decode(saved(FRAMES[1], kind), prepared())).mean() > 20


def test_many_threads_decode_what_one_does(decoder):
    contents = [saved(layouts.photo(seed, width=40 + 9 * seed, height=50)) for seed in range(12)] + list(
        PHOTOS.values()
    )
    expected = [decoder.decode(each, prepared()) for each in contents]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda content: decoder.decode(content, prepared()), contents * 8))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected * 8, strict=True))


def test_a_photo_may_change_once_it_is_decoded(decoder):
    content = bytearray(PHOTOS["4:2:0"])
    found = decoder.decode(content, prepared())
    kept = found.copy()
    content[:] = bytes(len(content))
    assert np.array_equal(found, kept)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"hello", "not a JPEG, PNG, WebP, GIF, BMP or TIFF file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a JPEG, PNG, WebP, GIF, BMP or TIFF file"),
        (saved(PHOTO, "PPM"), "not a JPEG, PNG, WebP, GIF, BMP or TIFF file"),
        (saved(PHOTO, "ICO"), "not a JPEG, PNG, WebP, GIF, BMP or TIFF file"),
        (PHOTOS["progressive"][:900], "truncated"),
        (PHOTOS["4:2:0"][: len(PHOTOS["4:2:0"]) // 2], "truncated"),
        (b"RIFF0000WAVEfmt ", "not an image"),
        (b"\xff\xd8\xff", "not an image"),
    ],
)
def test_an_unreadable_photo_is_refused_with_its_reason(decoder, content, reason):
    with pytest.raises(UnreadableImageError, match=f"^{reason}$"):
        decoder.decode(content, prepared())


def test_limits_are_inclusive(decoder):
    small = PhotoDecoder(most_bytes=len(PHOTOS["png"]), most_pixels=83 * 61)
    for name in ("png", "4:2:0", "progressive"):
        assert np.array_equal(small.decode(PHOTOS[name], prepared()), decoder.decode(PHOTOS[name], prepared()))
    with pytest.raises(UnreadableImageError, match=r"^10,173 bytes, more than the 10,172 allowed$"):
        small.decode(PHOTOS["png"] + b"\0", prepared())
    strict = PhotoDecoder(most_pixels=83 * 61 - 1)
    for name in ("png", "4:2:0", "progressive", "webp", "gif", "bmp", "tiff"):
        with pytest.raises(UnreadableImageError, match=r"^more than 5,062 pixels$"):
            strict.decode(PHOTOS[name], prepared())


def test_pillow_decodes_no_more_pixels_at_once_than_one_photo_may_have(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    pixels = PHOTO.width * PHOTO.height
    decoder, plain = PhotoDecoder(most_pixels=2 * pixels), encoded_photos.to_rgb
    lock, now, most = threading.Lock(), 0, 0

    def slowly(image):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        try:
            threading.Event().wait(0.01)
            return plain(image)
        finally:
            with lock:
                now -= 1

    monkeypatch.setattr(encoded_photos, "to_rgb", slowly)
    broken = PHOTOS["png"][:-4000]
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda each: _outcome(decoder, each), [PHOTOS["png"], broken] * 20))
    assert most == 2
    assert done.count("truncated") == 20
    assert done.count("") == 20


def _outcome(decoder, content):
    try:
        decoder.decode(content, prepared())
    except UnreadableImageError as error:
        return str(error)
    return ""


MEASURED = """
import sys, time
from pathlib import Path
from falconet.data.encoded import PhotoDecoder
from falconet.data.image_files import UnreadableImageError
from falconet.data.preprocessing import Preprocessing

def memory(peak):  # kB; getrusage would count the process that started this one
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(peak))

preprocessing = Preprocessing(image_size=32, resize=36, mean=(0, 0, 0), std=(1, 1, 1))
decoder = PhotoDecoder()
try:  # what is imported at first use does not count
    decoder.decode(b"BM" + bytes(60), preprocessing)
except UnreadableImageError:
    pass
for path in sys.argv[1:]:
    content = Path(path).read_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, began = memory("VmRSS"), time.process_time()
    try:
        decoder.decode(content, preprocessing)
        said = "decoded"
    except UnreadableImageError as error:
        said = str(error)
    print(f"{memory('VmHWM') - before}\\t{time.process_time() - began}\\t{said}")
"""


def measured(tmp_path, contents):
    """For each content in turn, in another process: growth of memory in kB, seconds of CPU time, and the outcome."""
    paths = []
    for number, content in enumerate(contents):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(content)
    command = [sys.executable, "-c", MEASURED, *map(str, paths)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split("\t") for line in lines]
    return [(int(growth), float(seconds), said) for growth, seconds, said in rows]


def test_bombs_are_refused_quickly_and_in_little_memory(tmp_path):
    made = [(make(), name, reason) for name, (make, reason) in hostile_photos.REFUSED.items()]
    found = measured(tmp_path, [content for content, _, _ in made])
    for (content, name, reason), (growth, seconds, said) in zip(made, found, strict=True):
        assert said == reason, name
        assert growth < 60_000 + len(content) // 1000, name  # decoded, they would take 400 MB and more
        assert seconds < 20, name  # under a second on an idle core; some would take minutes


@pytest.mark.slow
def test_the_largest_pictures_allowed_take_at_most_16_bytes_per_pixel(tmp_path):
    for name, content in hostile_photos.just_allowed().items():
        [(growth, _, said)] = measured(tmp_path, [content])
        assert said == "decoded", name
        assert 300_000 < growth < 16.5 * 9400**2 / 1024, name


def unharmed(decoder, content):
    """Whether decoding gives pixels; anything but pixels or the one error fails the test."""
    try:
        found = decoder.decode(content, prepared())
    except UnreadableImageError as error:
        reason = str(error)
    else:
        assert found.shape == (32, 32, 3)
        return True
    assert 0 < len(reason) <= encoded_photos.MOST_REASON
    assert reason.isprintable()
    return False


DECODER = PhotoDecoder(most_pixels=1 << 20)
STARTS = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"MM\0*", b"BM", b"RIFF0000WEBPVP8 "]


@given(start=st.sampled_from(STARTS), rest=st.binary(max_size=300))
def test_any_bytes_are_decoded_or_refused(start, rest):
    unharmed(DECODER, start + rest)


@settings(max_examples=400)
@given(data=st.data(), name=st.sampled_from(sorted(PHOTOS)))
def test_damaged_photos_are_decoded_or_refused(data, name):
    content = bytearray(PHOTOS[name])
    places = st.integers(0, len(content) - 1) | st.integers(0, min(400, len(content) - 1))
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=6)):
        content[place] = value
    unharmed(DECODER, content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])


def test_a_full_disk_or_a_missing_folder_changes_nothing(decoder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    for content in (PHOTOS["4:2:0"], PHOTOS["compressed tiff"], PHOTOS["webp"]):
        assert unharmed(decoder, content)
