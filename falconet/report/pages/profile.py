"""The report's part about a profiled run: where the time goes, costly kernels, layers, and memory over an update.

It is made from profile_summary.json, which may come from another person: every value is checked for its type, and every
text is escaped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from falconet.report.console import counted
from falconet.report.foreign_folder import count, number, objects, text
from falconet.report.pages.parts import Cell, Column, inert, table
from falconet.report.run_files import Layer

MOST_KINDS, MOST_KERNELS, MOST_LAYERS, MOST_POINTS, MOST_PHASES = 30, 200, 2000, 2000, 200
MOST_NAMES = 20  # layers that run as one
HIGH = 100  # units of the memory chart, which has no size of its own
MIB = 2**20


@dataclass(frozen=True)
class Spent:
    """Milliseconds spent on one kind of work in an update or a batch."""

    name: str
    kind: str
    calls: float
    milliseconds: float


@dataclass(frozen=True)
class LayerCost:
    """A layer, or several that run as one."""

    names: Sequence[str]
    kind: str
    forward: float  # milliseconds of the update
    backward: float
    kept: int  # bytes of a micro-batch, from its forward pass to its backward pass
    made: int  # bytes of a micro-batch that the backward pass allocates


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes over an update, at equal intervals."""

    points: Sequence[int]
    milliseconds: float
    before: int
    peak: int
    peak_at: float  # milliseconds
    peak_in: str  # in words
    is_whole: bool  # what was there before counts, too
    phases: Sequence[tuple[str, float, float]]  # name, begin and end in milliseconds


@dataclass(frozen=True)
class Profile:
    """The contents of a run's profile."""

    what: str  # the unit that is profiled: an update or a batch
    device: str
    traced: int
    last: int  # the last traced update
    looked: int  # the update that was profiled layer by layer
    captured: bool
    processes: int
    milliseconds: float
    idle: float
    kinds: Sequence[Spent]
    kernels: Sequence[Spent]
    left_out: int
    layers: Sequence[LayerCost]
    rest: Mapping[str, float]  # milliseconds in no layer, by phase
    passes: int
    memory: MemoryCurve | None

    @property
    def whole(self) -> float:
        """The total in milliseconds, of which shares are taken."""
        return (sum(each.milliseconds for each in self.kinds) + self.idle) or 1.0


def read_profile(content: Mapping[str, Any]) -> Profile | None:
    """The profile in a summary; None: there is none."""
    kinds = list(_spent(content.get("kinds"), MOST_KINDS))
    if not kinds:
        return None
    layers = content.get("layers")
    layers = layers if isinstance(layers, dict) else {}
    rest = layers.get("rest")
    return Profile(
        what="batch" if content.get("what") == "batch" else "update",
        device="GPU" if content.get("device") == "cuda" else "CPU",
        traced=count(content.get("traced")) or 1,
        last=count(content.get("last")),
        looked=count(content.get("looked")),
        captured=content.get("captured") is True,
        processes=count(content.get("processes")) or 1,
        milliseconds=_amount(content.get("milliseconds")),
        idle=_amount(content.get("idle")),
        kinds=sorted(kinds, key=lambda each: -each.milliseconds),
        kernels=list(_spent(content.get("kernels"), MOST_KERNELS)),
        left_out=count(content.get("left_out")),
        layers=list(_layer_costs(layers.get("rows"))),
        rest={text(name): _amount(value) for name, value in rest.items()} if isinstance(rest, dict) else {},
        passes=count(layers.get("passes")) or 1,
        memory=_memory(content.get("memory")),
    )


def _amount(value: object) -> float:
    return max(0.0, number(value) or 0.0)


def _spent(rows: object, most: int) -> Iterator[Spent]:
    for each in objects(rows, most):
        kind = text(each.get("kind"))
        yield Spent(text(each.get("name")), kind, _amount(each.get("calls")), _amount(each.get("milliseconds")))


def _layer_costs(rows: object) -> Iterator[LayerCost]:
    for each in objects(rows, MOST_LAYERS):
        names = each.get("names")
        named = [text(name) for name in names[:MOST_NAMES]] if isinstance(names, list) else []
        if named:
            yield LayerCost(
                named,
                text(each.get("kind")),
                _amount(each.get("forward")),
                _amount(each.get("backward")),
                count(each.get("kept")),
                count(each.get("made")),
            )


def _memory(content: object) -> MemoryCurve | None:
    if not isinstance(content, dict):
        return None
    points, lasts = content.get("points"), _amount(content.get("milliseconds"))
    found = [count(point) for point in points[:MOST_POINTS]] if isinstance(points, list) else []
    if len(found) < 2 or lasts == 0 or not any(found):
        return None
    layers, phase = content.get("peak_layers"), text(content.get("peak_phase"))
    named = [text(name) for name in layers[:MOST_NAMES]] if isinstance(layers, list) else []
    where = _joined(named) if named else "no layer"
    return MemoryCurve(
        points=found,
        milliseconds=lasts,
        before=count(content.get("before")),
        peak=max(count(content.get("peak")), *found),
        peak_at=min(lasts, _amount(content.get("peak_at"))),
        peak_in=f"{where}, {phase}" if phase in PHASES else where,
        is_whole=content.get("is_whole") is True,
        phases=list(_phases(content.get("phases"), lasts)),
    )


