"""The TensorFlow program's options about training: length, batch, optimizer, learning rate."""

from collections.abc import Iterable

from falconet.errors import ConfigError
from falconet.legacy import tensorflow_facts, tensorflow_variables
from falconet.legacy.table import Effect, Note, Old, To, Values, becomes, part_of, same, short

LARS_SKIPS = ("beta", "gamma", "bias")


def batch_size(old: Values) -> Iterable[Effect]:
    yield To("micro-batch-size", (str(tensorflow_facts.micro_batch(old)),))


def epochs(old: Values) -> Iterable[Effect]:
    """The length in epochs; a restored run drops a length in updates."""
    if tensorflow_facts.updates(old) is None:
        yield To("epoch", (short(tensorflow_facts.length(old)),))
        if old.has("--restore-path"):
            yield To("updates", ("None",))


def iterations(old: Values) -> Iterable[Effect]:
    """Random data has as many updates per epoch as the real data would, or as were asked for."""
    if old.has("--iterations") and tensorflow_facts.updates(old) is not None:
        yield To("updates", (old.text("--iterations"),))
    if tensorflow_facts.is_random(old):
        yield To("iterations", (str(tensorflow_facts.updates_per_epoch(old)),))


def learning_rate(old: Values) -> Iterable[Effect]:
    """The rate, 2**x times the total batch. A warm-up longer than training is cut off where training ends."""
    rate, warm, whole = tensorflow_facts.peak(old), tensorflow_facts.warmup(old), tensorflow_facts.length(old)
    if warm > whole and tensorflow_facts.updates(old) is None:
        reached = short(rate * whole / warm)
        yield Note(f"warm-up of {warm:g} epochs is longer than the training: it ends at {reached}, as in the original")
        yield To("lr", (reached,))
        yield To("warmup-epoch", (short(whole),))
    else:
        yield To("lr", (short(rate),))
        yield To("warmup-epoch", (short(warm),))


def schedule(old: Values) -> Iterable[Effect]:
    kind, length = old.text("--lr-schedule"), tensorflow_facts.length(old)
    known = {"stepped": "step", "polynomial_decay_lr": "polynomial"}
    yield To("lr-schedule", (known.get(kind, kind),))
    if kind == "stepped":
        yield To("lr-decay", (old.text("--learning-rate-decay"),))
        if tensorflow_facts.updates(old) is None:
            yield To("lr-epoch-decay", tuple(short(share * length) for share in _drops(old)))
        else:  # independent of the number of images
            yield To("lr-drop-shares", tuple(short(share) for share in _drops(old)))
    if kind == "exponential":
        rate, drops = _exponential(old)
        yield To("lr-decay", (short(rate),))
        if tensorflow_facts.updates(old) is None:
            yield To("lr-scheduler-freq", (short(drops / length),))
        else:  # independent of the number of images
            yield To("lr-changes", (str(drops),))
    if kind == "polynomial_decay_lr":
        yield To("lr-power", (old.text("--poly-lr-decay-power"),))
        yield To("lr-end-ratio", (short(_end_ratio(old)),))


def _drops(old: Values) -> list[float]:
    if not old.has("--learning-rate-schedule"):
        return [0.3, 0.6, 0.8, 0.9] if tensorflow_facts.is_imagenet(old) else [0.5, 0.75]
    return old.listed("--learning-rate-schedule", expected="shares of training, such as 0.5,0.75")


def _exponential(old: Values) -> tuple[float, int]:
    for name in ("--lr-decay-rate", "--lr-drops"):
        if tensorflow_facts.family(old) != "efficientnet" and not old.has(name):
            raise ConfigError(f"{name}: required with --lr-schedule exponential for {tensorflow_facts.family(old)}")
    rate = old.number("--lr-decay-rate") if old.has("--lr-decay-rate") else 0.97
    return rate, old.whole("--lr-drops") if old.has("--lr-drops") else 146


def _end_ratio(old: Values) -> float:
    if old.has("--abs-end-learning-rate"):
        return old.number("--abs-end-learning-rate") / tensorflow_facts.peak(old)
    return old.number("--poly-lr-end-ratio")


def optimiser(old: Values) -> Iterable[Effect]:
    name = tensorflow_facts.optimiser(old)
    yield To("optimizer", ({"SGD": "sgd", "momentum": "sgd", "RMSprop": "rmsprop_tf", "LARS": "lars"}[name],))
    yield To("momentum", ("0" if name == "SGD" else old.text("--momentum"),))
    if name == "LARS":
        yield To("lars-eeta", (old.text("--lars-eeta"),))
        yield To("optimizer-eps", (old.text("--lars-epsilon"),))
    elif name == "RMSprop":
        yield To("rmsprop-decay", (short(tensorflow_facts.rmsprop_decay(old)),))
        yield To("optimizer-eps", (old.text("--rmsprop-epsilon"),))


def weight_decay(old: Values) -> Iterable[Effect]:
    """Norms are not decayed on ImageNet, everything is on CIFAR; LARS has its skip list."""
    yield To("weight-decay", (short(tensorflow_facts.weight_decay(old)),))
    if old.text("--optimiser") == "LARS":
        yield from _lars_skips(old)
    else:
        yield To("weight-decay-exclude", ("norms" if tensorflow_facts.is_imagenet(old) else "nothing",))


