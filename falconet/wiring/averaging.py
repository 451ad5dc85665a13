"""Averaged checkpoints: after training, and by `falconet average`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from falconet.checkpoint import files
from falconet.checkpoint.average import Averaging, average, select
from falconet.checkpoint.foreign import load_weights
from falconet.config import keeping, schema
from falconet.config.averages import further
from falconet.parallel.world import World
from falconet.report.screen import Say
from falconet.report.words import counted
from falconet.train.record import Record


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
    manifest = files.verify(newest)
    others = [stem for stem in manifest.stems if stem != "model"]
    tensors = {"model": weights} | {stem: files.read_tensors(newest, stem, verified=manifest) for stem in others}
    averaged = {"strategy": how.strategy, "decay": how.decay, "of": [folder.name for folder in folders]}
    content = {key: value for key, value in manifest.content.items() if key not in ("files", "digest", "metrics")}
    files.write(to, tensors, content | {"averaged": averaged, "metrics": {}})


def averaged_name(newest: Path, suffix: str = "") -> Path:
    """`<model>_<data>_<epoch>_averaged`, beside the others; further ones with a suffix."""
    return newest.with_name("_".join([newest.name.partition("+")[0], "averaged", *([suffix] if suffix else [])]))


def after_training(record: Record, options: schema.TrainOptions, *, world: World, say: Say) -> Path:
    """Make every average that was asked for; the first one is what a next phase begins with."""
    first = _averaged(rule_of(options.averaging), "", record, world=world, say=say)
    for text in options.averaging.weight_avg_also:
        more = further(text)
        assert more is not None, "the rules of the options refuse others"
        how = Averaging(strategy=more.strategy, decay=more.decay, last=more.last)
        _averaged(how, more.suffix, record, world=world, say=say)
    return first


def _averaged(how: Averaging, suffix: str, record: Record, *, world: World, say: Say) -> Path:
    """Average the phase's checkpoints, on the first process, and measure the result, on all of them."""

    def written() -> str:
        # Not what an interruption saved: the average must be that of a run without one.
        saved = files.checkpoints_in(record.saving.folder)
        in_turn = [folder for folder in saved if record.saving.in_turn(files.read_manifest(folder).progress)]
        folders = select(in_turn, how.last, phase=record.plan.phase)
        name = record.average_name(_in_words(how, len(folders)))
        to = folders[-1].with_name(name) if name else averaged_name(folders[-1], suffix)
        write_average(folders, how, weights=average(folders, how), to=to)
        say(f"averaged {counted(len(folders), 'checkpoint')} ({how.strategy}) into {to}")
        return str(to)

    to = Path(world.once(written))
    if record.plan.validation_mode != "none":
        weights = record.state.stages.own(files.read_tensors(to, "model", verified=files.verify(to)))
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
