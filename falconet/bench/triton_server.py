"""NVIDIA's Triton server for a model repository, on free ports of this machine, for as long as it is measured.

A `tritonserver` on PATH, as in NVIDIA's container, is started unchanged. The one of PyPI's nvidia-pytriton has only the
Python backend; `triton_backend` is added to it, so that it loads the same repositories. Of that package, only the
program is used, from a virtual environment of its own: it needs numpy 1.

`python -m falconet.bench.triton_server` becomes the server, which the kernel interrupts when its parent ends.
"""

import contextlib
import ctypes
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from falconet import writing
from falconet.errors import ConfigError, WorldError
from falconet.parallel.host import none_left

VARIABLE = "FALCONET_TRITON"  # names a tritonserver program, or an environment with nvidia-pytriton
ENVIRONMENT = Path(__file__).parents[2] / ".venv-triton"  # where `make triton` installs
BACKEND = Path(__file__).with_name("triton_backend.py")
HOST = "127.0.0.1"
READY_SECONDS = 300.0  # to load and warm up the models; a small one takes 2
GRACE = 30.0  # seconds to exit after SIGINT; it takes 3 if nothing is in progress
EVERY = 0.05  # seconds between questions whether it is ready
ATTEMPTS = 3  # with other ports, if another process takes one meanwhile
SHARED_MEMORY = Path("/dev/shm")
_PDEATHSIG = 1  # of prctl: the signal for a process whose parent's thread has ended
_IN_USE = "already in use"
_FAILED = re.compile(r"^(?:error: |[EF]\d{4} \S+ \d+ \S+ )(.*)", re.M)  # how the server's log marks them
_NOT_FOUND = (
    f"needs NVIDIA's Triton server, and there is none; expected tritonserver on PATH, as in NVIDIA's container, or in"
    f" .venv-triton, where `make triton` installs it, or {VARIABLE}=DIR, an environment with nvidia-pytriton"
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A tritonserver program."""

    path: Path
    packages: Path | None  # the site-packages of PyPI's; None for one that has its backends

    def backends(self, folder: Path) -> list[str]:
        """Put our backend into a folder for a server that has none, and return the options for it.

        Files are copied, because the server refuses links to a library outside its folder.
        """
        if self.packages is None:
            return []
        home, python = self.packages / "pytriton/tritonserver", folder / "python"
        shutil.copytree(home / "backends/python", python)
        version = self.packages.parent.name.removeprefix("python")
        stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.is_file():
            raise ConfigError(f"{self.path} has no stub for Python {version}; expected {_versions(home)}")
        shutil.copy(stub, python)
        (folder / "onnxruntime").mkdir()
        shutil.copy(BACKEND, folder / "onnxruntime" / "model.py")
        return [f"--backend-directory={folder}"]

    def variables(self) -> dict[str, str]:
        """The environment of the process."""
        found = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
        if self.packages is None:
            return found
        programs = self.packages.parents[2] / "bin"
        # The interpreter's own library comes first: another build of the same Python breaks its standard library.
        ask = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
        try:
            library = subprocess.run([programs / "python", "-c", ask], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(
                f"{programs / 'python'}: {error}; expected an environment that `make triton` made"
            ) from None
        places = (library.stdout.strip(), str(self.packages / "nvidia_pytriton.libs"))
        return found | {
            "LD_LIBRARY_PATH": os.pathsep.join(places),
            "PATH": os.pathsep.join((str(programs), found.get("PATH", os.defpath))),
        }


def find() -> Program:
    """The server that is named, on PATH, or installed beside this project."""
    named = os.environ.get(VARIABLE)
    if named:
        place = Path(named).absolute()
        found = Program(path=place, packages=None) if place.is_file() else _packaged(place)
        if found is None:
            raise ConfigError(
                f"{VARIABLE}: {named}: expected a tritonserver program, or an environment with nvidia-pytriton"
            )
        return found
    on_path = shutil.which("tritonserver")
    found = Program(path=Path(on_path), packages=None) if on_path else _packaged(ENVIRONMENT)
    if found is None:
        raise ConfigError(_NOT_FOUND)
    return found


def _packaged(environment: Path) -> Program | None:
    for packages in sorted(environment.glob("lib/python3.*/site-packages")):
        path = packages / "pytriton/tritonserver/bin/tritonserver"
        if path.is_file():
            return Program(path=path, packages=packages)
    return None


def _versions(home: Path) -> str:
    return ", ".join(sorted(path.name for path in (home / "python_backend_stubs").iterdir()))


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports of a server on the loopback address."""

    http: int
    grpc: int
    metrics: int

    @classmethod
    def free(cls) -> "Ports":
        with contextlib.ExitStack() as stack:  # all are held until the last is found, so that they differ
            sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(3)]
            return cls(**dict(zip(("http", "grpc", "metrics"), (one.getsockname()[1] for one in sockets), strict=True)))

    def options(self) -> list[str]:
        ports = {"http": self.http, "grpc": self.grpc, "metrics": self.metrics}
        return [word for name, port in ports.items() for word in (f"--{name}-address={HOST}", f"--{name}-port={port}")]


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server whose models are ready."""

    ports: Ports
    log: Path
    process: int
    prefix: str  # of its shared memory

    def shared_memory(self) -> list[Path]:
        """The shared memory of the server and its models' processes."""
        return list(SHARED_MEMORY.glob(f"{self.prefix}*"))


