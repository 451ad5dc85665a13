"""The md5 of a folder: of its files' contents, whatever they are called."""

import hashlib

import pytest

from falconet.data.sources.folder import folder_md5, is_imagenet
from falconet.errors import DataError


def test_the_md5_of_a_folder_is_that_of_the_sorted_md5s_of_its_files(tmp_path):
    contents = [b"one", b"two" * 1_000_000, b""]
    (tmp_path / "deep").mkdir()
    for place, content in zip(("b", "deep/a", "c"), contents, strict=True):
        (tmp_path / place).write_bytes(content)
    parts = sorted(hashlib.md5(content).hexdigest() for content in contents)
    assert folder_md5(tmp_path, workers=2) == hashlib.md5("".join(parts).encode()).hexdigest()


def test_an_unreadable_file_is_reported_in_one_line(tmp_path):
    (tmp_path / "a").symlink_to("nowhere")
    with pytest.raises(DataError) as caught:
        folder_md5(tmp_path, workers=2)
    assert str(caught.value) == f"{tmp_path}/a: cannot be read (No such file or directory)"


@pytest.mark.parametrize(
    ("digest", "split", "same"),
    [
        ("17aed950" + "0" * 20 + "aa95", "train", True),
        ("17aed950" + "0" * 20 + "aa95", "validation", False),
        ("8d6a57a7" + "0" * 20 + "d5bd", "validation", True),
        ("17aed950" + "0" * 24, "train", False),
    ],
)
def test_imagenet_is_recognised_by_the_ends_of_its_digest(digest, split, same):
    assert is_imagenet(digest, split) is same
