"""One md5 for all files of a folder, whatever their names: what the original's validate_dataset.py compares."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from falconet.errors import DataError

CHUNK = 1 << 20  # bytes

# The original's folders of ImageNet: their digests begin and end like this; the middle was not published to us.
IMAGENET = {"train": ("17aed950", "aa95"), "validation": ("8d6a57a7", "d5bd")}


def folder_md5(folder: Path, *, workers: int) -> str:
    """As the package checksumdir has it: the md5 of the sorted md5s of the files, in hexadecimal."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        try:
            digests = sorted(pool.map(_file_md5, _files(folder)))
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return hashlib.md5("".join(digests).encode(), usedforsecurity=False).hexdigest()


def is_imagenet(digest: str, split: str) -> bool:
    """Whether it is the digest of the original's folder, as far as that is known: 48 of 128 bits."""
    begin, end = IMAGENET[split]
    return digest.startswith(begin) and digest.endswith(end)


def _files(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        yield from (f"{root}/{name}" for name in names)


def _file_md5(path: str) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123, a million of them
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
