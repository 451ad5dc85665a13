"""The TensorFlow program's options of training: length, batch, optimizer, learning rate, checkpoints, logs."""

from collections.abc import Iterable

from falconet.dialects import tensorflow_facts as facts
from falconet.dialects import tensorflow_variables as variables
from falconet.dialects.rows import becomes, nothing, part_of, same
from falconet.dialects.table import Effect, Old, Say, To, Variable
from falconet.dialects.values import Values, short
from falconet.errors import ConfigError

SYNC = "replicas hold the same bits after every update, which is checked at the start"
LARS_SKIPS = ("beta", "gamma", "bias")
LOGGED_ONCE = "the first process alone logs and saves"


def batch_size(old: Values) -> Iterable[Effect]:
    yield To("micro-batch-size", (str(facts.micro_batch(old)),))


def epochs(old: Values) -> Iterable[Effect]:
    """Whole epochs as such, a part of one in updates."""
    updates = facts.updates(old)
    if updates is None:
        yield To("epoch", (str(facts.whole_epochs(old)),))
    elif not old.has("--iterations"):
        yield To("updates", (str(updates),))


def iterations(old: Values) -> Iterable[Effect]:
    """Random data has as many updates an epoch as the real data would, or as were asked for."""
    if old.has("--iterations") and facts.updates(old) is not None:
        yield To("updates", (old.text("--iterations"),))
    if facts.is_random(old):
        yield To("iterations", (str(facts.updates_per_epoch(old)),))


def learning_rate(old: Values) -> Iterable[Effect]:
    """2**x times the total batch. A warm-up longer than training is cut where training ends, at the rate it has."""
    rate, warm, whole = facts.peak(old), facts.warmup(old), facts.whole_epochs(old)
    if warm > whole and facts.updates(old) is None:
        reached = short(rate * whole / warm)
        yield Say(f"warm-up of {warm:g} epochs is longer than the training: it ends at {reached}, as it did")
        yield To("lr", (reached,))
        yield To("warmup-epoch", (short(whole),))
    else:
        yield To("lr", (short(rate),))
        yield To("warmup-epoch", (short(warm),))


def schedule(old: Values) -> Iterable[Effect]:
    kind, length = old.text("--lr-schedule"), facts.length(old)
    known = {"stepped": "step", "polynomial_decay_lr": "polynomial"}
    yield To("lr-schedule", (known.get(kind, kind),))
    if kind == "stepped":
        yield To("lr-decay", (old.text("--learning-rate-decay"),))
        if facts.updates(old) is None:
            yield To("lr-epoch-decay", tuple(short(share * length) for share in _drops(old)))
        else:  # whatever the number of images
            yield To("lr-drop-shares", tuple(short(share) for share in _drops(old)))
    if kind == "exponential":
        rate, drops = _exponential(old)
        yield To("lr-decay", (short(rate),))
        yield To("lr-scheduler-freq", (short(drops / length),))
    if kind == "polynomial_decay_lr":
        yield To("lr-power", (old.text("--poly-lr-decay-power"),))
        yield To("lr-end-ratio", (short(_end_ratio(old)),))


def _drops(old: Values) -> list[float]:
    if not old.has("--learning-rate-schedule"):
        return [0.3, 0.6, 0.8, 0.9] if facts.is_imagenet(old) else [0.5, 0.75]
    text = old.text("--learning-rate-schedule")
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise ConfigError(f"--learning-rate-schedule: got '{text}', wanted shares of training as 0.5,0.75") from None


def _exponential(old: Values) -> tuple[float, int]:
    for name in ("--lr-decay-rate", "--lr-drops"):
        if facts.family(old) != "efficientnet" and not old.has(name):
            raise ConfigError(f"{name}: is needed with --lr-schedule exponential for {facts.family(old)}")
    rate = old.number("--lr-decay-rate") if old.has("--lr-decay-rate") else 0.97
    return rate, old.whole("--lr-drops") if old.has("--lr-drops") else 146


def _end_ratio(old: Values) -> float:
    if old.has("--abs-end-learning-rate"):
        return old.number("--abs-end-learning-rate") / facts.peak(old)
    return old.number("--poly-lr-end-ratio")


