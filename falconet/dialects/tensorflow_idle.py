"""What means nothing beside other options of a line of the TensorFlow program: refused as there, or said."""

from collections.abc import Callable, Iterable, Sequence

from falconet.dialects import tensorflow_facts as facts
from falconet.dialects.table import Effect, Say
from falconet.dialects.values import Values
from falconet.errors import ConfigError

OF_FAMILY = {  # options that only one family of models had
    "efficientnet": (
        *("--dropout-rate", "--block-survival-prob", "--no-se", "--depth-divisor", "--top-width", "--use-relu"),
        *("--expand-ratio", "--norm-epsilon", "--proxy-norm", "--proxy-epsilon", "--no-proxy-recompute"),
        *("--width-coefficient", "--depth-coefficient"),
    ),
    "resnext": ("--convolution-groups", "--widenet"),
    "squeezenet": ("--use-bypass",),
}
_Holds = Callable[[Values], bool]


def refuse_other_families(old: Values) -> None:
    """Theirs knew the options of the chosen model alone."""
    for family, names in OF_FAMILY.items():
        for name in names:
            if old.given(name) and facts.family(old) != family:
                raise ConfigError(f"{name}: is for --model {family}, and this is {facts.family(old)}")


def without_effect(old: Values) -> Iterable[Effect]:
    """One line for each option of a training that another one makes idle."""
    for names, holds, why in _NEEDS:
        given = [name for name in names if old.given(name)]
        if given and not holds(old):
            yield Say(f"{', '.join(given)}: no effect {why}")


def _rule(name: str) -> _Holds:
    return lambda old: facts.optimiser(old) == name


def _schedule(name: str) -> _Holds:
    return lambda old: old.text("--lr-schedule") == name


def _by_updates_alone(old: Values) -> bool:
    return old.has("--iterations") and not old.has("--epochs")


def _has_norm(old: Values, *, batch: bool) -> bool:
    """Of a model without norms that is said elsewhere."""
    return facts.family(old) == "squeezenet" or facts.uses_batch_norm(old) is batch


_NEEDS: Sequence[tuple[tuple[str, ...], _Holds, str]] = (
    (
        ("--momentum",),
        lambda old: facts.optimiser(old) != "SGD",
        "with --optimiser SGD, which has none; --optimiser momentum has it",
    ),
    (
        ("--rmsprop-decay", "--rmsprop-base-decay-exp", "--rmsprop-epsilon"),
        _rule("RMSprop"),
        "without --optimiser RMSprop",
    ),
    (
        ("--lars-epsilon", "--lars-skip-list", "--lars-weight-decay", "--lars-eeta"),
        _rule("LARS"),
        "without --optimiser LARS",
    ),
    (
        ("--weight-decay",),
        lambda old: facts.optimiser(old) != "LARS" or not old.given("--lars-weight-decay"),
        "beside --lars-weight-decay",
    ),
    (("--learning-rate-decay", "--learning-rate-schedule"), _schedule("stepped"), "without --lr-schedule stepped"),
    (("--lr-decay-rate", "--lr-drops"), _schedule("exponential"), "without --lr-schedule exponential"),
    (
        ("--poly-lr-decay-power", "--poly-lr-end-ratio", "--abs-end-learning-rate"),
        _schedule("polynomial_decay_lr"),
        "without --lr-schedule polynomial_decay_lr",
    ),
    (
        ("--warmup-epochs",),
        lambda old: not _by_updates_alone(old) or old.text("--lr-schedule") == "polynomial_decay_lr",
        "with --iterations alone; it needs --epochs",
    ),
    (("--log-freq",), _by_updates_alone, "without --iterations alone; --logs-per-epoch counts"),
    (("--logs-per-epoch",), lambda old: not _by_updates_alone(old), "with --iterations alone; --log-freq counts"),
    (("--wandb-project",), lambda old: old.flag("--wandb"), "without --wandb"),
    (("--config-path",), lambda old: old.given("--config"), "without --config"),
    (("--max-cross-replica-buffer-size",), lambda old: facts.replicas(old) > 1, "with one replica"),
    (("--pipeline-schedule",), lambda old: old.flag("--pipeline"), "without --pipeline"),
    (("--BN-decay",), lambda old: _has_norm(old, batch=True), "without --batch-norm"),
    (("--groups",), lambda old: _has_norm(old, batch=False), "without --group-norm"),
    (("--cutmix-version",), lambda old: old.number("--cutmix-lambda") < 1, "without a --cutmix-lambda below 1"),
    (
        ("--ckpt-epochs-offset",),
        lambda old: bool(old.whole("--epochs-per-ckpt") or old.whole("--ckpts-per-epoch")),
        "with --ckpts-per-epoch 0",
    ),
)
