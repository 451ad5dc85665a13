"""The TensorFlow program's options of what a training leaves: checkpoints, averages, logs."""

from collections.abc import Iterable

from falconet.dialects import tensorflow_facts as facts
from falconet.dialects.rows import becomes, nothing, part_of, same
from falconet.dialects.table import Effect, Old, Say, To, Variable
from falconet.dialects.values import Values, short
from falconet.errors import ConfigError

SYNC = "replicas hold the same bits after every update, which is checked at the start"
LOGGED_ONCE = "the first process alone logs and saves"


def checkpoints(old: Values) -> Iterable[Effect]:
    """Epochs between checkpoints, or checkpoints of an epoch; the two together were refused there too."""
    if old.whole("--epochs-per-ckpt") and old.whole("--ckpts-per-epoch") != 1:
        raise ConfigError("--epochs-per-ckpt: cannot be combined with --ckpts-per-epoch; wanted one of the two")
    saves = old.whole("--epochs-per-ckpt") or old.whole("--ckpts-per-epoch")
    if saves:
        yield To("initial-checkpoint")
    if saves and old.whole("--ckpt-epochs-offset"):
        yield To("checkpoint-first-epoch", (old.text("--ckpt-epochs-offset"),))
    if old.whole("--epochs-per-ckpt"):
        yield To("checkpoint-save-freq", (old.text("--epochs-per-ckpt"),))
    elif old.whole("--ckpts-per-epoch"):
        yield To("checkpoint-save-freq", (short(1 / old.whole("--ckpts-per-epoch")),))
    else:
        yield To("checkpoint-save-freq", (str(facts.whole_epochs(old)),))
        yield Say("--ckpts-per-epoch 0: the end of training is saved all the same")
    yield To("checkpoints-kept", ("all",))


def validation(old: Values) -> Iterable[Effect]:
    """Theirs measured each epoch's checkpoint when training was over; the same numbers come epoch by epoch."""
    yield To("validation-mode", ("none" if old.flag("--no-validation") else "during",))


def averaging(old: Values) -> Iterable[Effect]:
    """The first one, exponential ones before means, and all others beside it."""
    apart = old.whole("--epochs-per-ckpt") or 1 / max(1, old.whole("--ckpts-per-epoch"))  # epochs
    decays = old.texts("--weight-avg-exp")
    # Theirs counts epochs and takes the checkpoint at the beginning of the first one too.
    counts = [str(int(int(epochs) / apart) + 1) for epochs in old.texts("--weight-avg-N")]
    if decays:
        yield To("weight-avg-strategy", ("exponential",))
        yield To("weight-avg-exp-decay", (decays[0],))
    elif counts:
        yield To("weight-avg-strategy", ("mean",))
        yield To("weight-avg-N", (counts[0],))
    rest = [f"exponential:{decay}" for decay in decays[1:]] + [f"mean:{count}" for count in counts]
    if rest[0 if decays else 1 :]:
        yield To("weight-avg-also", tuple(rest[0 if decays else 1 :]))


def logs(old: Values) -> Iterable[Effect]:
    if old.has("--iterations") and not old.has("--epochs"):
        count = max(1, facts.updates_per_epoch(old) // old.whole("--log-freq"))
        yield To("logs-per-epoch", (str(count),))
    else:
        yield To("logs-per-epoch", (old.text("--logs-per-epoch"),))


def run_folder(old: Values) -> Iterable[Effect]:
    """The folder itself, or where folders of the program's own names go."""
    if old.flag("--no-logs"):
        yield To("temporary")
        return
    if old.has("--logs-path"):
        yield To("run-dir", (old.text("--logs-path"),))
        return
    if old.has("--name-suffix"):
        yield To("name-suffix", (old.text("--name-suffix"),))
    if old.given("--log-dir"):
        yield Variable("FALCONET_RUNS", old.text("--log-dir"))


def wandb(old: Values) -> Iterable[Effect]:
    if old.flag("--wandb"):
        yield To("wandb")
        yield To("wandb-project", (old.text("--wandb-project"),))


KEEPING: tuple[Old, ...] = (
    becomes(
        "--ckpts-per-epoch",
        "whole",
        "1",
        "checkpoint-save-freq initial-checkpoint",
        checkpoints,
        "1 / n, and the weights before the first update as ckpt-0; 0: only the end of training",
    ),
    part_of("--epochs-per-ckpt", "whole", "0", "checkpoint-save-freq", "the same"),
    part_of(
        "--ckpt-epochs-offset",
        "whole",
        "0",
        "checkpoint-first-epoch",
        "the same: the end of that epoch is saved first, others are counted from there; the last is always saved",
    ),
    nothing("--ckpt-all-instances", "text", LOGGED_ONCE),
    becomes("--no-validation", "flag", None, "validation-mode", validation, "validation-mode none, else during"),
    becomes(
        "--weight-avg-exp",
        "number",
        None,
        "weight-avg-strategy weight-avg-exp-decay weight-avg-also",
        averaging,
        "the first one; all others by --weight-avg-also",
        count="some",
    ),
    part_of(
        "--weight-avg-N",
        "whole",
        None,
        "weight-avg-strategy weight-avg-N weight-avg-also",
        "epochs become checkpoints",
        count="some",
        least=0,
    ),
    nothing("--syncs-per-epoch", "whole", SYNC, "0"),
    nothing("--epochs-per-sync", "number", SYNC, "0"),
    becomes(
        "--log-dir",
        "text",
        "./logs/",
        "FALCONET_RUNS run-dir name-suffix temporary",
        run_folder,
        "where run folders go",
    ),
    part_of("--logs-path", "text", None, "run-dir", "the run folder itself"),
    part_of("--name-suffix", "text", None, "name-suffix", "the same: behind the name of the run"),
    becomes("--logs-per-epoch", "whole", "16", "logs-per-epoch", logs, "the same; --log-freq with --iterations"),
    part_of("--log-freq", "whole", "500", "logs-per-epoch", "updates between log points, with --iterations", least=1),
    part_of(
        "--no-logs",
        "flag",
        None,
        "temporary",
        "a temporary run folder, removed at a clean end, kept after a failure; counts more than --logs-path",
    ),
    nothing("--log-all-instances", "text", LOGGED_ONCE),
    same("--mlperf-logging", "flag", effect="the same: result_<seed>.txt in the run folder; no package is needed"),
    becomes("--wandb", "flag", None, "wandb wandb-project", wandb, "the same"),
    part_of("--wandb-project", "text", "tf-cnn", "wandb-project", "the same"),
)
