"""Time and memory of each layer in one update, forward and backward, and the memory over that update.

Layers are marked by global hooks when they are called, because a layer with hooks of its own is not fused. An
operator belongs to the innermost layer that called it, a step of the backward pass to the layer whose operator it
reverses, found by autograd's sequence numbers.
"""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import Any, Literal, NamedTuple

from torch import fx, nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from falconet.report.profile.kernel_times import in_order, is_launch, is_on_device, is_on_host, own_times, parents
from falconet.report.profile.trace import Traced

Phase = Literal["forward", "backward", "optimizer", "other"]
Row = dict[str, object]
POINTS = 400  # of the memory over time
MOST_PHASES = 64
_MARK, _REVERSED, _MOVES = "falconet layer ", "autograd::engine::evaluate_function", "Optimizer.step#"
_NONE = -1  # marks what is in no layer
_MS = 1e-6  # of a nanosecond


class Layers:
    """The layers of a model by name, including those that stand for several fused ones."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._order = {name: place for place, name in enumerate(self._names.values())}
        self._numbers: dict[nn.Module, int] = {}
        self.called: list[tuple[str, ...]] = []  # the names of each layer that was called
        self.kinds: list[str] = []

    def number(self, module: nn.Module) -> int | None:
        """The index of a layer in `called`; None: it has no name."""
        if module not in self._numbers:
            names = self._names_of(module)
            if not names:
                return None
            if names not in self.called:
                self.called.append(names)
                self.kinds.append(type(self._model.get_submodule(names[0]) if len(names) == 1 else module).__name__)
            self._numbers[module] = self.called.index(names)  # a layer that replaces another counts as the same one
        return self._numbers[module]

    def _names_of(self, module: nn.Module) -> tuple[str, ...]:
        """The names of a layer, or of the layers that a fused layer holds; none for a traced model."""
        if module in self._names:
            return (self._names[module],) if self._names[module] else ()
        if isinstance(module, fx.GraphModule):
            return ()
        inside = {self._names[each] for each in module.modules() if each in self._names}
        outer = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
        return tuple(sorted(outer, key=lambda name: self._order[name]))

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Mark the work of each layer in the profile while in this context."""
        open_in = threading.local()

        def enter(module: nn.Module, _: Any) -> None:
            number, marks = self.number(module), getattr(open_in, "marks", [])
            if number is None and not marks:
                number = _NONE  # the model itself: a forward pass
            mark = None if number is None else record_function(f"{_MARK}{number}")
            open_in.marks = [*marks, mark]
            if mark is not None:
                mark.__enter__()  # type: ignore[no-untyped-call]

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            mark = open_in.marks.pop()
            if mark is not None:
                mark.__exit__(None, None, None)

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Place(NamedTuple):
    """The layer and the phase that work belongs to."""

    layer: int | None  # None: between layers, or in none
    phase: Phase


@dataclass
class _Cost:
    forward: float = 0.0  # nanoseconds
    backward: float = 0.0
    kept: int = 0  # bytes
    made: int = 0  # bytes allocated in the backward pass


@dataclass(frozen=True)
class _Block:
    """A block of memory, from allocation to release."""

    bytes: int
    begin: int
    end: int | None  # None: it outlives the profile
    place: _Place


@dataclass(frozen=True)
class LayerCosts:
    """Time and memory by layer in a profiled update, and its memory over time."""

    rows: Sequence[Row]
    rest: Mapping[Phase, float]  # milliseconds in no layer
    memory: Row
    passes: int  # micro-batches

    def to_json(self) -> Row:
        return {"rows": list(self.rows), "rest": dict(self.rest), "passes": self.passes}


def layer_costs(traced: Traced, layers: Layers, *, before: int | None) -> LayerCosts:
    """`before`: bytes on the device when the profiler started; None: unknown, as on a CPU."""
    hosted = in_order(event for event in traced.events if is_on_host(event))
    around = parents(hosted)
    places = _places(hosted, around)
    costs: dict[int, _Cost] = defaultdict(_Cost)
    rest: dict[Phase, float] = dict.fromkeys(("forward", "backward", "optimizer", "other"), 0.0)
    for place, spent in _spent(traced, hosted, around, places):
        if place.layer is None or place.phase in ("optimizer", "other"):
            rest[place.phase] += spent * _MS
        elif place.phase == "forward":
            costs[place.layer].forward += spent
        else:
            costs[place.layer].backward += spent
    blocks, freed = _blocks(traced, hosted, around, places)
    passes = _passes(hosted, places)
    for block in blocks:
        if block.place.layer is None:
            continue
        if block.place.phase == "backward":
            costs[block.place.layer].made += block.bytes
        elif any(begin <= block.begin < end and (block.end is None or block.end >= end) for begin, end in passes):
            costs[block.place.layer].kept += block.bytes
    count = _micro_batches(hosted, around, places)
    rows = [_row(layers, number, costs[number], passes=count) for number in range(len(layers.called))]
    shown = [row for row in rows if any(row[name] for name in ("forward", "backward", "kept", "made"))]
    memory = _memory(blocks, freed, hosted, places, before=before, names=layers.called)
    return LayerCosts(shown, {phase: _rounded(spent) for phase, spent in rest.items()}, memory, count)


