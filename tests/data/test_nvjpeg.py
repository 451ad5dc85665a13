"""The binding of nvJPEG: what it finds, asks and reports, against a library that only pretends to decode."""

import ctypes
import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from falconet.data import gpu, gpu_decoders, nvjpeg
from falconet.data.gpu_jpeg import Size
from falconet.data.nvjpeg import Backend, Decoder, Library
from falconet.errors import DeviceError

SOURCE = Path(__file__).with_name("pretended_nvjpeg.c")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    path = tmp_path_factory.mktemp("nvjpeg") / "libnvjpeg.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    return path


@pytest.fixture
def library(built):
    found = Library(built)
    for name in ("pretended_batches", "pretended_prepared"):
        ctypes.c_int.in_dll(found.c, name).value = 0
    ctypes.c_int.in_dll(found.c, "pretended_engines").value = 1
    return found


def count(library, name):
    return ctypes.c_int.in_dll(library.c, f"pretended_{name}").value


def jpeg(width, height, *, end=b""):
    """`end`: bytes after the file's own, which the pretended library looks at."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 90)).save(buffer, "JPEG")
    return torch.frombuffer(bytearray(buffer.getvalue() + end), dtype=torch.uint8)


def decoded(library, files, sizes):
    begins = nvjpeg.laid_out(sizes)
    block = torch.zeros(int(begins[-1]), dtype=torch.uint8)
    decoder = nvjpeg.decoder(library)
    whole = decoder.decode(files, nvjpeg.planes(block.data_ptr(), sizes), stream=1)
    pictures = [
        block[begin : begin + 3 * size.width * size.height].view(3, size.height, size.width)
        for begin, size in zip(begins, sizes, strict=False)
    ]
    return whole, pictures


def test_pictures_lie_one_after_the_other_in_three_planes_without_padding():
    sizes = [Size(3, 2), Size(100, 7), Size(1, 1)]
    begins = nvjpeg.laid_out(sizes)
    assert begins.tolist() == [0, 256, 256 + 2304, 256 + 2304 + 256]
    made = nvjpeg.planes(4096, sizes)
    assert (
        made.dtype.itemsize * made.shape[1] == ctypes.sizeof(ctypes.c_void_p) * 4 + ctypes.sizeof(ctypes.c_size_t) * 4
    )
    assert made[1].tolist() == [4352, 4352 + 700, 4352 + 1400, 0, 100, 100, 100, 0]
    assert nvjpeg.laid_out([]).tolist() == [0]
    assert nvjpeg.planes(4096, []).shape == (0, 8)


def test_a_batch_is_one_call_and_is_prepared_again_only_for_another_size(library):
    sizes = [Size(10, 20), Size(31, 5), Size(8, 8)]
    files = [jpeg(*size) for size in sizes]
    decoder = nvjpeg.decoder(library)
    block = torch.zeros(int(nvjpeg.laid_out(sizes)[-1]), dtype=torch.uint8)
    for number in (3, 3, 2, 2, 2):
        places = nvjpeg.planes(block.data_ptr(), sizes[:number])
        assert decoder.decode(files[:number], places, stream=1) == [True] * number
    assert (count(library, "batches"), count(library, "prepared")) == (5, 2)


def test_planes_are_written_where_they_belong(library):
    sizes = [Size(10, 20), Size(31, 5), Size(8, 8)]
    files = [jpeg(*size, end=bytes(number)) for number, size in enumerate(sizes)]
    whole, pictures = decoded(library, files, sizes)
    assert whole == [True] * 3
    for file, picture in zip(files, pictures, strict=True):
        for plane in range(3):
            assert picture[plane].eq(10 * (len(file) % 10) + plane).all()


@pytest.mark.parametrize("refused", [{0}, {4}, {1, 2}, set(range(5))])
def test_files_that_are_refused_do_not_keep_the_others_from_being_decoded(library, refused):
    sizes = [Size(16, 16)] * 5
    files = [jpeg(16, 16, end=b"\xba" if number in refused else b"") for number in range(5)]
    whole, pictures = decoded(library, files, sizes)
    assert whole == [number not in refused for number in range(5)]
    assert all(picture.any() == (number not in refused) for number, picture in enumerate(pictures))


def test_another_failure_is_reported_in_one_line(library):
    line = r"photos cannot be decoded on the device: nvjpegDecodeBatched failed \(ALLOCATOR_FAILURE\)"
    with pytest.raises(DeviceError, match=line):
        decoded(library, [jpeg(16, 16, end=b"\xee")], [Size(16, 16)])


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (jpeg(33, 17), Size(33, 17)),
        (jpeg(41, 17), None),  # not supported
        (torch.zeros(200, dtype=torch.uint8), None),
        (jpeg(33, 17)[:100], None),
    ],
    ids=["whole", "not supported", "not a JPEG", "header cut off"],
)
def test_the_library_is_asked_which_files_it_takes(library, data, size):
    assert nvjpeg.decoder(library).size(data) == size


def test_engines_decode_where_there_are_any(library):
    assert nvjpeg.decoder(library).backend is Backend.HARDWARE
    ctypes.c_int.in_dll(library.c, "pretended_engines").value = 0
    assert nvjpeg.decoder(library).backend is Backend.GPU_HYBRID
    with pytest.raises(DeviceError, match=r"nvjpegCreateEx failed \(ARCH_MISMATCH\)"):
        Decoder(library, Backend.HARDWARE)


def test_what_was_made_is_destroyed(library):
    before = count(library, "alive")
    for _ in range(3):
        nvjpeg.decoder(library)
    assert count(library, "alive") == before


# The search.


@pytest.fixture
def nowhere(monkeypatch):
    """A machine without any nvJPEG; the folder in which `find_spec` finds a package is given by name."""
    packages = {}

    def find_spec(name):
        if name not in packages:
            return None
        folder = packages[name]
        where = {"origin": str(folder / "__init__.py"), "submodule_search_locations": [str(folder)]}
        return type("Spec", (), where)

    monkeypatch.setattr(nvjpeg.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(nvjpeg, "TOOLKIT", Path("/nonexistent"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("FALCONET_NVJPEG", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvjpeg.load.cache_clear()
    yield packages
    nvjpeg.load.cache_clear()


@pytest.mark.parametrize(
    ("package", "at"),
    [
        ("torchvision", "torchvision.libs/libnvjpeg.4a0b5c81.so.13"),
        ("nvidia", "nvidia/cu13/lib/libnvjpeg.so.13"),
        ("nvidia", "nvidia/nvjpeg/lib/libnvjpeg.so.13"),
        (None, "lib64/libnvjpeg.so"),
    ],
)
def test_the_library_is_found(nowhere, monkeypatch, built, tmp_path, package, at):
    place = tmp_path / at
    place.parent.mkdir(parents=True)
    shutil.copy(built, place)
    if package:
        nowhere[package] = tmp_path / package
    else:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found, why = nvjpeg.load()
    assert (found.path, found.version, why) == (place, "13.14.15", "")


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        (None, None, "libnvjpeg was not found beside torchvision, in NVIDIA's packages or in the CUDA toolkit"),
        (
            "libnvjpeg.so.12",
            b"",
            "libnvjpeg was not found beside torchvision, in NVIDIA's packages or in the CUDA toolkit",
        ),
        ("libnvjpeg.so.13", b"not a library", "libnvjpeg.so.13 cannot be loaded"),
    ],
    ids=["nothing", "of another CUDA", "damaged"],
)
def test_without_it_there_is_a_reason_in_one_line(nowhere, tmp_path, name, content, line):
    (tmp_path / "torchvision.libs").mkdir()
    nowhere["torchvision"] = tmp_path / "torchvision"
    if name:
        (tmp_path / "torchvision.libs" / name).write_bytes(content)
    found, why = nvjpeg.load()
    assert found is None
    assert line in why
    assert "\n" not in why


def test_it_can_be_turned_off(nowhere, monkeypatch):
    monkeypatch.setenv("FALCONET_NVJPEG", "0")
    assert nvjpeg.load() == (None, "turned off by FALCONET_NVJPEG=0")
    said = gpu_decoders.describe(torch.device("cpu"))
    assert said == "torchvision's nvJPEG: turned off by FALCONET_NVJPEG=0"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torchvision has nvJPEG in its packages for Linux")
def test_the_library_of_torchvision_has_every_function():
    nvjpeg.load.cache_clear()
    found, why = nvjpeg.load()
    assert found is not None, why


# The split.


@pytest.mark.parametrize("share", [0.01, 0.25, 0.45, 0.5, 0.99])
def test_the_device_decodes_its_share_of_every_class_and_of_every_batch(share):
    assert abs(gpu.given_to_device(np.arange(1_281_167), share).mean() - share) < 1e-4
    for first in range(0, 1_281_167, 50_000):  # a class of 1,300 neighbours
        assert abs(gpu.given_to_device(np.arange(first, first + 1300), share).mean() - share) < 0.003
    shuffled = np.random.default_rng(0).permutation(51_200).reshape(100, 512)
    shares = np.array([gpu.given_to_device(batch, share).mean() for batch in shuffled])
    assert np.abs(shares - share).max() < 0.09  # four deviations of as many independent draws


def test_a_photo_is_decoded_in_the_same_place_by_its_number_alone():
    indices = np.random.default_rng(0).integers(0, 2**40, 1000)
    whole = gpu.given_to_device(indices, 0.4)
    assert (np.array([gpu.given_to_device(indices[[row]], 0.4)[0] for row in range(1000)]) == whole).all()
    assert not (whole & ~gpu.given_to_device(indices, 0.5)).any()  # a larger share has them too
    assert gpu.given_to_device(indices, 1.0).all()
    assert gpu.given_to_device(np.arange(10), 0.4).tolist() == [
        *(True, False, True, False, False, True, False, True, False, False)
    ]


class Recorded(gpu.DeviceRows):
    """Which rows the device was given, and which the host."""

    def __init__(self, source, crops, host, *, share, refuses):
        self.made = gpu_decoders.Places(Place, most=1)
        super().__init__(torch.device("cpu"), source=source, crops=crops, host=host, share=share)
        self._places, self._refuses = self.made, refuses

    def _plain(self, rows, indices, place):
        for row in rows.tolist():
            yield gpu.Photo(row, torch.empty(0), Size(1, 1))

    def _decode(self, portion, indices, *, epoch, out, place):
        rows = [photo.row for photo in portion if indices[photo.row] not in self._refuses]
        out[rows] = 1
        return rows

    def _on_host(self, rows, indices, *, epoch, out):
        out[torch.from_numpy(rows)] = 2
        return indices[rows] != 11


class Place:
    stream = None


def test_the_host_decodes_the_others_and_what_the_device_refuses():
    from falconet.data.crops import Crops
    from falconet.data.preprocessing import Preprocessing
    from falconet.data.storage import FileSource

    names = [f"{number}.jpg" for number in range(20)]
    source = FileSource.of(Path(), names=names, labels=[0] * 20, class_names=("a",))
    preprocessing = Preprocessing(image_size=2, resize=2, mean=(0, 0, 0), std=(1, 1, 1))
    rows = Recorded(source, Crops(preprocessing=preprocessing, augment="none"), None, share=0.45, refuses={5})
    indices, out = np.random.default_rng(1).permutation(20), torch.zeros(20, 2, 2, 3, dtype=torch.uint8)
    read = rows.read(indices, epoch=0, out=out)
    on_device = gpu.given_to_device(indices, 0.45) & (indices != 5)
    assert out[:, 0, 0, 0].tolist() == np.where(on_device, 1, 2).tolist()
    assert read.tolist() == (indices != 11).tolist()
    assert 5 < on_device.sum() < 12


def test_a_place_is_made_when_it_is_first_needed_and_then_used_again():
    made = []
    places = gpu_decoders.Places(lambda: made.append(Place()) or made[-1], most=2)
    for _ in range(5):
        with places.taken() as one:
            assert one is made[0]
    with places.taken() as one, places.taken() as other:
        assert [one, other] == made

    def fails():
        raise DeviceError("no memory")

    places = gpu_decoders.Places(fails, most=1)
    for _ in range(3):  # what fails gives its place back
        with pytest.raises(DeviceError), places.taken():
            pass
