"""A learning rate by a range test: the loss while the rate grows, on a copy of the run that is thrown away."""

import gc
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path

import numpy as np

from falconet import writing
from falconet.data.buffers import Batch
from falconet.data.keyed import FloatArray
from falconet.data.loader import FOREVER
from falconet.errors import ConfigError
from falconet.report.console import Counting
from falconet.train.build import BuiltPhase, Site
from falconet.train.preparation import Launch
from falconet.train.setup import TrainingLoader

JSON, PLOT = "lr_finder.json", "lr_finder.svg"
SOURCE = "range test of --lr auto"
LOWEST, HIGHEST = 1e-6, 10.0
UPDATES = 100
SMOOTHED = 5  # updates on either side; a mean over earlier ones alone would lag half a decade behind
DIVERGED = 3.0  # times the lowest smoothed loss: larger rates are not tried
WINDOW = 7  # updates, half a decade of rates, over which a slope is measured
LEAST_FALL = 0.02  # of the first loss; less is noise


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a range test measured, and the rate it chose."""

    rate: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]  # of each update
    smoothed: tuple[float, ...]

    def line(self) -> str:
        """One line for the plan."""
        tried = f"{len(self.rates)} updates from {self.rates[0]:g} to {self.rates[-1]:.2g}"
        return f"learning rate {self.rate:g} by a range test of {tried}: there the loss fell fastest"

    def write(self, folder: Path) -> None:
        """Every point and a plot, for the run folder."""
        writing.replace(folder, JSON, json.dumps(asdict(self), indent=1) + "\n")
        writing.replace(folder, PLOT, plot(self))


def with_rate(launch: Launch, site: Site) -> tuple[Launch, Finding | None]:
    """The run with a number for --lr auto, as if it had been given, and how it was found."""
    options = launch.loaded.options
    if options.learning_rate.lr != "auto":
        return launch, None
    if options.run.plan:
        note = "--lr auto is found by a range test before the first update: rates in this plan are shares of it"
        return replace(launch, notes=(*launch.notes, note)), None
    site.screen.line("finding a learning rate (--lr auto)")
    finding = find(launch, site)
    options = replace(options, learning_rate=replace(options.learning_rate, lr=finding.rate))
    sources = {**launch.loaded.sources, "lr": SOURCE}
    return replace(launch, loaded=replace(launch.loaded, options=options, sources=sources)), finding


def find(launch: Launch, site: Site) -> Finding:
    """Train a copy of the run while the rate grows from 1e-6 to 10, until its loss diverges."""
    built = BuiltPhase(_as_it_starts(launch), site)
    state, loader = built.new_state(), built.placement.loader()
    step, updates = built.step(state), _updates(loader)
    rates = [LOWEST * (HIGHEST / LOWEST) ** (number / (UPDATES - 1)) for number in range(UPDATES)]
    losses: list[float] = []
    try:
        with Counting("trying learning rates", total=UPDATES, quiet=not site.world.is_first) as counting:
            for number, (rate, micro_batches) in enumerate(zip(rates, updates, strict=False)):
                site.world.at(f"update {number + 1} of the range test")
                loss = step(micro_batches, update=number, lr=rate).loss.double()
                losses.append(float(site.world.sum(loss)) / built.plan.replicas)
                counting.add()
                curve = smooth(losses)
                if not math.isfinite(losses[-1]) or losses[-1] > DIVERGED * curve.min():
                    break
    finally:
        loader.close()
    del built, state, step
    gc.collect()  # hooks on gradients keep the model in a reference cycle
    finite = [loss for loss in losses if math.isfinite(loss)]
    curve = smooth(finite)
    return Finding(
        rate=choose(rates, curve),
        rates=tuple(rates[: len(finite)]),
        losses=tuple(finite),
        smoothed=tuple(curve.tolist()),
    )


def _as_it_starts(launch: Launch) -> Launch:
    """The run as its first update trains it: the same weights, at the same image size, however long an epoch is."""
    loaded = launch.loaded
    training, tuning = loaded.options.training, loaded.options.fine_tuning
    freeze = None if training.freeze_after is not None else training.freeze
    options = replace(
        loaded.options,
        training=replace(training, freeze=freeze, unfreeze_after=None, freeze_after=None),
        fine_tuning=replace(tuning, resolution_schedule=tuning.resolution_schedule[:1]),
    )
    return replace(launch, loaded=replace(loaded, options=options))


def _updates(loader: TrainingLoader) -> Iterator[Sequence[Batch]]:
    return islice((each for epoch in count() for each in loader.updates(epoch, until=FOREVER)), UPDATES)


def smooth(losses: Sequence[float]) -> FloatArray:
    """The mean around each loss; towards the ends, of as many as there are on both sides."""
    sides = [min(SMOOTHED, number, len(losses) - 1 - number) for number in range(len(losses))]
    return np.array([np.mean(losses[at - side : at + side + 1]) for at, side in enumerate(sides)])


def choose(rates: Sequence[float], curve: FloatArray) -> float:
    """The rate at which the smoothed loss falls fastest per decade, to two digits."""
    lowest = int(curve.argmin()) if len(curve) else 0
    if lowest < WINDOW or curve[lowest] > (1 - LEAST_FALL) * curve[:WINDOW].mean():
        raise ConfigError(
            f"--lr auto: the loss fell at none of {len(curve)} rates from {LOWEST:g}; expected a number, such as 1e-3"
        )
    decades, half = np.log10(rates), WINDOW // 2
    middles = range(half, min(lowest, len(curve) - half - 1) + 1)
    windows = {middle: slice(middle - half, middle + half + 1) for middle in middles}
    slopes = {middle: np.polyfit(decades[each], curve[each], 1)[0] for middle, each in windows.items()}
    return float(f"{rates[min(slopes, key=slopes.__getitem__)]:.2g}")


WIDTH, HEIGHT, EDGE = 640, 400, 56  # pixels


def plot(finding: Finding) -> str:
    """The losses over the rates, on a logarithmic axis, as SVG."""
    low, high = min(finding.losses), min(max(finding.losses), 2 * finding.losses[0])
    first, last = math.log10(finding.rates[0]), math.log10(finding.rates[-1])

    def across(rate: float) -> float:
        return EDGE + (WIDTH - 2 * EDGE) * (math.log10(rate) - first) / max(1e-9, last - first)

    def down(loss: float) -> float:
        return HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (min(loss, high) - low) / max(1e-9, high - low)

    def line(losses: Sequence[float], style: str) -> str:
        points = " ".join(
            f"{across(rate):.1f},{down(loss):.1f}" for rate, loss in zip(finding.rates, losses, strict=True)
        )
        return f'<polyline points="{points}" fill="none" {style}/>'

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'

    bottom, chosen = HEIGHT - EDGE, across(finding.rate)
    decades = range(math.ceil(first), math.floor(last) + 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif"'
            ' font-size="12"><rect width="100%" height="100%" fill="white"/>',
            f'<path d="M{EDGE} {EDGE}V{bottom}H{WIDTH - EDGE}" fill="none" stroke="black"/>',
            *(text(across(10.0**decade), bottom + 18, f"1e{decade}") for decade in decades),
            *(text(EDGE - 6, down(loss) + 4, f"{loss:.2f}", "end") for loss in (low, (low + high) / 2, high)),
            text(WIDTH / 2, HEIGHT - 14, "learning rate"),
            text(WIDTH / 2, 24, f"range test: loss per update, smoothed; chosen rate {finding.rate:g}"),
            line(finding.losses, 'stroke="#bbb"'),
            line(finding.smoothed, 'stroke="#06c" stroke-width="2"'),
            f'<path d="M{chosen:.1f} {EDGE}V{bottom}" stroke="#c30" stroke-dasharray="4"/>',
            "</svg>\n",
        ]
    )