def _row(layers: Layers, number: int, cost: _Cost, *, passes: int) -> Row:
    return {
        "names": list(layers.called[number]),
        "kind": layers.kinds[number],
        "forward": _rounded(cost.forward * _MS),  # milliseconds of the update
        "backward": _rounded(cost.backward * _MS),
        "kept": cost.kept // passes,  # bytes of a micro-batch
        "made": cost.made // passes,
    }


def _places(events: Sequence[Any], around: Sequence[int | None]) -> list[_Place]:
    """The layer and phase of each operator."""
    creators = _creators(events, around)
    found: list[_Place] = []
    last: dict[int, int | None] = {}  # the layer of the last step of the backward pass, by thread
    for event, parent in zip(events, around, strict=True):
        name, outer = event.name(), _Place(None, "other") if parent is None else found[parent]
        if name.startswith(_MARK):
            phase: Phase = "forward" if outer.phase == "other" else outer.phase
            found.append(_Place(_marked(name), phase))
        elif name.startswith(_REVERSED):
            thread = event.start_thread_id()
            if event.sequence_nr() >= 0:  # adding a gradient belongs to the step that has just computed it
                last[thread] = creators.get((event.fwd_thread_id(), event.sequence_nr()))
            found.append(_Place(last.get(thread), "backward"))
        elif name.startswith(_MOVES):
            found.append(_Place(None, "optimizer"))
        else:
            found.append(outer)
    return found


def _marked(name: str) -> int | None:
    number = int(name.removeprefix(_MARK))
    return None if number == _NONE else number


def _creators(events: Sequence[Any], around: Sequence[int | None]) -> dict[tuple[int, int], int | None]:
    """The layer whose operator has each sequence number.

    An operator records its thread's next number: one that needs no gradient records the same number as the next
    one that does, so the last one is the creator.
    """
    layers: list[int | None] = []
    found: dict[tuple[int, int], int | None] = {}
    for event, parent in zip(events, around, strict=True):
        name = event.name()
        outer = None if parent is None else layers[parent]
        layers.append(_marked(name) if name.startswith(_MARK) else outer)
        if event.sequence_nr() >= 0 and event.fwd_thread_id() == 0:  # else it is a step of the backward pass
            found[event.start_thread_id(), event.sequence_nr()] = layers[-1]
    return found


def _spent(
    traced: Traced, events: Sequence[Any], around: Sequence[int | None], places: Sequence[_Place]
) -> Iterator[tuple[_Place, int]]:
    """Nanoseconds of kernels, or of operators without a device, each with its layer and phase."""
    if traced.device.type != "cuda":
        for event, place, spent in zip(events, places, own_times(events, around), strict=True):
            if not event.name().startswith(_MARK):  # Python's time
                yield place, spent
        return
    operators = {event.correlation_id(): place for event, place in zip(events, places, strict=True)}
    launches = {event.correlation_id(): event.start_ns() for event in traced.events if is_launch(event)}
    kernels = [event for event in traced.events if is_on_device(event)]
    # A kernel that no operator of torch launched, such as one of Triton's in an optimizer, is known by its time alone.
    times = [launches.get(kernel.correlation_id(), 0) for kernel in kernels]
    order = sorted(range(len(kernels)), key=times.__getitem__)
    timely = dict(zip(order, _whose([(times[at], None) for at in order], events, around, places), strict=True))
    for at, kernel in enumerate(kernels):
        yield operators.get(kernel.linked_correlation_id(), timely[at]), kernel.duration_ns()


def _passes(events: Sequence[Any], places: Sequence[_Place]) -> list[tuple[int, int]]:
    """Start and end of each forward pass; a step of the backward pass ends it."""
    found: list[tuple[int, int]] = []
    begun = ended = 0
    for event, place in zip(events, places, strict=True):
        if place.phase == "forward":
            begun, ended = begun or event.start_ns(), max(ended, event.start_ns() + event.duration_ns())
        elif place.phase == "backward" and begun:
            found.append((begun, ended))
            begun = ended = 0
    return [*found, (begun, ended)] if begun else found


def _micro_batches(events: Sequence[Any], around: Sequence[int | None], places: Sequence[_Place]) -> int:
    """The number of calls of most layers; a pipeline calls them for several micro-batches before a backward pass."""
    calls: Counter[int | None] = Counter()
    for event, parent, place in zip(events, around, places, strict=True):
        is_inner = parent is not None and places[parent] == place  # of a layer that computes it in its place
        if event.name().startswith(_MARK) and place.phase == "forward" and not is_inner:
            calls[place.layer] += 1
    return mode(calls.values()) if calls else 1


