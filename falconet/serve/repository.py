"""A server's models: opened by name, swapped for newer checkpoints, and closed after their last request."""

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from falconet.errors import SHORTAGES, ConfigError, DeviceError, UserError, did_you_mean, memory_shortage
from falconet.infer.predictor import Lanes, Pixels
from falconet.report.console import Say
from falconet.serve import protocol, records
from falconet.serve.batching import Batcher, Computed, Counts, Executed, Policy
from falconet.serve.protocol import Served
from falconet.serve.refusals import (
    ForbiddenError,
    LateError,
    RefusedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)

Decode = Callable[[memoryview], npt.NDArray[np.uint8]]  # an encoded photo -> S x S x 3; UnreadableImageError
State = Literal["READY", "UNAVAILABLE"]
SHOWN = 80  # characters of a client's name in an error
DECODERS = os.cpu_count() or 1  # threads that decode photos, for all models together
HUNG_SECONDS = 120.0  # in one batch, after which a model is not ready: a device may never return
AGAIN_SECONDS = 30.0  # before weights that could not be opened are tried again, then twice as long, ...
LAST_AGAIN_SECONDS = 3600.0  # ... up to this: an attempt takes seconds of all cores
MOST_FAILED = 3  # failed batches in a row after which a model is not ready: a broken device fails on all


class Opened(NamedTuple):
    """A version of a model, ready to compute."""

    served: Served
    lanes: Lanes
    decode: Decode
    stamp: object  # identifies the weights; a different one is newer
    about: str  # what it takes, and what computes it, in words


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of a model, which a name stands for."""

    open: Callable[[], Opened]  # takes seconds; raises UserError
    stamp: Callable[[], object]  # identifies the weights that `open` would take now; raises UserError


class Listed(NamedTuple):
    """A model as in the protocol's index."""

    name: str
    version: str
    state: State
    reason: str  # why it is not ready, or why a newer checkpoint was not taken


class Tried(NamedTuple):
    """An attempt to swap newer weights into a watched model."""

    stamp: object
    wait: float = 0.0  # seconds from the next try to the one after it
    again: float = 0.0  # when the weights may be tried again, by the loop's clock

    def once_more(self, now: float) -> "Tried":
        """Record that the weights are being tried now."""
        return Tried(self.stamp, wait=min(2 * self.wait, LAST_AGAIN_SECONDS), again=now + self.wait)