@contextlib.contextmanager
def started(repository: Path, *, models: Sequence[str], options: Sequence[str] = ()) -> Iterator[Running]:
    """Run a server with some models of a repository, and stop it at the end."""
    program = find()
    with writing.scratch() as home, none_left():
        added = program.backends(Path(home, "backends"))
        prefix = f"falconet-triton-{secrets.token_hex(6)}-"
        argv = [
            str(program.path),
            f"--model-repository={repository}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in models),
            "--strict-readiness=true",
            f"--exit-timeout-secs={GRACE / 2:.0f}",
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            *added,
            *options,
        ]
        try:
            yield from _started(argv, program.variables(), Path(home, "log"), prefix)
        finally:  # a crash would leave it
            for path in SHARED_MEMORY.glob(f"{prefix}*"):
                path.unlink(missing_ok=True)


def _started(argv: Sequence[str], variables: Mapping[str, str], log: Path, prefix: str) -> Iterator[Running]:
    for attempt in range(ATTEMPTS):
        ports = Ports.free()
        process = _start([*argv, *ports.options()], variables, log)
        try:
            if _is_ready(process, ports):
                yield Running(ports=ports, log=log, process=process.pid, prefix=prefix)
                return
        finally:
            code = _stop(process)
        why = _why(log)
        if _IN_USE not in why or attempt == ATTEMPTS - 1:
            raise WorldError(f"{argv[0]} did not start: exit code {code}: {why}")


def _start(argv: Sequence[str], variables: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    job = json.dumps({"parent": os.getpid(), "argv": argv, "variables": variables})
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "falconet.bench.triton_server", job],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _is_ready(process: "subprocess.Popen[bytes]", ports: Ports) -> bool:
    """Wait until the models are loaded; False if the server has exited, or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(HOST, ports.http, timeout=1.0)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/v2/health/ready")
            # A server of another process may have taken the port meanwhile; ours would have exited.
            if connection.getresponse().status == 200 and process.poll() is None:
                return True
        time.sleep(EVERY)
    return False


def _stop(process: "subprocess.Popen[bytes]") -> int:
    """End the server and its models' processes; the exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):  # usually none is left
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _why(log: Path) -> str:
    """The last errors in the server's log, or its last lines."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = _FAILED.findall(text)[-2:] or text.strip().splitlines()[-3:]
    return "; ".join(" ".join(line.split()).strip('"; ') for line in lines) or "it wrote nothing"


def main() -> None:
    job = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGINT)
    if os.getppid() != job["parent"]:  # it had ended before
        return
    try:
        os.execve(job["argv"][0], job["argv"], job["variables"])
    except OSError as error:
        sys.exit(f"{job['argv'][0]}: {error.strerror}")


if __name__ == "__main__":
    main()