class _Change(NamedTuple):
    """An allocation or a release of memory."""

    time: int
    thread: int
    address: int
    bytes: int


def _changes(traced: Traced) -> list[_Change]:
    """Allocations and releases on the update's device, in order; only the tree of events has addresses."""
    waiting = list(traced.profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    found = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]" and event.extra_fields.device.type == traced.device.type:
            extra = event.extra_fields
            found.append(_Change(event.start_time_ns, event.start_tid, extra.ptr, extra.alloc_size))
    return sorted(found)


def _blocks(
    traced: Traced, events: Sequence[Any], around: Sequence[int | None], places: Sequence[_Place]
) -> tuple[list[_Block], list[_Change]]:
    """Blocks allocated during the profile, and releases of older blocks."""
    changes = _changes(traced)
    whose = _whose([(change.time, change.thread) for change in changes], events, around, places)
    live: dict[int, tuple[_Change, _Place]] = {}
    blocks, older = [], []
    for change, place in zip(changes, whose, strict=True):
        if change.bytes > 0:
            live[change.address] = change, place
        elif change.address in live:
            made, by = live.pop(change.address)
            blocks.append(_Block(made.bytes, made.time, change.time, by))
        elif change.bytes < 0:
            older.append(change)
    return [*blocks, *(_Block(made.bytes, made.time, None, by) for made, by in live.values())], older


def _whose(
    moments: Iterable[tuple[int, int | None]],
    events: Sequence[Any],
    around: Sequence[int | None],
    places: Sequence[_Place],
) -> list[_Place]:
    """The layer and phase of the innermost operator at each moment, in its thread or (None) in any; both sorted."""
    begun: dict[int | None, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        begun[event.start_thread_id()].append(number)
        begun[None].append(number)
    passed: dict[int | None, int] = defaultdict(int)
    found = []
    for time, thread in moments:
        numbers = begun[thread]
        while passed[thread] < len(numbers) and events[numbers[passed[thread]]].start_ns() <= time:
            passed[thread] += 1
        at: int | None = numbers[passed[thread] - 1] if passed[thread] else None
        while at is not None and events[at].start_ns() + events[at].duration_ns() < time:
            at = around[at]
        found.append(_Place(None, "other") if at is None else places[at])
    return found


def _memory(
    blocks: Sequence[_Block],
    older: Sequence[_Change],
    events: Sequence[Any],
    places: Sequence[_Place],
    *,
    before: int | None,
    names: Sequence[tuple[str, ...]],
) -> Row:
    """The memory curve of the update, thinned out, with its peak and phases."""
    changes = [(block.begin, block.bytes, block.place) for block in blocks]
    changes += [(block.end, -block.bytes, block.place) for block in blocks if block.end is not None]
    changes += [(change.time, change.bytes, _Place(None, "other")) for change in older]
    changes.sort(key=lambda change: change[0])
    if not changes or not events:
        return {}
    begin = min(changes[0][0], events[0].start_ns())
    end = max(changes[-1][0], max(event.start_ns() + event.duration_ns() for event in events))
    width = max(1, -(-(end - begin) // POINTS))
    now = peak = before or 0
    at, by, highest = begin, _Place(None, "other"), [0] * POINTS
    filled = 0
    for time, size, place in changes:
        spot = min(POINTS - 1, (time - begin) // width)
        for empty in range(filled, spot + 1):  # until this change, nothing changed
            highest[empty] = max(highest[empty], now)
        filled = spot
        now += size
        highest[spot] = max(highest[spot], now)
        if now > peak:
            peak, at, by = now, time, place
    for empty in range(filled, POINTS):
        highest[empty] = max(highest[empty], now)
    return {
        "is_whole": before is not None,
        "before": before or 0,
        "after": now,
        "peak": peak,
        "peak_at": _rounded((at - begin) * _MS),
        "peak_phase": by.phase,
        "peak_layers": [] if by.layer is None else list(names[by.layer]),
        "milliseconds": _rounded((end - begin) * _MS),
        "points": highest,
        "phases": _phases(events, places, begin),
    }


def _phases(events: Sequence[Any], places: Sequence[_Place], begin: int) -> list[list[object]]:
    """Each phase with its start and end in milliseconds; adjacent ones of one kind are merged."""
    found: list[tuple[Phase, int, int]] = []
    for event, place in zip(events, places, strict=True):
        if place.phase == "other":
            continue
        start, end = event.start_ns() - begin, event.start_ns() - begin + event.duration_ns()
        if found and found[-1][0] == place.phase:
            found[-1] = place.phase, found[-1][1], max(end, found[-1][2])
        else:
            found.append((place.phase, start, end))
    return [[phase, _rounded(start * _MS), _rounded(end * _MS)] for phase, start, end in found[:MOST_PHASES]]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