class Model:
    """A version of a model that answers requests until it is retired."""

    def __init__(self, opened: Opened, policy: Policy, executed: Executed = lambda *_: None) -> None:
        self.served, self.decode = opened.served, opened.decode
        self.stamp, self.about = opened.stamp, opened.about
        self.batcher = Batcher(opened.lanes, policy, executed)
        self._users = self._decoding = 0  # the latter counts photos
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def works(self) -> bool:
        """Whether the model has lately computed what it was given."""
        return self.batcher.counts.failed_in_a_row < MOST_FAILED and self.batcher.longest() < HUNG_SECONDS

    @contextlib.contextmanager
    def used(self) -> Iterator["Model"]:
        """Keep the model open within the context, even if a newer version takes its name."""
        self._users += 1
        self._unused.clear()
        records.note_model(self.served.name, self.served.version)
        try:
            yield self
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    @contextlib.contextmanager
    def decoding(self, photos: int) -> Iterator[None]:
        """Count photos that are decoded within the context; OverloadedError at once if too many images wait.

        A large request counts only as its share of the queue, which it does not exceed later either.
        """
        places = min(photos, self.batcher.policy.share)
        self.batcher.require_room(places, coming=max(self._decoding - DECODERS, 0))  # the rest are being decoded
        self._decoding += places
        try:
            yield
        finally:
            self._decoding -= places

    @contextlib.asynccontextmanager
    async def in_time(self, seconds: float) -> AsyncIterator[None]:
        """Limit the time in which a request is answered within the context; LateError after this many seconds."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            self.batcher.counts.late += 1
            self.batcher.spent.failed += seconds
            raise LateError(f"not computed within {seconds:.3g} s, the time limit of the request") from None

    async def computed(self, images: Pixels, *, deadline: float | None = None) -> Computed:
        """The scores of 1 to `max_batch` images."""
        found = await self.batcher.submit(images, deadline=deadline)
        records.note_computed(len(images), queued=found.queued, computed=found.computed)
        return found

    def configuration(self) -> dict[str, object]:
        """The configuration, as Triton has it."""
        return protocol.configuration(self.served, max_delay=self.batcher.policy.max_delay)

    def statistics(self) -> dict[str, object]:
        """The statistics, as Triton has them."""
        return protocol.statistics(self.served, self.batcher.counts, self.batcher.spent)

    async def retire(self) -> None:
        """Wait for the requests that use the model, then free its threads and its memory."""
        await self._unused.wait()
        self.batcher.close(wait=False)


@dataclass(kw_only=True)
class Repository:
    """Models by name, for one event loop. `sources` may know names that are not loaded."""

    sources: Callable[[], Mapping[str, Source]]  # may read a folder, perhaps over a network
    policy: Callable[[Served], Policy]
    preferred: str | None = None  # the model of requests that name none
    executed: Callable[[str, int, float], None] = lambda *_: None  # called for each batch: model, images, seconds
    _models: dict[str, Model] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)  # by name: why it could not be loaded, or swapped
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time: each takes memory and all cores
    _opener: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="open"))
    _looker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="look"))
    _tasks: set["asyncio.Task[Any]"] = field(default_factory=set)  # tasks that load or retire models
    _past: Counts = field(default_factory=Counts)  # of retired models

    @property
    def models(self) -> list[Model]:
        """All loaded models."""
        return list(self._models.values())

    @property
    def counts(self) -> Counts:
        """Counts over all models that were ever loaded."""
        everything = [self._past, *(model.batcher.counts for model in self._models.values())]
        return Counts(**{name: sum(getattr(each, name) for each in everything) for name in vars(self._past)})

    def present(self, name: str, version: str = "") -> Model | None:
        """The model with this name and version, if it is loaded."""
        found = self._models.get(name)
        return found if found is not None and version in ("", found.served.version) else None

    async def find(self, name: str = "", version: str = "") -> Model:
        """The model with this name; without a name, the preferred one, or the only one."""
        found = self._models.get(name) if name else self._unnamed()
        if found is None:
            if name in await self._known():
                raise UnavailableError(f"{name} is not loaded{self._because(name)}")
            known = f"this server has {', '.join(map(repr, self._models)) or 'none'}{_meant(name, self._models)}"
            raise UnknownModelError(f"there is no model '{name[:SHOWN]}'; {known}")
        if version not in ("", found.served.version):
            raise UnknownModelError(
                f"{found.served.name} has no version '{version[:SHOWN]}'; its version is {found.served.version}"
            )
        return found

    def _unnamed(self) -> Model:
        if self.preferred in self._models:
            return self._models[self.preferred]
        if len(self._models) == 1:
            (only,) = self._models.values()
            return only
        if not self._models:
            raise UnavailableError("no model is loaded")
        raise RequestError(f"expected the name of a model, ?model=NAME, one of {', '.join(sorted(self._models))}")

    def _because(self, name: str) -> str:
        return f": {self._reasons[name]}" if name in self._reasons else ""

    async def _known(self) -> Mapping[str, Source]:
        """The known sources, found in a thread; if their folder is gone, the request is not at fault."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._looker, self.sources)
        except ConfigError as error:
            raise UnavailableError(str(error)) from error

    def index(self) -> list[Listed]:
        """All known models, loaded or not; first the one for requests that name none."""
        return self._rows(self.sources())

    async def indexed(self) -> list[Listed]:
        """The index, found while other requests are answered."""
        return self._rows(await self._known())

    def _rows(self, known: Mapping[str, Source]) -> list[Listed]:
        rows = [
            Listed(name, model.served.version, "READY", self._reasons.get(name, ""))
            for name, model in sorted(self._models.items(), key=lambda each: each[0] != self.preferred)
        ]
        others = sorted(known.keys() - self._models.keys())
        return [*rows, *(Listed(name, "", "UNAVAILABLE", self._reasons.get(name, "unloaded")) for name in others)]

    async def load(self, name: str) -> Model:
        """Open what the name stands for now, and let it replace an older version.

        Requests in progress end with the version that they began with. If opening fails, the older version stays. A
        client that leaves does not stop it: its thread would go on, and others would be started beside it.
        """
        loading = asyncio.get_running_loop().create_task(self._loaded(name))
        self._tasks.add(loading)
        loading.add_done_callback(self._forget)
        model = await asyncio.shield(loading)
        records.note_model(name, model.served.version)
        return model

    async def _loaded(self, name: str) -> Model:
        async with self._opening:
            known = await self._known()
            source = known.get(name)
            if source is None:
                raise UnknownModelError(f"there is no model '{name[:SHOWN]}'{_meant(name, known)}")
            try:
                opened = await asyncio.get_running_loop().run_in_executor(self._opener, _open, source)
            except UserError as error:
                self._reasons[name] = str(error)
                raise
            self._reasons.pop(name, None)
            older = self._models.get(name)
            self.adopt(name, opened)
            if older is not None:
                self._retire(older)
            return self._models[name]

    def adopt(self, name: str, opened: Opened) -> None:
        """Answer requests for this name with what was opened, from now on."""
        self._models[name] = Model(opened, self.policy(opened.served), partial(self.executed, name))

    async def unload(self, name: str) -> None:
        """Take no more requests for a model, and close it after those in progress."""
        async with self._opening:
            model = self._models.pop(name, None)
            if model is None:
                raise UnknownModelError(f"'{name[:SHOWN]}' is not loaded{_meant(name, self._models)}")
            self._reasons.pop(name, None)
            records.note_model(name, model.served.version)
            self._retire(model)

    def _retire(self, model: Model) -> None:
        async def retired() -> None:
            await model.retire()
            for name, value in vars(model.batcher.counts).items():
                setattr(self._past, name, getattr(self._past, name) + value)

        task = asyncio.get_running_loop().create_task(retired())
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, even if the client has gone

    async def watch(self, *, seconds: float, say: Say) -> None:
        """Swap in newer weights as they appear, until cancelled; `say` gets a line for each, or the reason why not."""
        tried: dict[str, Tried] = {}  # by name
        told: dict[str, str] = {}  # the last reason, by name
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(seconds)
            if not self._models:
                continue
            known = asyncio.ensure_future(self._known())  # once for all models
            for name, model in list(self._models.items()):
                try:
                    source = (await known)[name]
                    stamp = await asyncio.get_running_loop().run_in_executor(self._opener, source.stamp)
                    last = tried.get(name)
                    if last is None or last.stamp != stamp:
                        last = Tried(stamp, wait=AGAIN_SECONDS)
                    if stamp == model.stamp or now() < last.again:
                        continue
                    tried[name] = last.once_more(now())
                    newer = await self.load(name)
                    tried[name] = Tried(stamp, again=math.inf)
                    say(f"{name}: version {newer.served.version} takes the place of {model.served.version}")
                    told.pop(name, None)
                except (UserError, OSError, RuntimeError, KeyError, RefusedError) as error:
                    reason = _reason(error)
                    if told.get(name) != reason:
                        say(f"{name}: stays at version {model.served.version}: {reason}")
                    told[name] = reason

    def close(self) -> None:
        """Let all threads end after their current batches, and after a model that is being opened."""
        for threads in (self._opener, self._looker):
            threads.shutdown(wait=False, cancel_futures=True)
        for model in self._models.values():
            model.batcher.close(wait=False)


def require_control(may_load: bool) -> None:
    """Raise ForbiddenError unless clients may load and unload models."""
    if not may_load:
        raise ForbiddenError("clients may not load or unload models; the server needs --repository for that")


def _reason(error: Exception) -> str:
    """The reason, in one line, why newer weights were not taken."""
    if isinstance(error, KeyError | UnknownModelError):
        return "is gone"
    if isinstance(error, RuntimeError):
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return str(error)


def _meant(name: str, known: Iterable[str]) -> str:
    """A similar name, unless the client's is long: searching with a megabyte would stop all other requests."""
    return did_you_mean(name[:SHOWN], known)


def _open(source: Source) -> Opened:
    """Open a source; UserError also if there is no memory for it beside the other models."""
    try:
        return source.open()
    except SHORTAGES as error:
        short = memory_shortage(error)
        if short is None:
            raise
        raise DeviceError(f"{short}; fewer models, or a smaller --max-batch, need less") from error
