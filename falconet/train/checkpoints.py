"""Averaged checkpoints: after training, and by `falconet average`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from falconet.checkpoint import format
from falconet.checkpoint.average import Averaging, average, select
from falconet.checkpoint.foreign import load_weights
from falconet.checkpoint.manifest import Manifest
from falconet.config import commands
from falconet.config import options as keeping
from falconet.config.options import further_average
from falconet.data.dataset import Dataset
from falconet.errors import CheckpointError
from falconet.parallel.world import World
from falconet.report.console import Say, counted
from falconet.train import evaluate, saved_model
from falconet.train.evaluate import Accuracy
from falconet.train.log import Record


def rule_of(options: keeping.Averaging | keeping.Average) -> Averaging:
    assert options.weight_avg_strategy != "none"
    last = options.weight_avg_N
    return Averaging(
        strategy=options.weight_avg_strategy,
        decay=options.weight_avg_exp_decay,
        last=None if last in ("all", -1) else int(last),
        discarded=options.weight_avg_discard if isinstance(options, keeping.Average) else 0,
    )


def write_average(folders: Sequence[Path], how: Averaging, *, weights: dict[str, Tensor], to: Path) -> None:
    """Save averaged weights with the rest of the newest checkpoint's state, so that the result restores too."""
    newest = folders[-1]
    manifest = format.verify(newest)
    others = [stem for stem in manifest.stems if stem != "model"]
    tensors = {"model": weights} | {stem: format.read_tensors(newest, stem, verified=manifest) for stem in others}
    averaged = {"strategy": how.strategy, "decay": how.decay, "of": [folder.name for folder in folders]}
    content = {key: value for key, value in manifest.content.items() if key not in ("files", "digest", "metrics")}
    format.write(to, tensors, content | {"averaged": averaged, "metrics": {}})


def averaged_name(newest: Path, suffix: str = "") -> Path:
    """`<model>_<data>_<epoch>_averaged`, beside the others; further ones with a suffix."""
    return newest.with_name("_".join([newest.name.partition("+")[0], "averaged", *([suffix] if suffix else [])]))


def average_after_training(record: Record, options: commands.TrainOptions, *, world: World, say: Say) -> Path:
    """Make every average that was asked for; the first one is what a next phase begins with."""
    first = _averaged(rule_of(options.averaging), "", record, world=world, say=say)
    for text in options.averaging.weight_avg_also:
        more = further_average(text)
        assert more is not None, "the rules of the options refuse others"
        how = Averaging(strategy=more.strategy, decay=more.decay, last=more.last)
        _averaged(how, more.suffix, record, world=world, say=say)
    return first


def _averaged(how: Averaging, suffix: str, record: Record, *, world: World, say: Say) -> Path:
    """Average the phase's checkpoints, on the first process, and measure the result, on all of them."""

    def written() -> str:
        # Not what an interruption saved: the average must be that of a run without one.
        saved = format.checkpoints_in(record.saving.folder)
        in_turn = [folder for folder in saved if record.saving.in_turn(format.read_manifest(folder).progress)]
        folders = select(in_turn, how.last, phase=record.plan.phase)
        name = record.average_name(_in_words(how, len(folders)))
        to = folders[-1].with_name(name) if name else averaged_name(folders[-1], suffix)
        write_average(folders, how, weights=average(folders, how), to=to)
        say(f"averaged {counted(len(folders), 'checkpoint')} ({how.strategy}) into {to}")
        return str(to)

    to = Path(world.once(written))
    if record.plan.validation_mode != "none":
        weights = record.state.stages.own(format.read_tensors(to, "model", verified=format.verify(to)))
        record.validate_average(_with(record.state.model, weights, where=str(to)), to.name, suffix=suffix)
    return to


def _in_words(how: Averaging, count: int) -> str:
    """`N_5` or `exp_0.97`, as the original had them; or `exp_0.97_N_5`, which it had not."""
    if how.strategy == "mean":
        return f"N_{how.last or count}"
    return f"exp_{how.decay:.15g}" + (f"_N_{how.last}" if how.last else "")


def _with(model: nn.Module, weights: Mapping[str, Tensor], *, where: str) -> nn.Module:
    """The trained model, which is saved by now, with other weights."""
    load_weights(model, weights, where=where)
    return model


OPTION = "--validate-checkpoints"


def validate_after_training(record: Record, path: Path, *, images: Dataset, world: World, say: Say) -> list[Accuracy]:
    """Measure what is in `path` with the run's model, on the run's validation images; the model keeps the last ones.

    Every process reads the folder, as it does when averages are measured.
    """
    names = world.once(lambda: "\n".join(str(folder) for folder in _fitting(record, path, images=images, say=say)))
    measured = []
    for folder in map(Path, names.splitlines()):
        manifest = format.read_manifest(folder)
        for stem, suffix in saved_model.STEMS:
            if stem in manifest.stems:
                weights = saved_model.weights_of(folder, manifest, stem)
                load_weights(record.state.model, record.state.stages.own(weights), where=str(folder))
                found = record.validate_other(folder.name + suffix, progress=manifest.progress)
                measured.append(Accuracy(name=folder.name + suffix, epoch=saved_model.epoch_of(manifest), found=found))
    return measured


def report_accuracies(measured: list[Accuracy], folder: Path, say: Say) -> None:
    """Our own table, in the run folder."""
    rows = evaluate.tabulate_accuracies(measured)
    evaluate.show_accuracies(rows, say)
    evaluate.write_accuracies(rows, folder / evaluate.ACCURACIES_FILE, option="--run-dir")
    say(f"written to {folder / evaluate.ACCURACIES_FILE}")


def _fitting(record: Record, path: Path, *, images: Dataset, say: Say) -> Iterator[Path]:
    """The checkpoints that can be measured; a torn one, or one of another model, is said and passed over."""
    there, trained = 0, record.saving.identity
    for folder in format.checkpoints_in(path):
        try:
            _require_fitting(format.verify(folder), folder, model=trained.model, images=images)
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


def _require_fitting(manifest: Manifest, folder: Path, *, model: str, images: Dataset) -> None:
    if manifest.model != model:
        raise CheckpointError(f"{folder}: holds {manifest.model}; wanted {model}, which was trained")
    images.check_classes(manifest.class_names, where=str(folder))
