"""The time of traced updates by kind of work, by kernel or operator, and idle."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType

from falconet.report.profile.kernel_kinds import Kind, kind_of
from falconet.report.profile.trace import Traced

MOST_KERNELS = 60
LONGEST_NAME = 300  # characters: templates of C++ have thousands
Row = dict[str, object]
_DRIVER = re.compile(r"(cuda|cu|hip)[A-Z]")
_MS = 1e-6  # of a nanosecond


@dataclass
class _Total:
    calls: int = 0
    nanoseconds: int = 0

    def add(self, nanoseconds: int) -> None:
        self.calls += 1
        self.nanoseconds += nanoseconds


@dataclass(frozen=True)
class Work:
    """A kernel on the device or, without a GPU, an operator on the host with its own time."""

    name: str
    kind: Kind
    begin: int  # nanoseconds
    end: int
    own: int  # nanoseconds without those of the operators inside


def kernel_times(traced: Traced, *, calls: int) -> Row:
    """A summary of traced calls, in milliseconds per call."""
    works = works_of(traced)
    by_kind: dict[str, _Total] = defaultdict(_Total)
    by_name: dict[tuple[str, str], _Total] = defaultdict(_Total)
    for work in works:
        by_kind[work.kind].add(work.own)
        by_name[work.name[:LONGEST_NAME], work.kind].add(work.own)
    idle = max(0.0, traced.seconds * 1e3 - busy(works) * _MS)
    costly = sorted(by_name.items(), key=lambda item: (-item[1].nanoseconds, item[0]))
    kinds = sorted(by_kind.items(), key=lambda item: -item[1].nanoseconds)
    return {
        "device": traced.device.type,
        "milliseconds": _rounded(traced.seconds * 1e3 / calls),
        "kinds": [{"kind": kind, **_per_call(total, calls)} for kind, total in kinds],
        "idle": _rounded(idle / calls),
        "kernels": [
            {"name": name, "kind": kind, **_per_call(total, calls)} for (name, kind), total in costly[:MOST_KERNELS]
        ],
        "left_out": max(0, len(costly) - MOST_KERNELS),
    }


def shares(times: Row) -> dict[str, float]:
    """The percentage of each kind of work and of idle time; work that overlaps on a device counts for each kind."""
    kinds: Any = times["kinds"]
    found = {str(each["kind"]): float(each["milliseconds"]) for each in kinds}
    found["idle"] = float(times["idle"])  # type: ignore[arg-type]
    whole = sum(found.values()) or 1.0
    return {kind: 100 * spent / whole for kind, spent in found.items()}


def brief(times: Row, *, most: int = 4) -> str:
    """One line: `48.2 ms: convolution 61 %, norm 21 %, idle 4 %`; all kinds of convolution count as one."""
    joined: dict[str, float] = defaultdict(float)
    for kind, share in shares(times).items():
        joined[kind.partition(",")[0]] += share
    idle = joined.pop("idle", 0.0)
    largest = sorted(joined.items(), key=lambda item: -item[1])[: most - 1]
    words = ", ".join(f"{kind} {share:.0f} %" for kind, share in (*largest, ("idle", idle)))
    return f"{times['milliseconds']:,.4g} ms: {words}"


def works_of(traced: Traced) -> list[Work]:
    """Kernels, copies and fills on a GPU; operators on a CPU."""
    return _kernels(traced.events) if traced.device.type == "cuda" else _operators(traced.events)


def is_on_device(event: Any) -> bool:
    """Whether a record is of work on a GPU, rather than of a marked range or of memory."""
    is_work = event.device_type() != DeviceType.CPU and not event.is_user_annotation()
    return bool(is_work and event.name() != "[memory]")


def is_on_host(event: Any) -> bool:
    """Whether a record is of an operator, rather than of a call to the GPU's driver or of memory."""
    is_here = event.device_type() == DeviceType.CPU and event.name() != "[memory]"
    return bool(is_here and not is_launch(event))


def is_launch(event: Any) -> bool:
    """Whether a record is of a launch through the GPU's driver: cudaLaunchKernel, cuLaunchKernelEx."""
    return _DRIVER.match(event.name()) is not None


def _kernels(events: Iterable[Any]) -> list[Work]:
    return [
        Work(e.name(), kind_of(e.name()), e.start_ns(), e.start_ns() + e.duration_ns(), e.duration_ns())
        for e in events
        if is_on_device(e)
    ]


def _operators(events: Iterable[Any]) -> list[Work]:
    """Operators with their own times; all within a step of the optimizer count as the optimizer."""
    hosted = in_order(event for event in events if is_on_host(event))
    kinds: list[Kind] = []
    around = parents(hosted)
    for event, parent in zip(hosted, around, strict=True):
        inherits = parent is not None and kinds[parent] == "optimizer"
        kinds.append("optimizer" if inherits else kind_of(event.name()))
    return [
        Work(event.name(), kind, event.start_ns(), event.start_ns() + event.duration_ns(), spent)
        for event, kind, spent in zip(hosted, kinds, own_times(hosted, around), strict=True)
    ]


def in_order(events: Iterable[Any]) -> list[Any]:
    """The events by start time; if some start together, the longest first, because it encloses the others."""
    return sorted(events, key=lambda event: (event.start_ns(), -event.duration_ns()))


def parents(events: Sequence[Any]) -> list[int | None]:
    """The index of the event that encloses each one in its thread; events must be in order of start time."""
    open_in: dict[int, list[int]] = defaultdict(list)
    found: list[int | None] = []
    for place, event in enumerate(events):
        stack, begin = open_in[event.start_thread_id()], event.start_ns()
        while stack and events[stack[-1]].start_ns() + events[stack[-1]].duration_ns() <= begin:
            stack.pop()
        found.append(stack[-1] if stack else None)
        stack.append(place)
    return found


def own_times(events: Sequence[Any], around: Sequence[int | None]) -> list[int]:
    """Nanoseconds of each event minus those of the events inside it."""
    own = [event.duration_ns() for event in events]
    for event, parent in zip(events, around, strict=True):
        if parent is not None:
            own[parent] -= event.duration_ns()
    return [max(0, spent) for spent in own]


def busy(works: Iterable[Work]) -> int:
    """Nanoseconds during which at least one kernel or operator runs."""
    total, until = 0, 0
    for begin, end in sorted((work.begin, work.end) for work in works):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def _per_call(total: _Total, calls: int) -> Row:
    return {"calls": _rounded(total.calls / calls), "milliseconds": _rounded(total.nanoseconds * _MS / calls)}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
