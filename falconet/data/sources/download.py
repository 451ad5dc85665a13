"""One archive from the network: with progress, checked, and whole or not there at all."""

import hashlib
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from falconet.errors import DataError

TIMEOUT = 20  # seconds without a byte
CHUNK = 1 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A gzipped tar file and its official checksum."""

    address: str
    md5: str

    @property
    def name(self) -> str:
        return self.address.rsplit("/", 1)[-1]


def fetch(archive: Archive, *, into: Path, folder: str, wanted: str) -> None:
    """Put the archive's `folder` under `into`; `wanted` says what is missing, for the line shown on failure."""
    place = f"put {archive.name}, unpacked, there"
    try:
        response = urllib.request.urlopen(archive.address, timeout=TIMEOUT)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it is an open answer as well
        raise DataError(f"{wanted} and {archive.address} cannot be reached ({_reason(error)}); {place}") from None
    try:
        with response:
            into.mkdir(parents=True, exist_ok=True)
            # In a folder of its own, renamed when whole: a kill leaves a stray folder, never half a data set.
            with tempfile.TemporaryDirectory(prefix=f".{folder}-", dir=into) as temporary:
                packed = Path(temporary) / archive.name
                found = _save(response, packed)
                if found != archive.md5:
                    raise DataError(f"{wanted}; {archive.address} came with md5 {found}, wanted {archive.md5}; {place}")
                with tarfile.open(packed) as tar:
                    tar.extractall(temporary, filter="data")
                if not (into / folder).exists():  # another process may have been faster
                    (Path(temporary) / folder).rename(into / folder)
    except (OSError, HTTPException, tarfile.TarError) as error:
        raise DataError(f"{wanted}; {archive.address}: download failed ({_reason(error)}); {place}") from None


def _save(response: HTTPResponse, target: Path) -> str:
    """Write what comes into the file; its md5."""
    digest = hashlib.md5(usedforsecurity=False)
    size = response.headers.get("Content-Length")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with shown as progress, target.open("wb") as file:
        task = progress.add_task(target.name, total=int(size) if size else None)
        while chunk := response.read(CHUNK):
            digest.update(chunk)
            file.write(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return " ".join(str(reason).split()) or type(error).__name__
