"""The folder of an export: it replaces nothing else, and is either complete or missing."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from falconet import writing
from falconet.checkpoint.disk import aside, move_into_place, sweep
from falconet.errors import ConfigError, LinkError
from falconet.report.run_files import EXPORT_RECORD


def require_free(target: Path, *, overwrite: bool) -> None:
    """Refuse to replace anything but an export, and that only with --overwrite."""
    if target.is_symlink():
        raise LinkError(target, "--output")
    try:
        str(target).encode()
    except UnicodeEncodeError:
        why = "its name is not UTF-8, and the libraries that write models cannot open such a path"
        raise ConfigError(f"--output: {target}: {why}; expected another name") from None
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / EXPORT_RECORD).is_file():
        raise ConfigError(f"--output: {target} exists and is not an export; expected another name")
    if not overwrite:
        raise ConfigError(f"{target} holds an export; expected --overwrite to replace it, or another --output")
    for name in _added(target):
        raise ConfigError(f"--overwrite: {target} also holds {name}, which is not the export's; expected another name")


def _added(target: Path) -> Iterator[str]:
    """The files in the folder of an export that are not part of it."""
    try:
        own = {EXPORT_RECORD, *json.loads((target / EXPORT_RECORD).read_bytes())["files"]}
    except (ValueError, LookupError, TypeError):
        own = set()
    names = (str(path.relative_to(target)) for path in sorted(target.rglob("*")) if not path.is_dir())
    return (name for name in names if name not in own)


@contextmanager
def opened(target: Path) -> Iterator[Path]:
    """A hidden folder beside the target, removed at the end unless it was moved; those of killed exports go first."""
    folder = aside(target, "tmp")
    with writing.explained(target, option="--output"):
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def finish(folder: Path, target: Path, facts: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """Record the facts and files of a new folder, and move it into place; returns the size and digest of each file."""
    files = {str(path.relative_to(folder)): _flushed(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    content = json.dumps({**facts, "files": files}, indent=2, ensure_ascii=False) + "\n"
    # Stray bytes of a class's name become \udc.., which JSON reads back.
    writing.replace(folder, EXPORT_RECORD, content)
    move_into_place(folder, target)
    return files


def _flushed(path: Path) -> dict[str, Any]:
    """The size and digest of a file, once it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
