"""Compiles the gRPC interface with grpcio-tools: `python -m falconet.serve.interface.descriptors`.

The result describes the messages; classes are made from it when the server starts. The usual generated modules would
register the interface's names for the whole process, and the official client's own registration would then fail.

It imports only the standard library: the package's build runs this file before anything is installed.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COMMAND = "python -m falconet.serve.interface.descriptors"


class CannotBuildError(Exception):
    """The reason why the interface was not compiled, in one line."""


class NotBuiltError(Exception):
    """No compiled interface exists; the text says how to make one."""


def _sources() -> list[Path]:
    return sorted(HERE.glob("*.proto"))


def compiled() -> str:
    """The compiled interface's file name, with a digest of the sources, so that it cannot be stale."""
    total = hashlib.sha256()
    for path in _sources():
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"interface-{total.hexdigest()[:16]}.binpb"


def read() -> bytes:
    """Read the compiled interface, a serialized FileDescriptorSet."""
    try:
        return (HERE / compiled()).read_bytes()
    except FileNotFoundError:
        others = any(HERE.glob("interface-*.binpb"))
        why = "is compiled from other sources" if others else "is not compiled"
        raise NotBuiltError(f"the gRPC interface {why}; `{COMMAND}` compiles it with grpcio-tools") from None


def build(folder: Path) -> Path:
    """Compile the interface into `folder`, complete or not at all, and remove older ones."""
    made = folder.absolute() / compiled()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=made.parent, prefix=".interface-"
    ) as scratch:  # in the same file system, to be renamed
        staged = Path(scratch) / made.name
        line = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={staged}"]
        names = [path.name for path in _sources()]
        done = subprocess.run([*line, *names], cwd=HERE, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not staged.exists():
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise CannotBuildError(f"grpc_tools.protoc failed: {last.strip()}")
        staged.replace(made)
    for other in made.parent.glob("interface-*.binpb"):
        if other != made:
            other.unlink(missing_ok=True)
    return made


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build(HERE)}\n")
    except CannotBuildError as error:
        sys.exit(f"falconet: the gRPC interface was not compiled: {error}")
