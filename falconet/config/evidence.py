"""Evidence: what named configs reached when they were trained here, one JSON file each, from `recipe verify`."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from falconet.errors import ConfigError

LEAST_MARGIN = 0.1  # percent: below it, the same recipe differs by a few images
DEVIATIONS = 2.0  # by which a mean may be lower and still agree: one in forty is, by chance


@dataclass(frozen=True, kw_only=True)
class TrainedOnce:
    """One run of a recipe."""

    seed: int
    accuracy: float  # percent, in the last validation; the best would be chosen by what it measures
    seconds: float  # training alone, without the start, validations and checkpoints
    images: int  # validated
    counted: float | None = None  # seconds as speed records count them: without preparation, with the validation


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Runs of a recipe on one machine."""

    recipe: str
    device: str
    versions: Mapping[str, str]  # of libraries, by name
    date: str  # day of the last run, as in 2026-11-18
    command: str  # repeats them
    runs: tuple[TrainedOnce, ...] = field(default=())

    @property
    def mean(self) -> float:
        return statistics.mean(run.accuracy for run in self.runs)

    @property
    def spread(self) -> float | None:
        """The standard deviation between runs; None if there is only one."""
        return statistics.stdev(run.accuracy for run in self.runs) if len(self.runs) > 1 else None

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def took(self) -> str:
        """The median seconds of training; of a recipe that is compared with speed records, as those count them."""
        counted = [run.counted for run in self.runs if run.counted is not None]
        return f"{statistics.median(counted):.2f} s counted" if counted else in_seconds(self.seconds)

    def least(self, runs: int) -> float:
        """The lowest mean of this many runs that still agrees with the evidence."""
        error = DEVIATIONS * (self.spread or 0.0) * math.sqrt(1 / len(self.runs) + 1 / runs)
        return self.mean - max(LEAST_MARGIN, error)

    def reached(self) -> str:
        spread = f" ± {self.spread:.2f}" if self.spread is not None else ""
        return f"{self.mean:.2f}{spread} %"

    def to_json(self) -> str:
        stated = asdict(self, dict_factory=lambda items: {name: value for name, value in items if value is not None})
        return json.dumps(stated, indent=1) + "\n"


def in_seconds(seconds: float) -> str:
    """A time, to a tenth of a second; a short one to three digits, which is more."""
    return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s"


def all_evidence() -> dict[str, Evidence]:
    """All evidence, by recipe."""
    return {each.recipe: each for each in _shipped()}


def evidence_of(recipe: str) -> Evidence:
    found = all_evidence().get(recipe)
    if found is None:
        known = ", ".join(all_evidence())
        raise ConfigError(f"'{recipe}' has no recorded runs to compare with; expected one of {known}, or --record FILE")
    return found


def read(path: Path) -> Evidence:
    """Read an evidence file."""
    try:
        content = json.loads(path.read_text())
        found = Evidence(**{**content, "runs": tuple(TrainedOnce(**run) for run in content["runs"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: damaged ({error}); expected what `falconet recipe verify --record` writes"
        ) from None
    if not found.runs:
        raise ConfigError(f"{path}: no runs; expected what `falconet recipe verify --record` writes")
    return found


@cache
def _shipped() -> tuple[Evidence, ...]:
    with resources.as_file(resources.files("falconet.configs")) as folder:
        return tuple(map(read, sorted((folder / "evidence").glob("*.json"), key=lambda path: path.stem)))


def table(found: Mapping[str, Evidence]) -> Iterator[tuple[str, ...]]:
    """A heading and a row per recipe."""
    yield "recipe", "accuracy", "runs", "training", "on", "date", "with"
    for name, each in found.items():
        versions = ", ".join(f"{library} {version}" for library, version in each.versions.items())
        yield name, each.reached(), str(len(each.runs)), each.took, each.device, each.date, versions
