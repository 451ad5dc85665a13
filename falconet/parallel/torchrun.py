"""torchrun with its own arguments, which ends as its workers did: their exit code, one line, nothing left behind."""

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence

from torch.distributed import DistError
from torch.distributed.run import parse_args, run

from falconet.errors import Interrupted
from falconet.exits import DONE, FAILED, INTERRUPTED, MISTAKE
from falconet.parallel import environment
from falconet.parallel.launch import FINAL, described, failures_of, heeded


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workers of this host to their end; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory(prefix="falconet-") as logs:
        own = [f"--log-dir={logs}", f"--signals-to-handle={heeded()}"]  # else torchrun leaves a folder in /tmp
        args = parse_args([*own, *words])  # type: ignore[no-untyped-call]
        if not args.standalone and args.node_rank == 0 and _is_taken(int(args.master_port)):
            _say(f"MASTER_PORT: {args.master_port} is in use on {args.master_addr}; wanted a free one")
            return MISTAKE
        if os.environ.get(environment.TETHERED):
            threading.Thread(target=_follow_input, name="tether", daemon=True).start()
        try:
            failures = failures_of(lambda: run(args))  # type: ignore[no-untyped-call]
        except Interrupted:
            return INTERRUPTED
        except DistError as error:
            where = f"{args.master_addr}:{args.master_port}"
            _say(f"{socket.gethostname()}: the hosts did not meet at {where}: {str(error).partition(chr(10))[0]}")
            return FAILED
        except FileNotFoundError as error:
            _say(f"{error.filename}: not found on {socket.gethostname()}; wanted a program")
            return MISTAKE
    codes = set(failures.values())
    for code in FINAL:
        if code in codes:
            return code
    if codes - {FAILED}:  # who ends with 1 has said why
        _say(f"on {socket.gethostname()}: {described(failures)}")
    return FAILED if failures else DONE


def _follow_input() -> None:
    """Whoever started us holds our standard input open: when it ends, so do we, as after SIGTERM."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _say(text: str) -> None:
    sys.stderr.write(f"poprun: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