def _joined(names: Sequence[str]) -> str:
    """A name such as `conv1`, or `layer1.0: bn1 + act1` for layers that run as one."""
    inside = [name.rpartition(".")[0] for name in names]
    block = min(inside, key=len)
    if len(names) == 1 or not block or not all(f"{each}.".startswith(f"{block}.") for each in inside):
        return " + ".join(names)
    return f"{block}: {' + '.join(name[len(block) + 1 :] for name in names)}"


PHASES = ("forward", "backward", "optimizer")


def _phases(rows: object, lasts: float) -> Iterator[tuple[str, float, float]]:
    for each in rows[:MOST_PHASES] if isinstance(rows, list) else ():
        match each:
            case [str() as name, begin, end] if name in PHASES:
                start, stop = min(lasts, _amount(begin)), min(lasts, _amount(end))
                if stop > start:
                    yield name, start, stop


def timed(layers: Sequence[Layer], profile: Profile | None) -> list[Layer]:
    """The layers of the model with their time in an update; if several run as one, the first has it."""
    spent: dict[str, float] = {}
    known = {layer.name for layer in layers}
    for each in profile.layers if profile else ():
        first = next((name for name in each.names if name in known), None)
        if first is not None:
            spent[first] = spent.get(first, 0.0) + each.forward + each.backward
    return [replace(layer, milliseconds=spent.get(layer.name, layer.milliseconds)) for layer in layers]


def profile_part(profile: Profile | None) -> str:
    """The part of a page; empty without a profile."""
    if profile is None:
        return ""
    return "".join((_about(profile), _kinds(profile), _kernels(profile), _memory_chart(profile), _layers(profile)))


def _about(profile: Profile) -> str:
    which = counted(profile.traced, profile.what)
    if profile.what == "update" and profile.last:
        first = profile.last - profile.traced + 1
        which = f"update {profile.last}" if profile.traced == 1 else f"updates {first} to {profile.last}"
    how = ", captured as CUDA graphs like all later ones" if profile.captured else ""
    words = [f"Times are those of one {profile.what}: the mean over {which}{how}, {_ms(profile.milliseconds)} each."]
    if profile.layers:
        why = ", made without a graph, because a captured one does not show its layers" if profile.captured else ""
        words.append(f"Layers and memory are those of update {profile.looked}{why}.")
    if profile.processes > 1:
        words.append(f"All of it is from the first of {profile.processes} processes.")
    return f"<p>{inert(' '.join(words))}</p>"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def _kinds(profile: Profile) -> str:
    """Bars with the time of each kind of work."""
    idle = Spent("", "idle", 0, profile.idle)
    most = max(each.milliseconds for each in (*profile.kinds, idle)) or 1.0
    rows = []
    for each in (*profile.kinds, idle):
        share = 100 * each.milliseconds / profile.whole
        kind = " idle" if each is idle else ""
        rows.append(
            f'<div class="share{kind}"><dt>{inert(each.kind)}</dt><dd class="track">'
            f'<i style="width:{100 * each.milliseconds / most:.2f}%"></i></dd>'
            f"<dd>{inert(_ms(each.milliseconds))}</dd><dd>{share:.1f} %</dd></div>"
        )
    what = "kernels on the GPU" if profile.device == "GPU" else "operators on the CPU"
    note = (
        "Idle: nothing runs on the GPU. A 1 x 1 convolution that a library computes as a matrix product counts as one."
        if profile.device == "GPU"
        else "Idle: no operator runs; Python's own time, and waiting for images."
    )
    return (
        f'<h3>Where the time goes: {what}</h3><dl class="shares" aria-label="Time by kind of work">{"".join(rows)}</dl>'
        f'<p class="times">{note}</p>'
    )


def _kernels(profile: Profile) -> str:
    if not profile.kernels:
        return ""
    what = "kernels" if profile.device == "GPU" else "operators"
    heads = [Column(what[:-1]), Column("kind")]
    heads += [Column(name, is_number=True) for name in ("calls", "ms", "share, %")]
    rows = []
    for each in profile.kernels:
        share = 100 * each.milliseconds / profile.whole
        rows.append(
            [
                Cell(_short(each.name), is_mono=True),
                Cell(each.kind),
                Cell(f"{each.calls:,.4g}", by=each.calls),
                Cell(f"{each.milliseconds:.3f}", by=each.milliseconds),
                Cell(f"{share:.1f}", by=share, bar=share),
            ]
        )
    more = f"<p>{profile.left_out:,} more {what} take less time each.</p>" if profile.left_out else ""
    title = f"Costliest {what}"
    return f"<h3>{title}</h3>{table(title, heads, rows, tall=len(rows) > 12)}{more}"