def _lars_skips(old: Values) -> Iterable[Effect]:
    """The default, beta gamma bias, means every vector: --weight-decay-exclude vectors."""
    if old.texts("--lars-skip-list") == LARS_SKIPS:
        yield To("weight-decay-exclude", ("vectors",))
        return
    network = tensorflow_facts.network(old)
    found = tensorflow_variables.find(network, old.texts("--lars-skip-list"))
    for fragment in found.unknown:
        yield Note(
            f"--lars-skip-list: '{fragment}' is in no variable's name{tensorflow_variables.meant(network, fragment)}"
        )
    trained = tensorflow_facts.trained(old)
    skipped = found.weights.intersection(trained)
    if skipped:
        yield To("lars-skip", tensorflow_variables.patterns(skipped, every=trained))
    else:
        yield To("weight-decay-exclude", ("nothing",))


def trainable(old: Values) -> Iterable[Effect]:
    """The weights whose variables' names contain one of the fragments; moving statistics were variables too."""
    if not old.given("--variable-filter"):
        return
    network = tensorflow_facts.network(old)
    found = tensorflow_variables.find(network, old.texts("--variable-filter"))
    for fragment in found.unknown:
        raise ConfigError(
            f"--variable-filter: '{fragment}' is in no variable's name{tensorflow_variables.meant(network, fragment)}"
        )
    every = tensorflow_variables.weights_of(network)
    if found.weights != set(every):
        yield To("trainable", tensorflow_variables.patterns(found.weights, every=every))
        yield To("frozen-batchnorm", ("batch",))


def label_smoothing(old: Values) -> Iterable[Effect]:
    yield To("label-smoothing", (short(tensorflow_facts.smoothing(old)),))


def accumulation(old: Values) -> Iterable[Effect]:
    """Batch norm's statistics were accumulated like gradients, and moved once per update."""
    yield To("gradient-accumulation", (old.text("--gradient-accumulation-count"),))
    if tensorflow_facts.uses_batch_norm(old):
        yield To("batchnorm-per-update")


def restore(old: Values) -> Iterable[Effect]:
    """Continue training; the README also prints such a line for a validation, which train.py never did."""
    if old.has("--restore-path"):
        yield To("checkpoint-input-path", (old.text("--restore-path"),))


def resume(old: Values) -> Iterable[Effect]:
    if old.has("--restore-path"):
        path = old.text("--restore-path")
        yield from restore(old)
        yield Note(f"--restore-path: continues training {path}; `validation.py --restore-path {path}` validates it")


LENGTH: tuple[Old, ...] = (
    becomes("--restore-path", "text", None, "checkpoint-input-path", restore, "continues that run: `falconet restore`"),
    part_of("--help", "flag", None, "help", "prints the options and what each becomes", aliases=("-h",)),
    part_of("--config", "text", None, "config", "a named config of configs.yml; the command line takes precedence"),
    part_of("--config-path", "text", None, "config", "another file of named configs"),
    becomes(
        "--batch-size",
        "whole",
        None,
        "micro-batch-size",
        batch_size,
        "the same; its default depends on model and data, as in the original",
        aliases=("--micro-batch-size",),
        least=1,
    ),
    becomes(
        "--gradient-accumulation-count",
        "whole",
        "1",
        "gradient-accumulation batchnorm-per-update",
        accumulation,
        "the same; batch norm's statistics move once per update, as in the original",
        aliases=("--gradients-to-accumulate", "--pipeline-depth"),  # its names up to SDK 1.2
        least=1,
    ),
    becomes(
        "--epochs",
        "number",
        None,
        "epoch updates",
        epochs,
        "the same",
        aliases=("--epoch",),
    ),
    becomes(
        "--iterations",
        "whole",
        None,
        "updates iterations",
        iterations,
        "updates in all; takes precedence over --epochs; with random data and no --epochs, updates of one epoch",
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
    part_of("--abs-learning-rate", "number", None, "lr", "the rate itself; takes precedence over the exponent"),
)
SCHEDULE: tuple[Old, ...] = (
    becomes(
        "--lr-schedule",
        "text",
        "stepped",
        "lr-schedule lr-decay lr-epoch-decay lr-drop-shares lr-scheduler-freq lr-changes",
        schedule,
        "stepped becomes step, polynomial_decay_lr becomes polynomial",
        choices=("stepped", "cosine", "exponential", "polynomial_decay_lr"),
    ),
    part_of("--learning-rate-decay", "number", "0.1", "lr-decay", "the factor of each drop"),
    part_of(
        "--learning-rate-schedule",
        "text",
        None,
        "lr-epoch-decay lr-drop-shares",
        "shares of training, times --epochs; with --iterations, the shares themselves",
    ),
    part_of("--warmup-epochs", "number", "5", "warmup-epoch", "the same; none with --iterations alone"),
    part_of("--lr-decay-rate", "number", None, "lr-decay", "the factor of each exponential drop"),
    part_of(
        "--lr-drops",
        "whole",
        None,
        "lr-scheduler-freq lr-changes",
        "divided by --epochs: drops per epoch; with --iterations, drops in all",
        least=1,
    ),
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
        "parts of variables' names become patterns of our names; the default is --weight-decay-exclude vectors",
        count="some",
    ),
    part_of("--lars-weight-decay", "number", None, "weight-decay", "LARS's decay"),
    part_of("--lars-eeta", "number", "0.001", "lars-eeta", "the same"),
    becomes(
        "--weight-decay",
        "number",
        None,
        "weight-decay weight-decay-exclude lars-skip",
        weight_decay,
        "the same; on ImageNet norms are not decayed, on CIFAR everything is",
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
        "parts of variables' names become patterns of our names: fc1 is fc, b4 is layer4, beta is .*bn1/bias and so on",
        count="some",
    ),
    same("--init-path", "text", effect="the same: a checkpoint of Falconet, or a safetensors or torch file of weights"),
)
