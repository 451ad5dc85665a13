"""Where checkpoints are looked for; nothing here needs torch, so that a wrong path is answered at once."""

import difflib
from pathlib import Path

from falconet.checkpoint.manifest import MANIFEST
from falconet.errors import CheckpointError


def require_folder(path: Path) -> None:
    """Refuse what is no folder, with the nearest name beside it that holds checkpoints."""
    if not path.is_dir():
        what = "a file; wanted a checkpoint or a folder of them" if path.exists() else "no such file or folder"
        raise CheckpointError(f"{path}: {what}{_meant(path)}")


def _meant(path: Path) -> str:
    names = [p.name for p in path.parent.glob("[!.]*") if p.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    held = [name for name in near if _holds_checkpoints(path.with_name(name))]
    return f"; did you mean '{held[0]}'?" if held else ""


def _holds_checkpoints(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or (folder / "checkpoints").is_dir() or any(folder.glob(f"*/{MANIFEST}"))
