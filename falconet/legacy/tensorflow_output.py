"""The TensorFlow program's options about checkpoints, averages and logs."""

from collections.abc import Iterable
from math import ceil

from falconet.errors import ConfigError
from falconet.legacy import tensorflow_facts
from falconet.legacy.table import Effect, Note, Old, To, Values, Variable, becomes, nothing, part_of, same, short
from falconet.parallel.environment import ALL_HOSTS

SYNC = "replicas are identical after every update, which is checked at the start"
LOGGED_ONCE = "only the first process logs and saves"


def checkpoints(old: Values) -> Iterable[Effect]:
    """Epochs between checkpoints, or checkpoints per epoch; the original too refused both together."""
    if old.whole("--epochs-per-ckpt") and old.whole("--ckpts-per-epoch") != 1:
        raise ConfigError("--epochs-per-ckpt: cannot be combined with --ckpts-per-epoch; expected one of the two")
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
        never = tensorflow_facts.updates(old) or ceil(tensorflow_facts.length(old))  # epochs have at least an update
        yield To("checkpoint-save-freq", (str(never),))
        yield Note("--ckpts-per-epoch 0: the end of training is still saved")
    yield To("checkpoints-kept", ("all",))


def validation(old: Values) -> Iterable[Effect]:
    """The original validated each epoch's checkpoint after training; here the same numbers come epoch by epoch."""
    yield To("validation-mode", ("none" if old.flag("--no-validation") else "during",))


def averaging(old: Values) -> Iterable[Effect]:
    """The averages: one as --weight-avg-strategy, exponential before mean, and all others as --weight-avg-also."""
    decays, epochs = old.texts("--weight-avg-exp"), old.texts("--weight-avg-N")
    if decays:
        yield To("weight-avg-strategy", ("exponential",))
        yield To("weight-avg-exp-decay", (decays[0],))
    elif epochs:
        yield To("weight-avg-strategy", ("mean",))
        yield To("weight-avg-epochs", (epochs[0],))
    others = epochs if decays else epochs[1:]
    rest = [f"exponential:{decay}" for decay in decays[1:]] + [f"epochs:{last}" for last in others]
    if rest:
        yield To("weight-avg-also", tuple(rest))


def logs(old: Values) -> Iterable[Effect]:
    if old.has("--iterations") and not old.has("--epochs"):
        yield To("log-interval", (old.text("--log-freq"),))
    else:
        yield To("logs-per-epoch", (old.text("--logs-per-epoch"),))


def run_folder(old: Values) -> Iterable[Effect]:
    """The run folder itself, or the folder for run folders."""
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


def log_all(old: Values) -> Iterable[Effect]:
    """The option to log all; any text meant yes."""
    if old.has("--log-all-instances"):
        yield Variable(ALL_HOSTS, "1")


def wandb(old: Values) -> Iterable[Effect]:
    if old.flag("--wandb"):
        yield To("wandb")
        yield To("wandb-project", (old.text("--wandb-project"),))


OUTPUT: tuple[Old, ...] = (
    becomes(
        "--ckpts-per-epoch",
        "whole",
        "1",
        "checkpoint-save-freq initial-checkpoint",
        checkpoints,
        "1 / n, and the initial weights as ckpt-0; 0: only the end of training",
    ),
    part_of("--epochs-per-ckpt", "whole", "0", "checkpoint-save-freq", "the same"),
    part_of(
        "--ckpt-epochs-offset",
        "whole",
        "0",
        "checkpoint-first-epoch",
        "the same: the end of that epoch is saved first, and the interval starts there; the last epoch is always saved",
    ),
    nothing("--ckpt-all-instances", "text", LOGGED_ONCE),
    becomes("--no-validation", "flag", None, "validation-mode", validation, "validation-mode none, otherwise during"),
    becomes(
        "--weight-avg-exp",
        "number",
        None,
        "weight-avg-strategy weight-avg-exp-decay weight-avg-also",
        averaging,
        "the first one; --weight-avg-also makes the others",
        count="some",
    ),
    part_of(
        "--weight-avg-N",
        "whole",
        None,
        "weight-avg-strategy weight-avg-epochs weight-avg-also",
        "the same: the checkpoints of the last N epochs",
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
    part_of("--name-suffix", "text", None, "name-suffix", "the same: the end of the run folder's name"),
    becomes(
        "--logs-per-epoch", "whole", "16", "logs-per-epoch log-interval", logs, "the same; --log-freq with --iterations"
    ),
    part_of("--log-freq", "whole", "500", "log-interval", "updates between log points, with --iterations", least=1),
    part_of(
        "--no-logs",
        "flag",
        None,
        "temporary",
        "a temporary run folder, removed at a clean end, kept after a failure; takes precedence over --logs-path",
    ),
    becomes(
        "--log-all-instances",
        "text",
        None,
        "",
        log_all,
        "the first process of every host prints; the first of all writes the files",
    ),
    same("--mlperf-logging", "flag", effect="the same: result_<seed>.txt in the run folder; no package is needed"),
    becomes("--wandb", "flag", None, "wandb wandb-project", wandb, "the same"),
    part_of("--wandb-project", "text", "tf-cnn", "wandb-project", "the same"),
)
