"""Options of the server, and of the clients that measure it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from falconet.config.ranges import AtLeast, Auto, Between, local


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where the server listens, and how it puts requests together."""

    host: str = local("127.0.0.1")
    """The address to listen on; 0.0.0.0: every one of this machine. There is no password and no encryption."""
    port: Annotated[int, Between(0, 65535)] | Auto = local("auto")
    """The port; 0: any free one; auto: 8000, in `bench serve` any free one."""
    max_batch: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images computed at once, and the most of one request; auto: 64, in `bench serve` the micro-batch."""
    max_delay: Annotated[float, AtLeast(0)] = 2.0
    """Milliseconds that a request may wait for others to join it while the device is free."""
    max_queue: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images that may wait; a request beyond is refused with status 503; auto: 16 x --max-batch."""
    front_ends: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Threads that talk to clients; auto: 4 for a CUDA device, 1 for a CPU, which needs its cores to compute."""
    capture: bool = True
    """On CUDA, record the computation of each batch size once and replay it: the same scores, less work for the CPU."""
    half_partial: bool = False
    """Let matrix products add up in half precision, where the device can."""


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """What a model without a checkpoint takes."""

    image_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Side of the square input in pixels; auto: what the model was made for. A checkpoint has its own."""
    classes: Annotated[int, AtLeast(2)] | Auto = "auto"
    """Classes; auto: 1000, or 10 for the CIFAR networks. A checkpoint has its own."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Who sends requests, and how many; --iterations are the requests of each client."""

    config: str | None = local(None)
    """A named config for inference (`falconet configs`) or a YAML file of options; the command line overrides it."""
    url: str | None = local(None)
    """Measure a server that runs already, such as http://127.0.0.1:8000, instead of starting one."""
    clients: Annotated[int, AtLeast(1)] = 1
    """Processes that send requests side by side."""
    request_type: Literal["SYNC", "ASYNC"] = "SYNC"
    """SYNC: a client waits for each answer before it asks again; ASYNC: it keeps --window requests in flight."""
    window: Annotated[int, AtLeast(1)] = 4
    """Requests of an ASYNC client in flight, each on a connection of its own."""
    check_answers: bool = False
    """Compare every answer with the model's own, computed here."""
    output: Path | None = local(None)
    """Also write every latency and the result to this JSON file."""
