"""Whether the folder of the photos is there; nothing here needs torch, so that a wrong one is answered at once."""

from pathlib import Path

from falconet.errors import DataError


def require_folder(data_dir: Path) -> None:
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: no such folder, wanted one with train/ and val/")
