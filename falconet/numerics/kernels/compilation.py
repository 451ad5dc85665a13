"""Kernels compiled in parallel before they run; Triton alone compiles each at its first launch, on one core."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from falconet.report.console import Say

PATIENCE = 1.0  # seconds; what takes longer is reported

Rehearse = Callable[[], None]  # launches kernels as a later pass will, on tensors whose memory is not used


@dataclass(frozen=True)
class Launch:
    """The arguments for which a kernel is compiled."""

    kernel: Any
    args: Sequence[Any]
    named: dict[str, Any]
    loads: bool = False  # the first with arguments of these types, for which Triton 3.6 builds a launcher in C

    def compile(self) -> None:
        """Compile without running: Triton looks only at the type of tensors and the alignment of their addresses."""
        self.kernel.run(*self.args, grid=(1,), warmup=True, **self.named)


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The means to compile kernels ahead; processes on one host that need the same ones share the work."""

    workers: int  # threads: Triton's passes, LLVM and ptxas run without Python's lock
    report: Callable[[int], None]  # gets the number of kernels if they take longer than PATIENCE
    note: Say  # gets a line if kernels cannot be listed
    number: int = 0  # of this process among those of this host
    processes: int = 1  # of this host
    meet: Callable[[], None] = lambda: None  # waits for the others, on all hosts

    def ahead(self, rehearse: Rehearse) -> None:
        """Compile every kernel that `rehearse` launches and this process has not loaded yet.

        A kernel that cannot be compiled is left to its first launch, which raises the compiler's error.
        """
        found: list[Launch] = []
        try:
            with _recorded(found):
                rehearse()
        except Exception as error:  # noqa: BLE001  # of a model that runs nevertheless; what it launched is known
            reason = str(error).strip().partition("\n")[0]
            self.note(f"note: kernels are compiled when they first run, which takes longer: {reason}")
        self._compile(found[self.number :: self.processes], of=len(found))
        self.meet()
        if self.processes > 1:
            self._compile(found, of=0)  # those of the other processes are on disk now

    def _compile(self, launches: Sequence[Launch], *, of: int) -> None:
        with (
            _counted() as kept,
            _Pool(self.workers, initializer=_set_device, initargs=(driver.active.get_current_device(),)) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
        ):
            try:
                for launch in reversed(launches):  # those of the backward pass take longest
                    pool.loads = launch.loads
                    launch.compile()
                waiting = wait(mode.raw_futures, timeout=PATIENCE).not_done
                if waiting and of:
                    self.report(of - len(kept))
                wait(waiting)
            except BaseException:  # Ctrl-C
                for future in mode.raw_futures:
                    future.cancel()
                raise


class _Pool(ThreadPoolExecutor):
    """Threads that compile kernels and, on request, load them, which builds their launchers, too."""

    loads = False

    def submit(self, compile_: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]  # Triton's call
        loads = self.loads

        def compiled() -> Any:
            kernel = compile_()
            if loads:
                _ = kernel.run
            return kernel

        return super().submit(compiled)


def _set_device(number: int) -> None:
    if torch.cuda.is_available():  # a new thread has the first one
        torch.cuda.set_device(number)


@contextmanager
def _recorded(found: list[Launch]) -> Iterator[None]:
    """Record the kernels that are launched in this context, each once, instead of launching them.

    Launches by this thread count, and those that a backward pass makes in torch's threads on tensors without
    memory. Other threads, such as those that resize photos on the device, launch theirs meanwhile.
    """
    seen: set[tuple[int, Any]] = set()
    types: set[tuple[Any, ...]] = set()
    now: dict[int, Launch] = {}  # by thread
    launched, asked, own = JITFunction.run, knobs.runtime.jit_cache_hook, threading.get_ident()

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        thread = threading.get_ident()
        if thread != own and not any(isinstance(value, FakeTensor) for value in (*args, *named.values())):
            return launched(kernel, *args, grid=grid, warmup=warmup, **named)
        pairs = {name: _stand_in(value) for name, value in named.items()}
        now[thread] = Launch(kernel, [_stand_in(value) for value in args], pairs)
        return launched(kernel, *now[thread].args, grid=grid, warmup=True, **pairs)

    def missing(*, key: Any, fn: Any, compile: Any, is_manual_warmup: bool, **_: Any) -> bool:
        """Record a kernel that this process has not loaded; called by Triton, and true means: do not compile it now."""
        place, signature = (id(fn.jit_function), key), tuple(compile["signature"].values())
        if is_manual_warmup and place not in seen:
            found.append(replace(now[threading.get_ident()], loads=signature not in types))
            seen.add(place)
            types.add(signature)
        return is_manual_warmup

    JITFunction.run, knobs.runtime.jit_cache_hook = record, missing
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launched, asked


class _StandIn(triton.MockTensor):  # type: ignore[misc]  # it has no types
    """A stand-in for a tensor, without its memory. For one without memory, the address is what torch would choose."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.dtype)
        fake = isinstance(tensor, FakeTensor)
        self._address = int(tensor.storage_offset()) * tensor.element_size() if fake else tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


def _stand_in(value: Any) -> Any:
    return _StandIn(value) if isinstance(value, Tensor) else value


@contextmanager
def _counted() -> Iterator[list[str]]:
    """The kernels that need no compilation, because an earlier start left them on disk."""
    kept: list[str] = []
    listener = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            kept.append(src.name)

    knobs.compilation.listener = listen
    try:
        yield kept
    finally:
        knobs.compilation.listener = listener
