"""Small versions of CIFAR in both formats, and every way in which they can be wrong."""

import pickle
import urllib.error
import urllib.request

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from falconet.data.sources import cifar
from falconet.data.sources.cifar import CIFARS
from falconet.errors import DataError

COUNT = 4  # records a file


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(address, timeout):
        raise urllib.error.URLError("Network is unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def records(kind, number):
    """The planes and labels in file `number`, 0 to 5; the last is for validation."""
    generator = np.random.default_rng(number)
    classes = len(CIFARS[kind].class_names)
    planes = generator.integers(0, 256, (COUNT, 3072), dtype=np.uint8)
    return planes, generator.integers(0, classes, COUNT)


def file_names(layout):
    return [*layout.train, layout.validation]


def write_binary(folder, kind):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(file_names(CIFARS[kind].binary)):
        planes, labels = records(kind, number)
        columns = [labels[:, None]] if kind == "cifar10" else [np.full((COUNT, 1), 255), labels[:, None]]
        (folder / name).write_bytes(np.concatenate([*columns, planes], axis=1).astype(np.uint8).tobytes())


def write_python(folder, kind):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(file_names(CIFARS[kind].python)):
        planes, labels = records(kind, number)
        content = {b"data": planes, CIFARS[kind].labels_key: labels.tolist(), b"batch_label": b"one of many"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))


LAYOUTS = [("cifar10", "binary"), ("cifar10", "python"), ("cifar100", "binary"), ("cifar100", "python")]


def write(root, kind, layout):
    folder = root / getattr(CIFARS[kind], layout).folder
    (write_binary if layout == "binary" else write_python)(folder, kind)
    return folder


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
@pytest.mark.parametrize("directly", [False, True])
def test_both_formats_are_read_from_the_folder_or_the_official_one_in_it(tmp_path, kind, layout, directly):
    folder = write(tmp_path, kind, layout)
    splits = cifar.load(folder if directly else tmp_path, kind=kind)
    stored = [records(kind, number) for number in range(len(file_names(CIFARS[kind].binary)))]
    train = np.concatenate([planes for planes, _ in stored[:-1]]).reshape(-1, 3, 32, 32)
    np.testing.assert_array_equal(splits.train.images, train.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(splits.train.labels, np.concatenate([labels for _, labels in stored[:-1]]))
    np.testing.assert_array_equal(splits.validation.labels, stored[-1][1])
    assert splits.native_size == 32


def test_a_python_file_is_read_as_torchvision_reads_it(tmp_path, monkeypatch):
    write(tmp_path, "cifar10", "python")
    meta = {"label_names": list(CIFARS["cifar10"].class_names)}
    (tmp_path / "cifar-10-batches-py/batches.meta").write_bytes(pickle.dumps(meta))
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    for path in (tmp_path / "cifar-10-batches-py").glob("*_batch*"):  # torchvision needs text keys
        content = pickle.loads(path.read_bytes())
        path.write_bytes(pickle.dumps({key.decode(): value for key, value in content.items()}, protocol=4))
    expected = CIFAR10(tmp_path, train=True)
    splits = cifar.load(tmp_path, kind="cifar10")
    np.testing.assert_array_equal(splits.train.images, expected.data)
    assert splits.train.labels.tolist() == expected.targets
    assert list(splits.class_names) == expected.classes


def test_the_hundred_names_are_in_order():
    names = CIFARS["cifar100"].class_names
    assert len(set(names)) == 100
    assert list(names) == sorted(names)


def test_a_truncated_file_is_refused(tmp_path):
    path = write(tmp_path, "cifar10", "binary") / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError) as caught:
        cifar.load(tmp_path, kind="cifar10")
    expected = f"{path}: {COUNT * 3073 - 1} bytes, expected a whole number of records of 3073; cut short?"
    assert str(caught.value) == expected


def test_an_empty_file_is_refused(tmp_path):
    path = write(tmp_path, "cifar100", "binary") / "test.bin"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"test.bin: 0 bytes, expected a whole number of records of 3074"):
        cifar.load(tmp_path, kind="cifar100")


def test_a_label_out_of_range_names_file_and_record(tmp_path):
    path = write(tmp_path, "cifar10", "binary") / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[2 * 3073] = 10
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        cifar.load(tmp_path, kind="cifar10")
    assert str(caught.value) == f"{path}: record 2 has the label 10, expected 0 to 9"


