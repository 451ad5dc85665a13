"""A run that is about to start: its options settled, its weights and photos at hand, divided among processes."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from falconet.checkpoint.initial_weights import InitialWeights
from falconet.checkpoint.manifest import Checkpoint
from falconet.config import commands, facts
from falconet.config.load import LoadedTraining, left_out
from falconet.data.dataset import Dataset
from falconet.errors import ConfigError
from falconet.parallel import environment
from falconet.parallel.division import Division
from falconet.parallel.environment import Place
from falconet.report.styles import FALCONET, Conventions
from falconet.train import defaults, processes, resume

if TYPE_CHECKING:
    from falconet.parallel.launch import Hosts  # torch.distributed takes a second to import

STARTED = ("pretrained", "init-path")  # used once, by the first start of a run


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is about to start in this process: its options, what it continues from, its place in the world."""

    loaded: LoadedTraining
    restored: Checkpoint | None
    division: Division
    place: Place | None
    again: bool  # another attempt: a worker died, or the run was started again with --resume
    initial: InitialWeights | None = None  # pretrained weights of a new run
    images: Dataset | None = None  # the data, if it was opened to settle the options
    conventions: Conventions = FALCONET
    hosts: "Hosts | None" = None  # of which each has one process, this one here; it starts the workers
    notes: tuple[str, ...] = ()  # on weights, and on the restored run's options that this one does not take over

    def stored(self) -> dict[str, dict[str, Any]]:
        """The options that its checkpoints state; a continued run still started with the weights it once named."""
        table = self.loaded.rooted().table()
        for name, entry in self.loaded.table().items():
            if entry["value"] != table[name]["value"]:
                table[name]["typed"] = entry["value"]  # a relative path
        return table | self.started()

    def started(self) -> dict[str, dict[str, Any]]:
        """The weights that a continued run once started with."""
        first = self.restored.manifest.config if self.restored else {}
        return {name: first[name] for name in STARTED if name in first}


def prepare(
    loaded: LoadedTraining, restored: Checkpoint | None = None, *, conventions: Conventions = FALCONET
) -> Launch:
    """Download the weights and open the photos of a new run, settle its options, and divide it among processes.

    One process on each of several hosts meets the others. None is started.
    """
    place = environment.find_place(os.environ)
    processes.check_stages(facts.stages_of(loaded.options.parallel))
    found = defaults.settle(loaded, is_new=restored is None)
    settled = processes.with_replicas(found.loaded, restored, place)
    divided = processes.divide(settled, place)
    restarted = environment.attempt(os.environ) > 0
    continued = (resume.newest(settled.options, conventions) if restarted else None) or restored
    _check_restarts(settled.options)
    return Launch(
        loaded=settled,
        restored=continued,
        division=divided.division,
        place=divided.place,
        hosts=divided.hosts,
        again=restarted or (settled.options.run.resume and continued is not None),
        initial=found.initial,
        images=found.images,
        notes=_notes(settled, continued, found.initial),
        conventions=conventions,
    )


def _notes(loaded: LoadedTraining, restored: Checkpoint | None, initial: InitialWeights | None) -> tuple[str, ...]:
    """What to print about the weights of a new run, or about the options that a continued one does not take over."""
    if restored is None:
        return defaults.weight_notes(loaded, initial)
    return tuple(
        f"--{name} is not taken from a checkpoint; add it to the command line to {does}"
        for name, does in left_out(loaded, restored.manifest.config).items()
    )


def _check_restarts(options: commands.TrainOptions) -> None:
    """torchrun restarts workers with the same command line, which must name the folder with their checkpoints."""
    limit = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if limit and options.run.run_dir == "auto":
        raise ConfigError(
            f"--run-dir: required under torchrun --max-restarts {limit}: restarted workers look there for checkpoints"
        )
