"""--validate-checkpoints: after training, the accuracy of each checkpoint in a folder, by all processes together."""

from collections.abc import Iterator
from pathlib import Path

from falconet.checkpoint import files
from falconet.checkpoint.foreign import load_weights
from falconet.checkpoint.manifest import Manifest
from falconet.errors import CheckpointError
from falconet.parallel.world import World
from falconet.report.screen import Say
from falconet.train.record import Record
from falconet.wiring import accuracies, opening
from falconet.wiring.accuracies import Accuracy
from falconet.wiring.images import Images, check_classes

OPTION = "--validate-checkpoints"


def after_training(record: Record, path: Path, *, images: Images, world: World, say: Say) -> list[Accuracy]:
    """Measure what is in `path` with the run's model, on the run's validation images; the model keeps the last ones.

    Every process reads the folder, as it does when averages are measured.
    """
    names = world.once(lambda: "\n".join(str(folder) for folder in _fitting(record, path, images=images, say=say)))
    measured = []
    for folder in map(Path, names.splitlines()):
        manifest = files.read_manifest(folder)
        for stem, suffix in opening.STEMS:
            if stem in manifest.stems:
                weights = opening.weights_of(folder, manifest, stem)
                load_weights(record.state.model, record.state.stages.own(weights), where=str(folder))
                found = record.validate_other(folder.name + suffix, progress=manifest.progress)
                measured.append(Accuracy(name=folder.name + suffix, epoch=opening.epoch_of(manifest), found=found))
    return measured


def report(measured: list[Accuracy], folder: Path, say: Say) -> None:
    """Our own table, in the run folder."""
    rows = accuracies.tabulate(measured)
    accuracies.show(rows, say)
    accuracies.write_csv(rows, folder / accuracies.FILE, option="--run-dir")
    say(f"written to {folder / accuracies.FILE}")


def _fitting(record: Record, path: Path, *, images: Images, say: Say) -> Iterator[Path]:
    """The checkpoints that can be measured; a torn one, or one of another model, is said and passed over."""
    there, trained = 0, record.saving.identity
    for folder in files.checkpoints_in(path):
        try:
            _require_fitting(files.verify(folder), folder, model=trained.model, images=images)
        except CheckpointError as error:
            say(f"passed over {error}")
            continue
        there += 1
        yield folder
    if not there:
        raise CheckpointError(
            f"{OPTION}: {path} holds no whole checkpoint of {trained.model} on {trained.data};"
            f" the training itself is whole and saved as {record.saving.last}"
        )


def _require_fitting(manifest: Manifest, folder: Path, *, model: str, images: Images) -> None:
    if manifest.model != model:
        raise CheckpointError(f"{folder}: holds {manifest.model}; wanted {model}, which was trained")
    check_classes(images, manifest.class_names, where=str(folder))