@pytest.mark.parametrize(("label", "shown"), [(-1, "-1"), (10, "10"), (1 << 70, str(1 << 31))])
def test_a_label_out_of_range_in_a_python_file_is_named(tmp_path, label, shown):
    path = write(tmp_path, "cifar10", "python") / "test_batch"
    content = {b"data": records("cifar10", 0)[0], b"labels": [0, label, 1, 2]}
    path.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(DataError, match=f"test_batch: record 1 has the label {shown}, expected 0 to 9"):
        cifar.load(tmp_path, kind="cifar10")


def test_a_missing_file_of_the_set_is_named(tmp_path):
    path = write(tmp_path, "cifar10", "binary") / "data_batch_5.bin"
    path.unlink()
    with pytest.raises(DataError, match=r"data_batch_5.bin: not found, although other files of the data set exist"):
        cifar.load(tmp_path, kind="cifar10")


PYTHON_MISTAKES = {
    "has no 'data' of N x 3072 bytes": {b"labels": [1]},
    "not a list of 2 whole numbers": {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
    "an array that is not of plain bytes": {b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 1]},
}


@pytest.mark.parametrize(("message", "content"), PYTHON_MISTAKES.items())
def test_a_python_file_without_its_entries_is_refused(tmp_path, message, content):
    path = write(tmp_path, "cifar10", "python") / "data_batch_1"
    path.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(DataError, match=message):
        cifar.load(tmp_path, kind="cifar10")


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_without_data_or_network_one_line_explains_what_to_put_where(tmp_path, kind):
    (tmp_path / "unrelated").write_text("")
    with pytest.raises(DataError) as caught:
        cifar.load(tmp_path, kind=kind)
    archive = {"cifar10": "cifar-10-binary.tar.gz", "cifar100": "cifar-100-binary.tar.gz"}[kind]
    folders = {
        "cifar10": "cifar-10-batches-bin/, cifar-10-batches-py/, train/airplane/ and so on",
        "cifar100": "cifar-100-binary/, cifar-100-python/, train/apple/ and so on",
    }
    assert str(caught.value) == (
        f"{kind}: not found under {tmp_path} (looked for {folders[kind]}) "
        f"and https://www.cs.toronto.edu/~kriz/{archive} cannot be reached (Network is unreachable); "
        f"put {archive}, unpacked, there"
    )


def test_a_mistyped_folder_is_not_created(tmp_path):
    with pytest.raises(DataError, match="cannot be reached"):
        cifar.load(tmp_path / "dta", kind="cifar10")
    assert not (tmp_path / "dta").exists()


@pytest.fixture
def png_files(tmp_path):
    """CIFAR-10 as other sites offer it: a folder for each class, each image of one colour."""
    for split, count in (("train", 2), ("test", 1)):
        for label, name in enumerate(cifar.CIFAR10):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (label, number, 7)).save(folder / f"{number:04}.png")
    return tmp_path


def test_cifar_is_read_from_png_files_in_folders_of_its_classes(png_files):
    assert cifar.is_there(png_files, kind="cifar10")
    found = cifar.load(png_files, kind="cifar10")
    assert found.train.labels.tolist() == [label for label in range(10) for _ in range(2)]
    assert found.train.images[:, 5, 9].tolist() == [[label, number, 7] for label in range(10) for number in range(2)]
    assert found.validation.images.shape == (10, 32, 32, 3)
    assert found.train.class_names == cifar.CIFAR10
    assert found.mean == pytest.approx((0.4914, 0.4822, 0.4465))


def test_official_files_come_before_png_files(png_files):
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (png_files / f"{name}.bin").write_bytes(bytes(3073))
    assert len(cifar.load(png_files, kind="cifar10").train) == 5


def test_a_wrong_image_of_cifar_is_named(png_files):
    wrong = png_files / "test" / "frog" / "0000.png"
    Image.new("RGB", (33, 32)).save(wrong)
    with pytest.raises(DataError, match=f"{wrong}: 33 x 32 pixels, expected 32 x 32"):
        cifar.load(png_files, kind="cifar10")
    wrong.write_bytes(b"no image")
    with pytest.raises(DataError, match=f"{wrong}: "):
        cifar.load(png_files, kind="cifar10")


def test_folders_without_png_files_are_refused(png_files):
    for path in (png_files / "test").glob("*/*.png"):
        path.unlink()
    with pytest.raises(DataError, match="test: no PNG files in the folders of its classes"):
        cifar.load(png_files, kind="cifar10")