def optimiser(old: Values) -> Iterable[Effect]:
    name = facts.optimiser(old)
    yield To("optimizer", ({"SGD": "sgd", "momentum": "sgd", "RMSprop": "rmsprop_tf", "LARS": "lars"}[name],))
    yield To("momentum", ("0" if name == "SGD" else old.text("--momentum"),))
    if name == "LARS":
        yield To("lars-eeta", (old.text("--lars-eeta"),))
        yield To("optimizer-eps", (old.text("--lars-epsilon"),))
    elif name == "RMSprop":
        yield To("rmsprop-decay", (short(facts.rmsprop_decay(old)),))
        yield To("optimizer-eps", (old.text("--rmsprop-epsilon"),))


def weight_decay(old: Values) -> Iterable[Effect]:
    """Scales and shifts of norms are left out on ImageNet, nothing on CIFAR, by LARS what it skips."""
    yield To("weight-decay", (short(facts.weight_decay(old)),))
    if old.text("--optimiser") == "LARS":
        yield from _lars_skips(old)
    else:
        yield To("weight-decay-exclude", ("norms" if facts.is_imagenet(old) else "nothing",))


def _lars_skips(old: Values) -> Iterable[Effect]:
    """Their default, beta gamma bias, is every vector: --weight-decay-exclude vectors."""
    if old.texts("--lars-skip-list") == LARS_SKIPS:
        yield To("weight-decay-exclude", ("vectors",))
        return
    network = facts.network(old)
    found = variables.find(network, old.texts("--lars-skip-list"))
    for fragment in found.idle:
        yield Say(f"--lars-skip-list: '{fragment}' is in no variable's name{variables.meant(network, fragment)}")
    trained = facts.trained(old)
    skipped = found.weights.intersection(trained)
    if skipped:
        yield To("lars-skip", variables.patterns(skipped, every=trained))
    else:
        yield To("weight-decay-exclude", ("nothing",))


def trainable(old: Values) -> Iterable[Effect]:
    """The weights whose variables have one of the fragments in their names; moving statistics were variables too."""
    if not old.given("--variable-filter"):
        return
    network = facts.network(old)
    found = variables.find(network, old.texts("--variable-filter"))
    for fragment in found.idle:
        raise ConfigError(
            f"--variable-filter: '{fragment}' is in no variable's name{variables.meant(network, fragment)}"
        )
    every = variables.weights_of(network)
    if found.weights != set(every):
        yield To("trainable", variables.patterns(found.weights, every=every))


def label_smoothing(old: Values) -> Iterable[Effect]:
    yield To("label-smoothing", (short(facts.smoothing(old)),))


def checkpoints(old: Values) -> Iterable[Effect]:
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


def accumulation(old: Values) -> Iterable[Effect]:
    """Batch norm's statistics were accumulated as gradients are, and moved once an update."""
    yield To("gradient-accumulation", (old.text("--gradient-accumulation-count"),))
    if facts.uses_batch_norm(old):
        yield To("batchnorm-per-update")


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


def restore(old: Values) -> Iterable[Effect]:
    """Goes on training; the README prints such a line for a validation too, which train.py never did."""
    if old.has("--restore-path"):
        yield To("checkpoint-input-path", (old.text("--restore-path"),))


def resume(old: Values) -> Iterable[Effect]:
    if old.has("--restore-path"):
        path = old.text("--restore-path")
        yield from restore(old)
        yield Say(f"--restore-path: goes on training {path}; `validation.py --restore-path {path}` measures it")


def wandb(old: Values) -> Iterable[Effect]:
    if old.flag("--wandb"):
        yield To("wandb")
        yield To("wandb-project", (old.text("--wandb-project"),))


