"""Folders that a line names: refused in one line where they do not exist, before torch is imported."""

from pathlib import Path

from falconet.errors import DataError


def require_folder(folder: Path, expected: str) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected {expected}")


def require_photos(folder: Path) -> None:
    require_folder(folder, "one with train/ and val/")
