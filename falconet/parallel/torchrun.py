"""torchrun, made safe and tidy: no unpickling, the workers' exit code, one-line errors, no leftover files."""

import errno
import os
import signal
import socket
import sys
import threading
import uuid
from argparse import Namespace
from collections.abc import Sequence

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from falconet import writing
from falconet.errors import Interrupted
from falconet.exits import DONE, FAILED, INTERRUPTED, MISTAKE
from falconet.parallel import environment, rendezvous
from falconet.parallel.launch import FINAL, described, failures_of, heeded
from falconet.parallel.network import listener


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workers of this host to their end; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with writing.scratch() as logs:
        own = [f"--log-dir={logs}", f"--signals-to-handle={heeded()}"]  # otherwise torchrun leaves a folder in /tmp
        args = parse_args([*own, *words])  # type: ignore[no-untyped-call]
        if args.rdzv_backend not in ("static", "c10d"):
            _say(f"--rdzv-backend: got {args.rdzv_backend}, expected static or c10d")
            return MISTAKE
        _meet_safely(args)
        where = args.rdzv_endpoint
        if args.rdzv_backend == rendezvous.IN_ORDER and args.node_rank == 0 and _is_taken(where):
            _say(f"MASTER_PORT: {args.master_port} is in use on {args.master_addr}; choose a free port")
            return MISTAKE
        if os.environ.get(environment.TETHERED):
            threading.Thread(target=_follow_input, name="tether", daemon=True).start()
        try:
            failures = failures_of(lambda: run(args))  # type: ignore[no-untyped-call]
        except Interrupted:
            return INTERRUPTED
        except FileNotFoundError as error:
            _say(f"{error.filename}: not found on {socket.gethostname()}; expected a program")
            return MISTAKE
        except (DistError, RendezvousError, OSError) as error:
            _say(f"{socket.gethostname()}: the hosts did not meet at {where}: {str(error).partition(chr(10))[0]}")
            return FAILED
    codes = set(failures.values())
    for code in FINAL:
        if code in codes:
            return code
    if codes - {FAILED}:  # workers that exit with 1 have reported why
        _say(f"on {socket.gethostname()}: {described(failures)}")
    return FAILED if failures else DONE


def _follow_input() -> None:
    """Stop, as after SIGTERM, when the process that holds our stdin open exits."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _meet_safely(args: Namespace) -> None:
    """Replace torch's rendezvous by ours: c10d, which standalone mode uses too, executes what is sent to its port."""
    # Otherwise torch's agent opens a store for the workers on every interface, and restarted workers read the addresses
    # of dead ones from it (pytorch#135712).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if args.rdzv_backend == "c10d" and not args.standalone:
        args.rdzv_backend = rendezvous.ELASTIC
        return
    port = int(args.master_port or 0)
    if args.standalone or (args.nnodes in ("1", "1:1") and not args.rdzv_endpoint):
        args.rdzv_backend, args.rdzv_id = rendezvous.ONE_HOST, uuid.uuid4().hex
        args.rdzv_endpoint = f"{environment.LOOPBACK}:{0 if args.standalone else port}"
    else:
        args.rdzv_backend = rendezvous.IN_ORDER
        args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{port or environment.PORT}"
        args.rdzv_conf = ",".join(filter(None, (args.rdzv_conf, f"rank={args.node_rank}")))
    args.standalone = False


def _is_taken(where: str) -> bool:
    host, _, port = where.rpartition(":")
    try:
        listener(host, int(port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _say(text: str) -> None:
    sys.stderr.write(f"{os.environ.get(environment.TETHERED) or 'torchrun'}: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