LENGTH: tuple[Old, ...] = (
    becomes("--restore-path", "text", None, "checkpoint-input-path", restore, "continues that run: `falconet restore`"),
    part_of("--help", "flag", None, "help", "prints the options and what each becomes", aliases=("-h",)),
    part_of("--config", "text", None, "config", "a named config of configs.yml; what is typed counts more"),
    part_of("--config-path", "text", None, "config", "another file of named configs"),
    becomes(
        "--batch-size",
        "whole",
        None,
        "micro-batch-size",
        batch_size,
        "the same; its default depends on model and data, as it did",
        aliases=("--micro-batch-size",),
        least=1,
    ),
    becomes(
        "--gradient-accumulation-count",
        "whole",
        "1",
        "gradient-accumulation batchnorm-per-update",
        accumulation,
        "the same; batch norm's statistics move once an update, as they did",
        least=1,
    ),
    becomes(
        "--epochs", "number", None, "epoch updates", epochs, "the same; 2.5 is said in updates", aliases=("--epoch",)
    ),
    becomes(
        "--iterations",
        "whole",
        None,
        "updates iterations",
        iterations,
        "updates in all, which count more than --epochs; with random data alone: updates of the one epoch",
        least=1,
    ),
)
RATE: tuple[Old, ...] = (
    becomes(
        "--base-learning-rate",
        "number",
        None,
        "lr warmup-epoch",
        learning_rate,
        "2**x times micro-batch x accumulation x replicas x workers",
        aliases=("--base-learning-rate-exponent",),
    ),
    part_of("--abs-learning-rate", "number", None, "lr", "the rate itself; counts more than the exponent"),
)
SCHEDULE: tuple[Old, ...] = (
    becomes(
        "--lr-schedule",
        "text",
        "stepped",
        "lr-schedule lr-decay lr-epoch-decay lr-drop-shares lr-scheduler-freq",
        schedule,
        "stepped becomes step, polynomial_decay_lr becomes polynomial",
        choices=("stepped", "cosine", "exponential", "polynomial_decay_lr"),
    ),
    part_of("--learning-rate-decay", "number", "0.1", "lr-decay", "factor of a drop"),
    part_of(
        "--learning-rate-schedule",
        "text",
        None,
        "lr-epoch-decay lr-drop-shares",
        "shares of training times --epochs; shares as they are with --iterations",
    ),
    part_of("--warmup-epochs", "number", "5", "warmup-epoch", "the same; none with --iterations alone"),
    part_of("--lr-decay-rate", "number", None, "lr-decay", "factor of an exponential drop"),
    part_of("--lr-drops", "whole", None, "lr-scheduler-freq", "divided by --epochs: drops an epoch", least=1),
    part_of("--poly-lr-decay-power", "number", "2.0", "lr-power", "the same"),
    part_of("--poly-lr-end-ratio", "number", "1e-05", "lr-end-ratio", "the same"),
    part_of("--abs-end-learning-rate", "number", None, "lr-end-ratio", "divided by the peak"),
)
UPDATE: tuple[Old, ...] = (
    becomes(
        "--optimiser",
        "text",
        "SGD",
        "optimizer momentum",
        optimiser,
        "SGD is sgd without momentum, momentum is sgd, RMSprop is rmsprop_tf, LARS is lars",
        choices=("SGD", "RMSprop", "RMSProp", "momentum", "LARS"),
    ),
    part_of("--momentum", "number", "0.9", "momentum", "the same; SGD has none"),
    part_of("--rmsprop-decay", "number", None, "rmsprop-decay", "the same"),
    part_of("--rmsprop-base-decay-exp", "number", None, "rmsprop-decay", "1 - 2**x times the total batch"),
    part_of("--rmsprop-epsilon", "number", "0.001", "optimizer-eps", "the same, inside the root"),
    part_of("--lars-epsilon", "number", "0.0", "optimizer-eps", "the same"),
    part_of(
        "--lars-skip-list",
        "text",
        " ".join(LARS_SKIPS),
        "lars-skip weight-decay-exclude",
        "parts of variables' names become patterns of ours; the default is --weight-decay-exclude vectors",
        count="some",
    ),
    part_of("--lars-weight-decay", "number", None, "weight-decay", "the decay that LARS has"),
    part_of("--lars-eeta", "number", "0.001", "lars-eeta", "the same"),
    becomes(
        "--weight-decay",
        "number",
        None,
        "weight-decay weight-decay-exclude lars-skip",
        weight_decay,
        "the same; on ImageNet norms alone are left out, on CIFAR nothing",
    ),
    same("--loss-scaling", "number", "128"),
    becomes(
        "--label-smoothing",
        "number",
        "0",
        "label-smoothing",
        label_smoothing,
        "times C / (C - 1), which gives the same targets",
    ),
    same("--rts", "flag", new="enable-optimizer-rts"),
    becomes(
        "--variable-filter",
        "text",
        None,
        "trainable",
        trainable,
        "parts of variables' names become patterns of ours: fc1 is fc, b4 is layer4, beta is .*bn1/bias and so on",
        count="some",
    ),
    same("--init-path", "text", effect="the same: a checkpoint of Falconet, or weights by safetensors or torch"),
)
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