def _short(name: str) -> str:
    """The name of a kernel without the prefixes that torch's kernels share."""
    for common in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(common, "")
    return name if len(name) <= 120 else f"{name[:117]}..."


def _layers(profile: Profile) -> str:
    if not profile.layers:
        return ""
    whole = sum(each.forward + each.backward for each in profile.layers) or 1.0
    heads = [Column("layer"), Column("kind")]
    names = ("forward, ms", "backward, ms", "of all layers, %", "kept, MiB", "backward, MiB")
    heads += [Column(name, is_number=True) for name in names]
    rows = []
    for each in profile.layers:
        share = 100 * (each.forward + each.backward) / whole
        rows.append(
            [
                Cell(_joined(each.names), is_mono=True),
                Cell(each.kind),
                Cell(f"{each.forward:.3f}", by=each.forward),
                Cell(f"{each.backward:.3f}", by=each.backward),
                Cell(f"{share:.1f}", by=share, bar=share),
                Cell(f"{each.kept / MIB:,.2f}", by=each.kept),
                Cell(f"{each.made / MIB:,.2f}", by=each.made),
            ]
        )
    outside = ", ".join(f"{name} {_ms(value)}" for name, value in profile.rest.items() if value)
    what = "kernels on the GPU" if profile.device == "GPU" else "operators on the CPU"
    words = (
        f"Time of an update, of {what}. Memory of"
        " a micro-batch: what a layer allocates and keeps for the backward pass, and what its backward pass allocates."
        " A layer with sublayers has only what is in none of them, such as a residual sum."
        + (f" An update has {profile.passes} micro-batches." if profile.passes > 1 else "")
        + (f" In no layer: {outside}." if outside else "")
    )
    return (
        f"<h3>Time and memory by layer</h3>{table('Time and memory by layer', heads, rows, tall=len(rows) > 15)}"
        f'<p class="times">{inert(words)}</p>'
    )


def _memory_chart(profile: Profile) -> str:
    """The memory chart, which scales with its box; its labels are outside it, in the page's text size."""
    curve = profile.memory
    if curve is None:
        return ""
    step, low = curve.milliseconds / len(curve.points), curve.before if curve.is_whole else 0
    top = curve.peak * 1.08
    path = [f"M0 {HIGH}"]
    for place, value in enumerate(curve.points):
        y = HIGH * (1 - value / top)
        path += [f"L{place * step:.4f} {y:.3f}", f"L{(place + 1) * step:.4f} {y:.3f}"]
    path.append(f"L{curve.milliseconds:.4f} {HIGH}Z")
    across, up = 100 * curve.peak_at / curve.milliseconds, 100 * curve.peak / top
    bands = "".join(
        f'<span class="{name}" style="left:{100 * begin / curve.milliseconds:.2f}%;width:'
        f'{100 * (end - begin) / curve.milliseconds:.2f}%" title="{name}, {inert(_ms(end - begin))}"></span>'
        for name, begin, end in curve.phases
    )
    spent = {name: sum(end - begin for each, begin, end in curve.phases if each == name) for name in PHASES}
    legend = "".join(  # a phase may be far too short for its name
        f'<span class="{name}">{name}, {inert(_ms(lasts))}</span>' for name, lasts in spent.items() if lasts
    )
    side = "right" if across > 50 else "left"
    words = (
        f"Peak {_bytes(curve.peak)}, {_ms(curve.peak_at)} after its start, in {curve.peak_in}."
        + (f" {_bytes(low)} were allocated before." if curve.is_whole else "")
        + (
            " In the order in which the host allocates; the kernels run later."
            if profile.device == "GPU"
            else " Memory that the update allocates; what was there before, such as the weights, is not counted."
        )
    )
    ticks = "".join(
        f'<span style="bottom:{100 * value / top:.2f}%">{_bytes(value)}</span>' for value in _ticks(curve.peak)
    )
    return (
        f'<h3>Memory over an update</h3><figure class="memory">'
        f'<div class="area" role="img" aria-label="Memory over an update. {inert(words)}">{ticks}'
        f'<svg viewBox="0 0 {curve.milliseconds:.4f} {HIGH}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path d="{"".join(path)}"/></svg><b class="peak {side}" style="left:{across:.2f}%;bottom:{up:.2f}%">'
        f'<em>peak {_bytes(curve.peak)}</em></b></div><div class="phases">{bands}</div>'
        f'<div class="span"><span>0</span><span>{inert(_ms(curve.milliseconds))}</span></div>'
        f'<div class="legend">{legend}</div>'
        f"<figcaption>{inert(words)}</figcaption></figure>"
    )


def _ticks(most: int) -> list[int]:
    """Round numbers of bytes from 0 on, at most six."""
    unit = next((size for size in (2**30, 2**20, 2**10) if most >= size), 1)
    step = next(
        step for power in range(20) for step in (10**power, 2 * 10**power, 5 * 10**power) if most < 6 * step * unit
    )
    return list(range(0, most + 1, step * unit))


def _bytes(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.0f} B"
