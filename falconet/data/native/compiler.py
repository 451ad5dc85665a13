"""Builds the decoder's shared library with the system's C++ compiler: `python -m falconet.data.native.compiler`.

It imports only the standard library: the package's build runs this file before anything is installed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = "libfalconet_jpeg.so"  # the same on every system: only ctypes loads it
COMPILERS = ("c++", "g++", "clang++")
# No contraction: fused multiply-adds would give different weights on ARM and x86.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fstack-protector-strong")
TARGETS: dict[str, tuple[tuple[str, ...], ...]] = {  # machine -> the flags of each compilation of target.cpp
    "x86_64": ((), ("-mavx2", "-mbmi", "-mbmi2")),
    "AMD64": ((), ("-mavx2", "-mbmi", "-mbmi2")),
}


class CannotBuildError(Exception):
    """The reason why there is no library, in one line."""


def digest() -> str:
    """The digest of the sources; a library contains that of its own."""
    total = hashlib.sha256()
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.hpp"))):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def find_compiler() -> str:
    """The C++ compiler: the user's choice in CXX, or the first one found."""
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        found = shutil.which(name.split()[0]) if name.strip() else None
        if found is not None:
            return found
    raise CannotBuildError(f"no C++ compiler found (looked for CXX, {', '.join(COMPILERS)})")


def compilations(machine: str) -> list[tuple[Path, tuple[str, ...]]]:
    """Every source with its flags; target.cpp is compiled once per kind of processor."""
    plain: list[tuple[Path, tuple[str, ...]]] = [
        (path, ()) for path in sorted(SOURCES.glob("*.cpp")) if path.stem != "target"
    ]
    return plain + [(SOURCES / "target.cpp", flags) for flags in TARGETS.get(machine, ((),))]


def build(folder: Path = HERE, *, flags: tuple[str, ...] = FLAGS) -> Path:
    """Build the library in `folder`, complete or not at all."""
    command = [find_compiler(), *flags, f'-DFALCONET_SOURCES="{digest()}"']
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for number, (source, own) in enumerate(compilations(platform.machine())):
            objects.append(f"{scratch}/{number}.o")
            _run([*command, *own, "-c", str(source), "-o", objects[-1]])
        made = Path(scratch) / LIBRARY
        _run([*command, "-shared", *objects, "-o", str(made)])
        # Built aside and renamed: another process may be loading the old one, or building as well.
        staged = folder / f".{LIBRARY}.{os.getpid()}"
        try:
            shutil.copyfile(made, staged)
            staged.replace(folder / LIBRARY)
        except OSError as error:
            raise CannotBuildError(f"{folder}: cannot be written ({error.strerror})") from None
        finally:
            staged.unlink(missing_ok=True)
    return folder / LIBRARY


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
        raise CannotBuildError(f"{Path(command[0]).name} failed: {first.strip()}")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except CannotBuildError as error:
        sys.exit(f"falconet: the native JPEG decoder was not built: {error}")
